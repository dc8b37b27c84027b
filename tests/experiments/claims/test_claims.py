"""Verdicts: the paper's own rows reproduce the paper, changed rows do not, missing rows are not testable."""

import re

import pandas as pd
import pytest
from claim_rows import BOUNDS, PAPER, STATEMENTS, decode, frame, laptop, serving, verdict_of

from experiments.claims import CLAIMS, VERDICTS, as_frame, claim, counts, judge
from experiments.claims.bounds import Outcome, outcome_of
from experiments.claims.judge import command, scales_of
from experiments.claims.rows import Rows
from experiments.facts.paper import read_claims
from experiments.measure.records import COLUMNS

NO_ROWS_NEEDED = {"C05", "C18", "C35", "C36", "C37", "C44"}
(
    REPRODUCED, SHAPE, NOISE, DIFFERS, ARITHMETIC, SIMULATED_TOO, SIMULATED_SHAPE, NOT_MEASURED, NOT_TESTABLE,
    NOT_IMPLEMENTED,
) = VERDICTS  # fmt: skip


def test_the_paper_reproduces_itself(paper_rows):
    verdicts = judge(paper_rows, PAPER)
    by_arithmetic = NO_ROWS_NEEDED - {"C37"}  # of C36 the paper has only the replay, of C37 a measured gap
    assert {v.id for v in verdicts if v.verdict == ARITHMETIC} == by_arithmetic
    assert counts(verdicts) == {**dict.fromkeys(VERDICTS, 0), REPRODUCED: 44, SHAPE: 3, ARITHMETIC: 5}
    assert {v.id for v in verdicts if v.verdict == SHAPE} == {"C23", "C25", "C47"}  # no rows reproduce these


def test_a_simulated_hour_that_misses_the_papers_numbers_says_so_and_why(paper_rows):
    mine = (paper_rows["figure"] == "13") & (paper_rows["panel"] != "nothing")
    simulated = {"panel": "simulated hour", "system": "punica", "kind": "simulated", "cost_model": "a cost"}
    rows = pd.concat([paper_rows[~mine], paper_rows[mine].assign(**simulated)])
    exact = verdict_of(rows, "C48")
    assert (exact.verdict, exact.why) == (SIMULATED_TOO, "")
    rows.loc[rows["metric"] == "max_active_gpus", "value"] = 10.0
    fewer = verdict_of(rows, "C48")
    assert fewer.verdict == SIMULATED_SHAPE
    assert fewer.why.startswith("peak is 10, not peak >= 16. ")
    rows.loc[rows["metric"] == "active_gpus_60s_mean", "value"] *= 3
    assert verdict_of(rows, "C48").verdict == DIFFERS


@pytest.mark.parametrize(
    ("id", "metric", "values", "said"),
    [
        ("C46", "share_of_active_cells_batch_ge_31", (0.58, 0.62, 0.68), "0.620 (0.580 to 0.680)"),
        ("C47", "correlation_of_throughput_and_request_rate", (0.8, 0.96, 0.99), "0.9600 (0.8000 to 0.9900)"),
        ("C48", "correlation_of_active_gpus_and_throughput", (0.9, 0.95, 0.97), "correlation 0.95 (0.9 to 0.97)"),
        ("C49", "median_changes_from_idle_to_active", (1.0, 2.5, 4.0), "median 2.5 (1 to 4)"),
        ("C50", "throughput_of_an_active_gpu_at_the_peak", (400.0, 700.0, 900.0), "per active GPU 700 (400 to 900)"),
    ],
)
def test_a_simulated_hour_is_judged_on_the_mean_over_its_seeds(paper_rows, id, metric, values, said):
    simulated = {"panel": "simulated hour", "system": "punica", "kind": "simulated", "cost_model": "a cost"}
    first = paper_rows[paper_rows["figure"] == "13"].assign(**simulated)
    one = first.iloc[:1].assign(t_s=float("nan"), gpu=float("nan"))
    of_one_gpu = {"panel": "simulated Figure 11", "workload": "Skewed", "model": "llama2-7b", "metric": "throughput"}
    alone = pd.concat([paper_rows.drop(first.index), first, one.assign(**of_one_gpu, value=1000.0)], ignore_index=True)
    assert verdict_of(alone, id).our_value.endswith("; one seed (steps: a cost)")
    ends = zip(("_low", "_mean", "_high"), values, strict=True)
    told = [one.assign(metric="share_of_active_cells_batch_ge_31_mean", value=0.7)][id == "C46" :]
    told += [one.assign(metric=f"{metric}{end}", value=value) for end, value in ends]
    rows = pd.concat([alone, *told, one.assign(metric="seeds", value=3.0)], ignore_index=True)
    verdict = verdict_of(rows, id)
    assert (verdict.verdict, said in verdict.our_value) == (SIMULATED_SHAPE, True)
    assert verdict.our_value.endswith("; means and spans over 3 seeds (steps: a cost)")
    rows.loc[rows["metric"] == f"{metric}_mean", "value"] = 3.5 if id == "C49" else 0.4
    assert verdict_of(rows, id).verdict == DIFFERS


