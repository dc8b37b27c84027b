"""Verdicts: the paper's own rows reproduce the paper, changed rows do not, missing rows are named."""

from collections import Counter

import pandas as pd
import pytest
from claim_rows import BOUNDS, PAPER, STATEMENTS, decode, frame, laptop, serving, verdict_of

from experiments.claims import CLAIMS, VERDICTS, as_frame, claim, judge
from experiments.claims.bounds import Outcome, outcome_of
from experiments.claims.judge import scales_of
from experiments.claims.rows import Rows
from experiments.measure.records import COLUMNS, RowsError

NO_ROWS_NEEDED = {"C05", "C18", "C35", "C36", "C37", "C44"}
(
    REPRODUCED, SHAPE, NOISE, DIFFERS, ARITHMETIC, SIMULATED_TOO, SIMULATED_SHAPE, NOT_MEASURED, NOT_TESTABLE,
    NOT_IMPLEMENTED,
) = VERDICTS  # fmt: skip
CELL = {"system": "punica", "batch_size": 32, "rank": 16, "statistic": "value"}
LAPTOP_SERVING = {
    "punica": (900, 920, 930, 1000), "continuous_batching": (100, 102, 113, 1100),
    "static_batching": (95, 97, 104, 640), "hf_peft": (40, 41, 44, 200),
}  # fmt: skip


def served(extra=(), **systems):
    """Figure 11 of a laptop, some systems changed or added, with rows of other metrics."""
    return frame([*serving(**{**LAPTOP_SERVING, **systems}), *extra])


def test_the_paper_reproduces_itself(paper_rows):
    verdicts = judge(paper_rows, PAPER)
    by_arithmetic = NO_ROWS_NEEDED - {"C37"}  # of C36 the paper has only the replay, of C37 a measured gap
    assert {v.id for v in verdicts if v.verdict == ARITHMETIC} == by_arithmetic
    assert Counter(v.verdict for v in verdicts) == {REPRODUCED: 44, SHAPE: 3, ARITHMETIC: 5}
    assert {v.id for v in verdicts if v.verdict == SHAPE} == {"C23", "C25", "C47"}  # no rows reproduce these
    assert list(as_frame(verdicts)["id"]) == list(STATEMENTS)
    assert as_frame(verdicts)["quantities"][0].startswith("ratio=")


@pytest.mark.parametrize("id", sorted(CLAIMS))
def test_bounds_and_functions_are_about_the_same_quantities_and_the_paper_passes(paper_rows, id):
    assert set(CLAIMS) == set(BOUNDS) == set(STATEMENTS)
    finding, bounds = CLAIMS[id](Rows(paper_rows)), BOUNDS[id]
    assert outcome_of(bounds["shape"], finding.quantities) is Outcome.HOLDS
    assert all(found and all(bound.reading for bound in found) for found in bounds.values())
    bounded = {bound.quantity for test in bounds.values() for bound in test}
    assert set(finding.quantities) <= bounded, "a quantity that no bound speaks about"
    unsaid = {"released_rule", "stall_over_step", "measured_mean_batch"}  # what the paper does not give
    assert bounded - set(finding.quantities) <= unsaid, "a bound on a quantity that is never computed"


def simulated_hour(rows):
    return rows.assign(panel="simulated hour", system="punica", kind="simulated", cost_model="a cost")


def test_a_simulated_hour_that_misses_the_papers_numbers_says_so_and_why(paper_rows):
    mine = paper_rows["figure"] == "13"
    rows = pd.concat([paper_rows[~mine], simulated_hour(paper_rows[mine])])
    exact = verdict_of(rows, "C48")
    assert (exact.verdict, exact.why) == (SIMULATED_TOO, "")
    rows.loc[rows["metric"] == "max_active_gpus", "value"] = 10.0
    fewer = verdict_of(rows, "C48")
    assert fewer.verdict == SIMULATED_SHAPE
    assert fewer.why.startswith("peak is 10, not peak >= 16. ")
    rows.loc[rows["metric"] == "active_gpus_60s_mean", "value"] *= 3
    assert verdict_of(rows, "C48").verdict == DIFFERS


def test_without_rows_only_arithmetic_is_judged():
    verdicts = judge(pd.DataFrame(columns=list(COLUMNS)), PAPER)
    assert {v.id for v in verdicts if v.verdict == ARITHMETIC} == NO_ROWS_NEEDED
    assert {v.kind for v in verdicts if v.id in NO_ROWS_NEEDED} == {"simulated"}
    others = [v for v in verdicts if v.id not in NO_ROWS_NEEDED]
    assert all(v.verdict in (NOT_MEASURED, NOT_IMPLEMENTED) and v.reason for v in others)


@pytest.mark.parametrize("id", sorted(set(CLAIMS) - NO_ROWS_NEEDED))
def test_a_claim_without_its_rows_is_not_measured_and_says_how_it_would_be(paper_rows, id):
    """The rows of other figures are no help."""
    needed = STATEMENTS[id].figure.replace("README", "README backbone-vs-sgmv").replace("abstract", "11").split(", ")
    others = paper_rows[~paper_rows["figure"].isin(needed)]
    verdict, scripts = verdict_of(others, id), list(scales_of(STATEMENTS[id], "a100", Rows(others)))
    assert (verdict.verdict, verdict.our_value) == (NOT_MEASURED if scripts else NOT_IMPLEMENTED, "")
    if scripts:
        assert verdict.command.startswith(f"make figure FIG={scripts[0].partition('_')[0]}")
        assert 'ARGS="scale=paper' in verdict.command  # an A100


