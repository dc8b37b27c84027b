"""Verdicts: the paper's own rows reproduce the paper, changed rows do not, missing rows are not testable."""

import pandas as pd
import pytest
from claim_rows import BOUNDS, PAPER, STATEMENTS, frame, section_52, verdict_of

from experiments.claims import CLAIMS, VERDICTS, as_frame, claim, counts, decide, judge
from experiments.claims.bounds import Bound, described, holds_all, read_bounds
from experiments.claims.paper import FIGURE_FILES, as_rows, read_claims, read_figure
from experiments.claims.rows import Rows
from punica.measure.records import COLUMNS, Row

LATER = {"C45", "C46", "C47", "C48", "C49", "C50"}  # norm and cluster: their figures come later
REPRODUCED, SHAPE, DIFFERS, NOT_TESTABLE = VERDICTS


@pytest.fixture(scope="module")
def paper_rows():
    frames = [as_rows(read_figure(PAPER, figure)) for figure in FIGURE_FILES if figure != "13"]
    return pd.concat([*frames, section_52()], ignore_index=True)


def test_the_paper_reproduces_itself(paper_rows):
    verdicts = judge(paper_rows, PAPER)
    assert [v.id for v in verdicts if v.verdict != REPRODUCED] == sorted(LATER)
    assert all("no rows of" in v.reason for v in verdicts if v.id in LATER)
    assert counts(verdicts) == {REPRODUCED: 46, SHAPE: 0, DIFFERS: 0, NOT_TESTABLE: 6}


@pytest.mark.parametrize("id", sorted(CLAIMS))
def test_the_paper_passes_its_shape_tests(paper_rows, id):
    finding = CLAIMS[id](Rows(paper_rows))
    bounds = BOUNDS[id]
    assert holds_all(bounds["shape"], finding.quantities) is True
    bounded = {bound.quantity for test in bounds.values() for bound in test}
    assert set(finding.quantities) <= bounded, "a quantity that no bound speaks about"
    unsaid = {"released_rule", "stall_over_step"}  # what the paper does not give
    assert bounded - set(finding.quantities) <= unsaid, "a bound on a quantity that is never computed"


def test_every_claim_has_a_function_and_both_tests():
    assert set(CLAIMS) == set(BOUNDS) == set(STATEMENTS) - LATER
    for id, tests in BOUNDS.items():
        assert all(tests.values()), id
        assert all(bound.reading for test in tests.values() for bound in test), id