@pytest.mark.parametrize("id", sorted(CLAIMS))
def test_the_paper_passes_its_shape_tests(paper_rows, id):
    finding = CLAIMS[id](Rows(paper_rows))
    bounds = BOUNDS[id]
    assert outcome_of(bounds["shape"], finding.quantities) is Outcome.HOLDS
    bounded = {bound.quantity for test in bounds.values() for bound in test}
    assert set(finding.quantities) <= bounded, "a quantity that no bound speaks about"
    unsaid = {"released_rule", "stall_over_step", "measured_mean_batch"}  # what the paper does not give
    assert bounded - set(finding.quantities) <= unsaid, "a bound on a quantity that is never computed"


def test_every_claim_has_a_function_and_both_tests():
    assert set(CLAIMS) == set(BOUNDS) == set(STATEMENTS)
    for id, tests in BOUNDS.items():
        assert all(tests.values()), id
        assert all(bound.reading for test in tests.values() for bound in test), id


def test_without_rows_only_arithmetic_is_judged():
    verdicts = judge(pd.DataFrame(columns=list(COLUMNS)), PAPER)
    assert {v.id for v in verdicts if v.verdict == ARITHMETIC} == NO_ROWS_NEEDED
    assert {v.kind for v in verdicts if v.id in NO_ROWS_NEEDED} == {"simulated"}
    for verdict in verdicts:
        if verdict.id not in NO_ROWS_NEEDED:
            assert verdict.verdict in (NOT_MEASURED, NOT_IMPLEMENTED)
            assert verdict.reason


@pytest.mark.parametrize("id", sorted(set(CLAIMS) - NO_ROWS_NEEDED))
def test_a_claim_without_its_rows_is_not_measured_and_says_how_it_would_be(paper_rows, id):
    """The rows of other figures are no help."""
    names = STATEMENTS[id].figure.replace("README", "README backbone-vs-sgmv").replace("abstract", "11")
    needed = names.split(", ")
    others = paper_rows[~paper_rows["figure"].isin(needed)]
    verdict, scripts = verdict_of(others, id), list(scales_of(STATEMENTS[id], "a100", Rows(others)))
    assert (verdict.verdict, verdict.our_value) == (NOT_MEASURED if scripts else NOT_IMPLEMENTED, "")
    if scripts:
        assert "no rows of figure" in verdict.reason
        assert verdict.command.startswith(f"make figure FIG={scripts[0].partition('_')[0]}")
        assert 'ARGS="scale=paper' in verdict.command  # an A100


def test_a_claim_about_a_larger_model_is_measured_with_it_and_not_on_a_cpu():
    serves = frame(serving(**LAPTOP_SERVING))
    on_cpu = verdict_of(serves, "C27")
    assert on_cpu.verdict == NOT_TESTABLE
    assert on_cpu.reason.startswith("no model stands in for 13B on a CPU")
    assert on_cpu.command == ""
    on_gpu = verdict_of(serves.assign(hardware="h200", scale="gpu"), "C27")
    assert on_gpu.verdict == NOT_MEASURED
    assert on_gpu.command == 'make figure FIG=fig11 ARGS="scale=gpu model=llama2-13b"'