def test_a_claim_about_a_larger_model_is_measured_with_it_and_not_on_a_cpu():
    on_cpu = verdict_of(served(), "C27")
    assert (on_cpu.verdict, on_cpu.command) == (NOT_TESTABLE, "")
    on_gpu = verdict_of(served().assign(hardware="h200", scale="gpu"), "C27")
    assert on_gpu.verdict == NOT_MEASURED
    assert on_gpu.command == 'make figure FIG=fig11 ARGS="scale=gpu model=llama2-13b"'


def test_a_claim_without_a_function_is_not_implemented_and_none_has_two(paper_rows, monkeypatch):
    """As one is that somebody adds to claims.csv."""
    with pytest.raises(ValueError, match="C45 already has a function"):
        claim("C45")(lambda rows: None)
    monkeypatch.delitem(CLAIMS, "C45")
    assert verdict_of(paper_rows, "C45").verdict == NOT_IMPLEMENTED


def test_bad_rows_are_refused(paper_rows):
    with pytest.raises(ValueError, match="miss the columns timer"):
        judge(paper_rows.drop(columns="timer"), PAPER)
    mixed = pd.concat([paper_rows, frame(decode([1, 32]))], ignore_index=True)
    with pytest.raises(RowsError, match="rows of a100, cpu are mixed"):
        judge(mixed, PAPER)


def test_the_rows_that_count():
    """The largest scale, the newest row, and no quantiles or counts of samples."""
    fixed = {"panel": "decode", "system": "backbone", "metric": "step_latency", "seq_len": 64, "value": 99}
    rows = decode([1, 32], scale="gpu", growth=1.1, date="2026-02-01") + decode([1, 32], growth=5.0)
    rows += decode([1, 32], scale="gpu", growth=5.0, date="2026-01-01")
    for statistic, unit in (("p10", "ms"), ("p90", "ms"), ("count", "samples")):
        rows.append(laptop("1", batch_size=32, statistic=statistic, unit=unit, **{**fixed, "scale": "gpu"}))
    assert verdict_of(frame(rows), "C01").our_value.startswith("1.10")


@pytest.mark.parametrize(
    ("metrics", "verdict", "kind"),
    [
        ({"stream_requests": 1000, "stream_steps": 2000, "stream_mean_batch_size": 31.0}, REPRODUCED, "measured"),
        ({"stream_requests": 1000, "stream_steps": 2000, "stream_mean_batch_size": 25.6}, DIFFERS, "measured"),
        ({"stream_requests": 256, "stream_steps": 2000, "stream_mean_batch_size": 25.6}, ARITHMETIC, "simulated"),
        ({"requests": 1000, "steps": 31416, "window_steps": 32, "mean_batch_size": 25.6}, ARITHMETIC, "simulated"),
    ],
    ids=["a stream", "a stream of small batches", "too short a stream", "windows are drawn to agree with the replay"],
)
def test_a_whole_stream_is_judged_beside_a_replay(metrics, verdict, kind):
    rows = served([laptop("11", workload="Distinct", metric=name, value=n, **CELL) for name, n in metrics.items()])
    judged = verdict_of(rows, "C36")
    assert (judged.verdict, judged.kind) == (verdict, kind)


@pytest.mark.parametrize(
    ("id", "systems", "verdict"),
    [
        ("C26", {}, SHAPE),
        ("C26", {"punica_last_admitted": (990, 1000, 1000, 1000)}, REPRODUCED),
        ("C26", {"punica_last_admitted": (900, 1000, 1000, 1000)}, DIFFERS),
        ("C26", {"punica_last_admitted": (1, 1, 1, 1), "punica": (700, 920, 930, 1000)}, DIFFERS),
        ("C28", {"punica_last_admitted": (990, 1000, 1000, 1000)}, SHAPE),
        ("C28", {"punica_last_admitted": (900, 1000, 1000, 1000)}, DIFFERS),
        ("C29", {"hf_peft_mixed": (600, 600, 600, 600)}, SHAPE),  # which is no baseline of the paper
        ("C30", {}, DIFFERS),  # Uniform gains more than Distinct
        ("C25", {}, NOT_TESTABLE),
        ("C41", {"punica": (950, 960, 970, 1000)}, SHAPE),
        ("C41", {"punica": (950, 960, 970, 1100)}, SHAPE),  # Identical is free
        ("C41", {"punica": (950, 960, 970, 1110)}, DIFFERS),  # LoRA makes no step faster
        ("C41", {"punica": (900, 960, 970, 1000)}, DIFFERS),
    ],
)
def test_servers_of_a_laptop(id, systems, verdict):
    assert verdict_of(served(**systems), id).verdict == verdict


def test_values_of_servers():
    rows = served(punica_last_admitted=(990, 1000, 1000, 1000), hf_peft_mixed=(600, 600, 600, 600))
    assert verdict_of(rows, "C28").quantities == pytest.approx({"correct_rule": 0.9, "released_rule": 0.99})
    assert verdict_of(rows, "C26").quantities["released_min_over_max"] == pytest.approx(0.99)
    assert verdict_of(rows, "C29").quantities == pytest.approx({"speedup": 9})
    assert verdict_of(rows, "C30").our_value == "llama-small: 9.00, 9.02, 8.23"
    two = [laptop("11", workload="Identical", metric=name, value=n, **CELL)
           for name, n in (("total_tokens", 64_000), ("steps", 2_000))]  # fmt: skip
    shares = {"identical_share": 1 / 11, "distinct_share": 1.5 / 11}
    assert verdict_of(served(punica=(950, 960, 970, 1000)), "C41").quantities == pytest.approx(shares)
    timed = verdict_of(served(two, punica=(950, 960, 970, 1000)), "C41")  # 64 s / 2000 steps = 32 ms
    assert timed.quantities == pytest.approx(shares | {"extra_ms": 32 / 11})
    assert timed.verdict == SHAPE  # 2.91 ms is no time of an A100