# claim, rows to change (a query), factor -> verdict
CHANGES = [
    ("C01", "figure == '1' and panel == 'decode' and seq_len == 128 and batch_size == 32", 1.5, DIFFERS),
    ("C02", "figure == '1' and panel == 'decode' and seq_len == 2048 and batch_size == 32", 0.65, SHAPE),
    ("C02", "figure == '1' and panel == 'decode' and seq_len == 2048 and batch_size == 32", 1.5, DIFFERS),
    ("C03", "figure == '1' and panel == 'decode' and seq_len == 1536 and batch_size == 32", 0.96, SHAPE),
    ("C03", "figure == '1' and panel == 'decode' and seq_len == 1536 and batch_size == 32", 0.8, DIFFERS),
    ("C04", "figure == '1' and panel == 'prefill' and batch_size > 16", 0.5, DIFFERS),
    ("C06", "figure == '7' and workload == 'Distinct' and batch_size == 64 and unit == 'FLOP/s'", 0.6, SHAPE),
    ("C06", "figure == '7' and workload == 'Distinct' and batch_size == 64 and unit == 'FLOP/s'", 0.4, DIFFERS),
    ("C07", "figure == '7' and workload == 'Identical' and batch_size == 30", 0.5, REPRODUCED),
    ("C07", "figure == '7' and workload == 'Identical' and batch_size == 64", 0.5, DIFFERS),
    ("C08", "figure == '7' and workload == 'Skewed' and batch_size == 64", 0.92, SHAPE),
    ("C08", "figure == '7' and workload == 'Distinct' and batch_size == 64", 2.0, DIFFERS),
    ("C09", "figure == '8' and workload == 'Distinct' and batch_size == 64 and system == 'SGMV'", 0.5, SHAPE),
    ("C09", "figure == '8' and workload == 'Distinct' and batch_size == 64 and system == 'SGMV'", 1.5, DIFFERS),
    ("C10", "figure == '8' and workload == 'Skewed' and batch_size == 64 and system == 'SGMV'", 1.25, DIFFERS),
    ("C11", "figure == '8' and workload == 'Identical' and batch_size == 64 and system == 'SGMV'", 1.105, SHAPE),
    ("C12", "figure == '8' and workload == 'Identical' and system == 'SGMV' and batch_size == 5", 1.5, DIFFERS),
    ("C13", "figure == '8' and system == 'Loop'", 0.68, SHAPE),
    ("C13", "figure == '8' and system == 'Loop'", 0.5, DIFFERS),
    ("C14", "figure in ('8', 'README backbone-vs-sgmv') and system == 'Loop'", 0.1, SHAPE),
    ("C15", "figure == '8' and system == 'BMM' and batch_size == 40 and workload == 'Skewed'", 1.2, DIFFERS),
    ("C16", "figure == '8' and system == 'Gather-BMM' and batch_size == 20 and workload == 'Skewed'", 0.8, REPRODUCED),
    ("C16", "figure == '8' and system == 'Gather-BMM' and batch_size == 32 and workload == 'Skewed'", 0.8, DIFFERS),
    ("C17", "figure == '8' and system == 'BMM' and workload == 'Identical'", 0.8, DIFFERS),
    ("C19", "figure == '9' and batch_size == 1 and rank == 64 and workload == 'Distinct'", 1.5, DIFFERS),
    ("C20", "figure == '9' and batch_size == 64 and rank == 64 and workload == 'Distinct'", 0.8, SHAPE),
    ("C20", "figure == '9' and batch_size == 64 and rank == 64 and workload == 'Distinct'", 2.0, DIFFERS),
    ("C21", "figure == '9' and batch_size == 64 and rank == 32 and workload == 'Uniform'", 1.3, DIFFERS),
    ("C22", "figure == '10' and batch_size == 32 and seq_len == 512 and workload == 'Distinct'", 1.16, SHAPE),
    ("C22", "figure == '10' and batch_size == 32 and seq_len == 512 and workload == 'Distinct'", 1.3, DIFFERS),
    ("C23", "figure == '10' and batch_size == 32 and seq_len == 2048 and workload == 'Uniform'", 0.7, DIFFERS),
    ("C24", "figure == '10' and batch_size == 32 and seq_len == 512 and workload == 'Distinct'", 1.05, SHAPE),
    ("C24", "figure == '10' and batch_size == 32 and seq_len == 512 and workload == 'Skewed'", 1.2, DIFFERS),
    ("C25", "figure == '10' and batch_size == 32 and workload == 'Identical'", 2.0, DIFFERS),
    ("C26", "figure == '11' and system == 'punica' and workload == 'Distinct' and model == '7B'", 0.98, SHAPE),
    ("C26", "figure == '11' and system == 'punica' and workload == 'Distinct' and model == '7B'", 0.8, DIFFERS),
    ("C27", "figure == '11' and system == 'punica' and workload == 'Skewed' and model == '13B'", 0.97, SHAPE),
    ("C28", "figure == '11' and system == 'punica' and workload == 'Distinct' and model == '13B'", 0.88, SHAPE),
    ("C28", "figure == '11' and system == 'punica' and workload == 'Distinct' and model == '13B'", 0.7, DIFFERS),
    ("C29", "figure == '11' and system == 'punica'", 0.8, SHAPE),
    ("C29", "figure == '11' and system == 'punica'", 0.5, DIFFERS),
    ("C30", "figure == '11' and system == 'punica'", 0.65, SHAPE),
    ("C30", "figure == '11' and system == 'punica'", 0.3, DIFFERS),
    ("C31", "figure == '11' and system == 'punica' and model == '7B'", 0.9, SHAPE),
    ("C32", "figure == '11' and system == 'punica' and model == '7B'", 1.2, SHAPE),
    ("C32", "figure == '11' and system == 'hf_peft'", 20.0, DIFFERS),
    ("C33", "figure == '11' and system == 'continuous_batching' and workload == 'Distinct'", 1.5, SHAPE),
    ("C33", "figure == '11' and system == 'continuous_batching' and workload == 'Distinct'", 3.0, DIFFERS),
    ("C34", "figure == '11' and system == 'continuous_batching' and workload == 'Uniform'", 1.06, SHAPE),
    ("C34", "figure == '11' and system == 'continuous_batching' and workload == 'Uniform'", 1.2, DIFFERS),
    ("C38", "figure == '12' and system == 'punica' and workload == 'Distinct'", 0.96, SHAPE),
    ("C39", "figure == '12' and system == 'punica'", 0.8, SHAPE),
    ("C40", "figure == '12' and system == 'punica' and workload == 'Identical'", 0.8, DIFFERS),
    ("C41", "figure == '11' and metric == 'implied_time_per_step'", 2.0, SHAPE),
    ("C41", "figure == '11' and system == 'punica' and metric == 'throughput'", 0.5, DIFFERS),
    ("C42", "figure == 'text 5.2' and panel == 'layer'", 1.2, SHAPE),
    ("C42", "figure == 'text 5.2' and panel == 'model' and system == 'punica' and unit == 'ms'", 2.0, SHAPE),
    ("C42", "figure == 'text 5.2' and panel == 'model' and system == 'punica' and unit == 'ms'", 3.0, DIFFERS),
    ("C43", "figure == 'text 5.2' and panel == 'overlap' and metric == 'load_time'", 4.0, SHAPE),
    ("C43", "figure == 'text 5.2' and panel == 'overlap' and metric == 'load_time'", 8.0, DIFFERS),
    ("C51", "figure == 'README backbone-vs-sgmv' and workload == 'none' and batch_size == 64", 1.1, SHAPE),
    ("C51", "figure == 'README backbone-vs-sgmv' and workload == 'none' and batch_size == 64", 1.3, DIFFERS),
    ("C52", "figure == 'README backbone-vs-sgmv' and system == 'SGMV'", 1.5, SHAPE),
    ("C52", "figure == 'README backbone-vs-sgmv' and system == 'SGMV'", 2.0, DIFFERS),
]