@pytest.mark.parametrize(
    ("hardware", "scales", "wanted"),
    [
        ("cpu", {}, "make figure FIG=fig10,fig11"),
        ("cpu", {"10": "laptop", "11": "laptop"}, "make figure FIG=fig10,fig11"),
        ("h200", {}, 'make figure FIG=fig10,fig11 ARGS="scale=paper"'),
        ("h200", {"10": "gpu", "11": "gpu"}, 'make figure FIG=fig10,fig11 ARGS="scale=gpu"'),
        ("h200", {"10": "gpu", "11": "paper"},
         'make figure FIG=fig10 ARGS="scale=gpu" && make figure FIG=fig11 ARGS="scale=paper"'),
    ],
)  # fmt: skip
def test_a_command_measures_at_the_scales_of_the_rows(paper_rows, hardware, scales, wanted):
    known = paper_rows[paper_rows["figure"].isin(list(scales))]
    assert command(STATEMENTS["C25"], hardware, Rows(known.assign(scale=known["figure"].map(scales)))) == wanted


def test_a_claim_without_a_function_is_not_implemented(paper_rows, monkeypatch):
    """As one is that somebody adds to claims.csv."""
    monkeypatch.delitem(CLAIMS, "C45")
    verdict = next(verdict for verdict in judge(paper_rows, PAPER) if verdict.id == "C45")
    assert (verdict.verdict, verdict.reason) == (NOT_IMPLEMENTED, "nothing here computes section 6 of the text")


def test_a_failed_shape_test_is_never_reproduced(paper_rows):
    """C16: the order at batch 32 still holds, the one at batch 20 does not."""
    changed = paper_rows.copy()
    cell = "figure == '8' and system == 'Gather-BMM' and batch_size == 20 and workload == 'Skewed'"
    changed.loc[changed.query(cell).index, "value"] *= 0.8
    verdict = verdict_of(changed, "C16")
    assert verdict.verdict == DIFFERS


def test_a_ratio_of_systems_counts_where_the_papers_models_run_on_a_data_centre_gpu(paper_rows):
    def on(hardware, model="llama2-7b"):
        rows = paper_rows[paper_rows["figure"] == "11"].replace({"model": {"7B": model}})
        rows = rows[rows["model"] == model].assign(hardware=hardware)
        return verdict_of(rows, "C29").verdict

    assert on("h200") == on("a100-80g") == REPRODUCED
    assert on("h200", model="llama-small") == on("cpu", model="llama-small") == on("rtx-4090") == SHAPE


@pytest.mark.parametrize("id", ["C14", "C41", "C42"])
def test_absolute_times_count_on_an_a100(paper_rows, id):
    assert verdict_of(paper_rows.assign(hardware="a100-80g"), id).verdict == REPRODUCED
    assert verdict_of(paper_rows.assign(hardware="h200"), id).verdict == SHAPE


def test_what_the_engine_measured_is_judged_beside_a_replay():
    batch = {"system": "punica", "workload": "Distinct", "batch_size": 32, "rank": 16, "statistic": "value"}

    def streamed(requests, mean):
        stream = (("stream_requests", requests), ("stream_steps", 2000), ("stream_mean_batch_size", mean))
        return frame(serving(**LAPTOP_SERVING) + [laptop("11", metric=name, value=n, **batch) for name, n in stream])

    assert verdict_of(streamed(1000, 31.0), "C36").verdict == REPRODUCED
    differs = verdict_of(streamed(1000, 25.6), "C36")
    assert (differs.verdict, differs.kind) == (DIFFERS, "measured")
    assert verdict_of(streamed(256, 25.6), "C36").verdict == ARITHMETIC  # the claim is about 1000 requests or more


@pytest.mark.parametrize("mean", [25.6, 31.0])
def test_windows_that_are_drawn_to_agree_with_the_replay_do_not_judge_it(mean):
    cell = {"system": "punica", "workload": "Distinct", "batch_size": 32, "rank": 16, "statistic": "value"}
    drawn = (("requests", 1000), ("steps", 31416), ("window_steps", 32), ("mean_batch_size", mean))
    rows = frame(serving(**LAPTOP_SERVING) + [laptop("11", metric=name, value=n, **cell) for name, n in drawn])
    judged = verdict_of(rows, "C36")
    assert (judged.verdict, judged.kind) == (ARITHMETIC, "simulated")


def test_small_model_and_short_lengths_stand_in_and_are_named():
    verdict = verdict_of(frame(decode([1, 2, 32])), "C01")
    assert verdict.verdict == REPRODUCED
    assert verdict.our_value == "1.20 (llama-small, len 64: 10 -> 12 ms)"
    assert verdict.hardware == "cpu"


