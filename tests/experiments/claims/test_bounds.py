"""Bounds: strict ends, classes of hardware, intervals; how two tests make a verdict; what a bad line says."""

import pytest

from experiments.claims import VERDICTS, decide
from experiments.claims.bounds import Bound, Outcome, outcome_of, read_bounds

REPRODUCED, SHAPE, NOISE, DIFFERS, _, _, _, NOT_MEASURED, *_ = VERDICTS

FAILS, WITHIN, MISSING, ELSEWHERE, HOLDS = Outcome


@pytest.mark.parametrize(
    ("relation", "shape", "verdict"),
    [
        (HOLDS, HOLDS, REPRODUCED), (HOLDS, FAILS, DIFFERS), (HOLDS, MISSING, NOT_MEASURED), (FAILS, HOLDS, SHAPE),
        (MISSING, HOLDS, SHAPE), (ELSEWHERE, HOLDS, SHAPE), (FAILS, FAILS, DIFFERS), (MISSING, FAILS, DIFFERS),
        (FAILS, MISSING, NOT_MEASURED), (WITHIN, HOLDS, NOISE), (HOLDS, WITHIN, NOISE), (FAILS, WITHIN, NOISE),
        (WITHIN, FAILS, DIFFERS), (ELSEWHERE, WITHIN, NOISE),
    ],
)  # fmt: skip
def test_verdict_from_two_tests(relation, shape, verdict):
    assert decide(relation, shape) == verdict


def bound(quantity="q", low=1.0, high=2.0, when="always", **more):
    return Bound("C01", "shape", quantity, when, "as stated", low, high, **more)


@pytest.mark.parametrize(
    ("bounds", "quantities", "outcome"),
    [
        ([bound()], {"q": 1.0}, HOLDS), ([bound()], {"q": 2.0}, HOLDS), ([bound()], {"q": 2.001}, FAILS),
        ([bound(strict="low")], {"q": 1.0}, FAILS), ([bound(strict="low")], {"q": 1.001}, HOLDS),
        ([bound(strict="high")], {"q": 2.0}, FAILS), ([bound()], {}, MISSING), ([], {"q": 1.5}, MISSING),
        ([bound()], {"q": float("nan")}, MISSING),
        ([bound(), bound("other")], {"q": 1.5}, MISSING),
        ([bound(), bound("other")], {"q": 5.0}, FAILS),
        ([bound(), bound("other", when="measured")], {"q": 1.5}, HOLDS),
        ([bound("other", when="measured")], {}, MISSING),
        ([bound(), bound("other", where="A100")], {"q": 1.5, "other": 1.5}, ELSEWHERE),
        ([bound(), bound("other", where="A100")], {"q": 3.0, "other": 1.5}, FAILS),
    ],
)  # fmt: skip
def test_one_test_of_exact_values(bounds, quantities, outcome):
    assert outcome_of(bounds, quantities, hardware="h200") is outcome


@pytest.mark.parametrize(
    ("value", "interval", "outcome"),
    [
        (1.5, (1.1, 1.9), HOLDS), (1.5, (1.0, 2.0), HOLDS), (1.5, (0.9, 1.6), WITHIN), (1.5, (0.5, 3.0), WITHIN),
        (3.0, (2.5, 4.0), FAILS), (3.0, (1.9, 4.0), WITHIN),
    ],
)  # fmt: skip
def test_a_bound_inside_the_interval_is_within_noise(value, interval, outcome):
    assert outcome_of([bound()], {"q": value}, {"q": interval}) is outcome
    assert outcome_of([bound(), bound("p")], {"q": value, "p": 0.5}, {"q": interval}) is FAILS  # p fails for certain


@pytest.mark.parametrize(
    ("where", "hardware", "models", "counts"),
    [
        ("any", "cpu", ("llama-small",), True), ("data centre", "h200", ("llama2-7b",), True),
        ("data centre", "h200", ("llama2-7b", "llama-small"), False), ("data centre", "a100-40g", ("7B", "13B"), True),
        ("data centre", "tesla-v100-sxm2-16gb", (), True), ("data centre", "rtx-4090", ("llama2-7b",), False),
        ("data centre", "cpu", ("llama2-7b",), False), ("A100", "a100-80g", ("llama2-7b",), True),
        ("A100", "h200", ("llama2-7b",), False), ("A100", "a100-80g", ("llama-tiny",), False),
    ],
)  # fmt: skip
def test_bounds_count_on_their_class_of_hardware(where, hardware, models, counts):
    assert bound(where=where).counts(hardware, models) is counts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("C01,shape,ratio,3,2,,always,any,x", "line 2: .*low=3.0 is above high=2.0"),
        ("C01,shape,ratio,1,2,,always,here,x", "line 2: where: .*'data centre' or 'A100'"),
    ],
)
def test_bad_bounds_name_the_line(tmp_path, line, words):
    (tmp_path / "claim_bounds.csv").write_text(f"claim,test,quantity,low,high,strict,when,where,reading\n{line}\n")
    with pytest.raises(ValueError, match=words):
        read_bounds(tmp_path)