@pytest.mark.parametrize(("id", "query", "factor", "verdict"), CHANGES, ids=[f"{c[0]}-x{c[2]}" for c in CHANGES])
def test_changed_rows_change_the_verdict(paper_rows, id, query, factor, verdict):
    changed = paper_rows[paper_rows["figure"].isin(paper_rows.query(query)["figure"]) | (id == "C25")].copy()
    hit = changed.query(query).index
    assert len(hit) > 0
    changed.loc[hit, "value"] *= factor
    assert verdict_of(changed, id).verdict == verdict


NO_ROWS_NEEDED = {"C05", "C18", "C35", "C36", "C37", "C44"}


def test_without_rows_only_arithmetic_is_judged():
    verdicts = judge(pd.DataFrame(columns=list(COLUMNS)), PAPER)
    assert {v.id for v in verdicts if v.verdict == REPRODUCED} == NO_ROWS_NEEDED
    assert {v.kind for v in verdicts if v.id in NO_ROWS_NEEDED} == {"simulated"}
    for verdict in verdicts:
        if verdict.id not in NO_ROWS_NEEDED:
            assert verdict.verdict == NOT_TESTABLE
            assert verdict.reason.startswith("no rows of")


@pytest.mark.parametrize("id", sorted(set(CLAIMS) - NO_ROWS_NEEDED))
def test_a_claim_without_its_rows_is_not_testable(paper_rows, id):
    """The rows of other figures are no help."""
    names = STATEMENTS[id].figure.replace("README", "README backbone-vs-sgmv").replace("abstract", "11")
    needed = names.split(", ")
    verdict = verdict_of(paper_rows[~paper_rows["figure"].isin(needed)], id)
    assert (verdict.verdict, verdict.our_value) == (NOT_TESTABLE, "")
    assert "no rows of figure" in verdict.reason


def laptop(figure, **columns):
    fixed = {"panel": "", "system": "", "workload": "", "rank": None, "seq_len": None, "unit": "ms"}
    fixed |= {"statistic": "median", "timer": "host_clock", "scale": "laptop"}
    fixed |= {"hardware": "cpu", "model": "llama-small", "figure": figure}
    return Row(**{**fixed, **columns})


def decode(batch_sizes, scale="laptop", timer="host_clock", seq_len=64, growth=1.2, **more):
    fixed = {"panel": "decode", "system": "backbone", "metric": "step_latency", "seq_len": seq_len}
    fixed |= {"scale": scale, "timer": timer, **more}
    return [
        laptop("1", batch_size=size, value=10 * (1 + (growth - 1) * (size - 1) / 31), **fixed) for size in batch_sizes
    ]