def test_missing_batch_size_is_named():
    verdict = verdict_of(frame(decode([1, 2, 16])), "C01")
    assert verdict.verdict == NOT_MEASURED
    assert verdict.reason == "batch size 32 was not measured (measured: 1, 2, 16)"


def test_smoke_rows_are_not_judged():
    verdict = verdict_of(frame(decode([1, 32], scale="smoke")), "C01")
    assert verdict.verdict == NOT_MEASURED
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
    flat = verdict_of(rows, "C26")
    assert flat.our_value.startswith("released index rule (D04) min/max 0.990; an adapter per request: min/max 0.900")
    assert flat.verdict == REPRODUCED
    unmeasured = verdict_of(frame(serving(**LAPTOP_SERVING)), "C26")
    assert unmeasured.our_value.startswith("released index rule (D04) not measured; an adapter per request")
    assert unmeasured.verdict == SHAPE
    slow = frame(serving(**LAPTOP_SERVING, punica_last_admitted=(900, 1000, 1000, 1000)))
    assert verdict_of(slow, "C26").verdict == DIFFERS
    below_bytes = {**LAPTOP_SERVING, "punica": (700, 920, 930, 1000)}
    assert verdict_of(frame(serving(**below_bytes, punica_last_admitted=(1, 1, 1, 1))), "C26").verdict == DIFFERS
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
    assert verdict_of(rows, "C30").verdict == DIFFERS  # Uniform gains more than Distinct
    assert "13B" in verdict_of(rows, "C27").reason
    assert verdict_of(rows, "C25").verdict == NOT_TESTABLE


def test_step_time_comes_from_tokens_and_steps():
    rows = serving(**{**LAPTOP_SERVING, "punica": (950, 960, 970, 1000)})
    assert verdict_of(frame(rows), "C41").quantities == "identical_share=0.0909091; distinct_share=0.136364"
    assert verdict_of(frame(rows), "C41").verdict == SHAPE
    fixed = {"system": "punica", "workload": "Identical", "batch_size": 32, "rank": 16, "statistic": "value"}
    rows += [laptop("11", metric=name, value=n, **fixed) for name, n in (("total_tokens", 64_000), ("steps", 2_000))]
    verdict = verdict_of(frame(rows), "C41")
    assert verdict.our_value.startswith("Identical 9.1 % (2.91 ms), Distinct 13.6 % of")  # 64 s / 2000 steps = 32 ms
    assert verdict.verdict == SHAPE  # 2.91 ms is no time of an A100


def test_a_baseline_must_be_there():
    without = {name: values for name, values in LAPTOP_SERVING.items() if name != "continuous_batching"}
    assert "continuous_batching" in verdict_of(frame(serving(**without)), "C29").reason


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


@pytest.mark.parametrize(
    ("distinct", "identical", "verdict"),
    [(950, 1000, SHAPE), (950, 1100, SHAPE), (950, 1110, DIFFERS), (900, 1000, DIFFERS)],
    ids=["both-in-bounds", "identical-free", "identical-faster-with-lora", "distinct-too-slow"],
)
def test_c41_is_judged_on_both_popularities_and_lora_makes_no_step_faster(distinct, identical, verdict):
    rows = serving(**{**LAPTOP_SERVING, "punica": (distinct, 960, 970, identical)})
    assert verdict_of(frame(rows), "C41").verdict == verdict


def test_c41_with_repeats_on_both_sides_of_nothing_is_within_noise():
    parts = [
        frame(serving(**{**LAPTOP_SERVING, "punica": (950, 960, 970, identical)})).assign(repeat=repeat)
        for repeat, identical in enumerate((1050, 1120, 1160))
    ]
    judged = verdict_of(pd.concat(parts, ignore_index=True), "C41")
    assert judged.quantities.startswith("identical_share=-0.0181818")
    assert judged.verdict == NOISE


def test_nothing_of_ours_is_called_by_the_name_of_a_system_of_the_paper():
    """The two policies run on this engine, so statements, values and reasons name the policy."""
    foreign = re.compile(r"vllm|fastertransformer|deepspeed|_batching", re.IGNORECASE)
    rows = frame(serving(**{**LAPTOP_SERVING, "punica": (90, 92, 93, 100)}))
    for statement in STATEMENTS.values():
        judged = verdict_of(rows, statement.id)
        assert not foreign.search(f"{judged.statement} {judged.our_value} {judged.why}"), statement.id