def test_small_model_and_short_lengths_stand_in_and_are_named():
    verdict = verdict_of(frame(decode([1, 2, 32])), "C01")
    assert verdict.verdict == REPRODUCED
    assert verdict.our_value == "1.20 (llama-small, len 64: 10 -> 12 ms)"
    assert verdict.hardware == "cpu"


def test_missing_batch_size_is_named():
    verdict = verdict_of(frame(decode([1, 2, 16])), "C01")
    assert verdict.verdict == NOT_TESTABLE
    assert verdict.reason == "batch size 32 was not measured (measured: 1, 2, 16)"


def test_smoke_rows_are_not_judged():
    verdict = verdict_of(frame(decode([1, 32], scale="smoke")), "C01")
    assert verdict.verdict == NOT_TESTABLE
    assert "scale=smoke" in verdict.reason


def test_largest_scale_and_the_operators_own_time_count():
    rows = decode([1, 32], scale="laptop", growth=5.0) + decode([1, 32], scale="paper", growth=1.1)
    assert verdict_of(frame(rows), "C01").our_value.startswith("1.10")
    rows = decode([1, 32], timer="host_clock", growth=5.0) + decode([1, 32], timer="cuda_graph", growth=1.1)
    assert verdict_of(frame(rows), "C01").our_value.startswith("1.10")


def test_the_latest_row_of_a_point_counts():
    rows = decode([1, 32], growth=1.1, date="2026-02-01") + decode([1, 32], growth=5.0, date="2026-01-01")
    assert verdict_of(frame(rows), "C01").our_value.startswith("1.10")


def test_quantiles_and_sample_counts_are_not_values():
    rows = decode([1, 32])
    fixed = {"panel": "decode", "system": "backbone", "metric": "step_latency", "seq_len": 64, "value": 99}
    for statistic, unit in (("p10", "ms"), ("p90", "ms"), ("count", "samples")):
        rows.append(laptop("1", batch_size=32, statistic=statistic, unit=unit, **fixed))
    assert verdict_of(frame(rows), "C01").our_value.startswith("1.20")


def serving(**throughput):
    """Figure 11 rows: system -> token/s on Distinct, Uniform, Skewed, Identical."""
    names = ("Distinct", "Uniform", "Skewed", "Identical")
    fixed = {"batch_size": 32, "rank": 16, "metric": "throughput", "unit": "token/s", "statistic": "value"}
    return [
        laptop("11", system=system, workload=workload, value=value, **fixed)
        for system, values in throughput.items()
        for workload, value in zip(names, values, strict=True)
    ]


LAPTOP_SERVING = {
    "punica": (900, 920, 930, 1000),
    "continuous_batching": (100, 102, 113, 1100),
    "static_batching": (95, 97, 104, 640),
    "hf_peft": (40, 41, 44, 200),
}


def test_released_index_rule_is_reported_beside_the_right_one():
    rows = frame(serving(**LAPTOP_SERVING, punica_last_admitted=(990, 1000, 1000, 1000)))
    verdict = verdict_of(rows, "C28")
    assert verdict.verdict == SHAPE
    assert verdict.our_value == "0.900 (llama-small); released index rule (D04) 0.990"
    assert verdict_of(rows, "C26").our_value.endswith("with the released index rule (D04) min/max 0.990")
    slow = frame(serving(**LAPTOP_SERVING, punica_last_admitted=(900, 1000, 1000, 1000)))
    assert verdict_of(slow, "C28").verdict == DIFFERS


def test_peft_mixed_batches_are_not_a_baseline_of_the_paper():
    rows = frame(serving(**LAPTOP_SERVING, hf_peft_mixed=(600, 600, 600, 600)))
    verdict = verdict_of(rows, "C29")
    assert verdict.quantities == "speedup=9"
    assert verdict.verdict == SHAPE
    assert "hf_peft_mixed" not in verdict.our_value


def test_a_model_that_was_not_measured_is_not_asked_for():
    rows = frame(serving(**LAPTOP_SERVING))
    assert verdict_of(rows, "C30").our_value == "llama-small: 9.00, 9.02, 8.23"
    assert verdict_of(rows, "C30").verdict == REPRODUCED  # each above 70 % of 12.10, 11.84, 10.33
    assert "13B" in verdict_of(rows, "C27").reason
    assert "full-length requests" in verdict_of(rows, "C25").reason


def test_step_time_comes_from_tokens_and_steps():
    rows = serving(**LAPTOP_SERVING)
    shares = {"share": 1 - 1000 / 1100}
    assert verdict_of(frame(rows), "C41").quantities == f"share={shares['share']:.6g}"
    assert verdict_of(frame(rows), "C41").verdict == SHAPE
    fixed = {"system": "punica", "workload": "Identical", "batch_size": 32, "rank": 16, "statistic": "value"}
    rows += [laptop("11", metric=name, value=n, **fixed) for name, n in (("total_tokens", 64_000), ("steps", 2_000))]
    verdict = verdict_of(frame(rows), "C41")
    assert verdict.our_value.startswith("2.91 ms, 9.1 % of the step")  # 64 s / 2000 steps = 32 ms
    assert verdict.verdict == REPRODUCED


def test_a_baseline_must_be_there():
    without = {name: values for name, values in LAPTOP_SERVING.items() if name != "continuous_batching"}
    assert "continuous_batching" in verdict_of(frame(serving(**without)), "C29").reason


@pytest.mark.parametrize(
    ("relation", "shape", "verdict"),
    [
        (True, True, REPRODUCED), (True, False, REPRODUCED), (True, None, REPRODUCED), (False, True, SHAPE),
        (None, True, SHAPE), (False, False, DIFFERS), (None, False, DIFFERS), (False, None, NOT_TESTABLE),
        (None, None, NOT_TESTABLE),
    ],
)  # fmt: skip
def test_verdict_from_two_tests(relation, shape, verdict):
    assert decide(relation, shape) == verdict


def bound(quantity="q", low=1.0, high=2.0, when="always"):
    return Bound("C01", "shape", quantity, low, high, when, "as stated")


@pytest.mark.parametrize(
    ("bounds", "quantities", "holds"),
    [
        ([bound()], {"q": 1.0}, True),
        ([bound()], {"q": 2.0}, True),
        ([bound()], {"q": 2.001}, False),
        ([bound()], {}, None),
        ([bound()], {"q": float("nan")}, None),
        ([bound(), bound("other")], {"q": 1.5}, None),
        ([bound(), bound("other")], {"q": 5.0}, False),
        ([bound(), bound("other", when="measured")], {"q": 1.5}, True),
        ([bound("other", when="measured")], {}, None),
        ([], {"q": 1.5}, None),
    ],
    ids=["low end", "high end", "outside", "absent", "nan", "one absent", "one fails", "optional", "only one", "none"],
)
def test_bounds(bounds, quantities, holds):
    assert holds_all(bounds, quantities) is holds


def test_bounds_read_like_a_sentence():
    infinite = float("inf")
    texts = [bound(low=-infinite), bound(high=infinite), bound(), bound(high=1.0), bound("p", when="measured")]
    assert described(texts) == "q <= 2, q >= 1, 1 <= q <= 2, q = 1, 1 <= p <= 2 (where measured)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("C01,shape,ratio,low,2,always,x", "line 2: low='low', high='2' must be numbers"),
        ("C01,shape,ratio,3,2,always,x", "line 2: low=3.0 is above high=2.0"),
        ("C01,form,ratio,1,2,always,x", "line 2: test is 'form'; it must be one of relation, shape"),
        ("C01,shape,ratio,1,2,often,x", "line 2: when is 'often'"),
    ],
    ids=["number", "order", "test", "when"],
)
def test_bad_bounds_name_the_line(tmp_path, line, words):
    (tmp_path / "claim_bounds.csv").write_text(f"claim,test,quantity,low,high,when,reading\n{line}\n")
    with pytest.raises(ValueError, match=words):
        read_bounds(tmp_path)


def test_bad_rows_are_refused(paper_rows):
    with pytest.raises(ValueError, match="miss the columns timer"):
        judge(paper_rows.drop(columns="timer"), PAPER)
    mixed = pd.concat([paper_rows, frame(decode([1, 32]))], ignore_index=True)
    with pytest.raises(ValueError, match="rows of a100, cpu are mixed"):
        judge(mixed, PAPER)


def test_one_function_per_claim():
    with pytest.raises(ValueError, match="C01 already has a function"):
        claim("C01")(lambda rows: None)


def test_table_has_one_line_per_claim(paper_rows):
    table = as_frame(judge(paper_rows, PAPER))
    assert list(table["id"]) == [statement.id for statement in read_claims(PAPER)]
    assert set(table["verdict"]) <= set(VERDICTS)
    assert table["relation_tested"][0] == "ratio <= 1.52"
