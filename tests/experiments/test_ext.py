"""The studies of operators, added latency and FP8: every system computes the reference, or is not timed."""

import pytest
import torch
from fakes import composed

from experiments import ext_added_latency
from experiments import ext_fp8 as fp8
from experiments.benches import fp8_operator, operators
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows

ADDED, FP8 = ext_added_latency.EXPERIMENT, fp8.EXPERIMENT
SMALL = ("figure.batch_sizes=[1,7]",)
PAPER = ("figure.h1=4096", "figure.h2=11008", "figure.dtype=float16")


def settled(tmp_path, experiment, *overrides):
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def in_graphs(cfg, flush_mib):
    """`cfg` as if a GPU were timed by graphs, whose caches hold `flush_mib`."""
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", flush_mib
    return cfg


@pytest.mark.parametrize(
    ("experiment", "words", "points", "metrics"),
    [
        (ADDED, (*SMALL, "workload.names=[Distinct,Skewed]"), 4, {"latency", "base_latency", "added_latency"}),
        (FP8, (*SMALL, "adapters.ranks=[8]", "workload.names=[Distinct]"), 2 * 4 + 2,
         {"latency", "error", "bytes_read", "logit_error", "changed_greedy_tokens", "bytes"}),
    ],
    ids=["added-latency", "fp8"],
)  # fmt: skip
def test_every_system_is_measured_and_drawn_and_not_measured_again(tmp_path, experiment, words, points, metrics):
    outcome = run(composed(tmp_path, *words, "draw=true", name=experiment.name), experiment)
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], points, 3)
    rows = read_rows(outcome.rows_file)
    assert {row.metric for row in rows} == metrics
    latencies = [row.value for row in rows if row.metric == "latency" and row.statistic == "median"]
    assert len(latencies) == points - 2 * (experiment is FP8)
    assert min(latencies) > 0
    assert run(composed(tmp_path, *words, name=experiment.name), experiment).measured == 0


@pytest.mark.gpu
@pytest.mark.parametrize("experiment", [ADDED, FP8], ids=lambda one: one.name)
def test_they_measure_on_a_gpu(tmp_path, experiment):
    words = ["hardware=auto", "figure.h1=128", "figure.h2=256", "figure.batch_sizes=[7]"]
    words += ["system.names=[SGMV,FP8 w8a8]"] if experiment is FP8 else []  # which no model is computed with
    outcome = run(composed(tmp_path, *words, name=experiment.name), experiment)
    assert (outcome.failed, outcome.measured) == ([], outcome.points)
    assert "cuda_graph" in {row.timer for row in read_rows(outcome.rows_file)}


def test_bytes_by_arithmetic(tmp_path):
    figure = settled(tmp_path, FP8, *PAPER).figure
    assert fp8.bytes_read(figure, 64, 64, 16, "SGMV") == 64 * 16 * 15104 * 2 + 2 * 64 * 15104
    assert fp8.bytes_read(figure, 64, 64, 16, "FP8 e4m3") == 64 * (16 * 15104 + 4 * (16 + 11008)) + 2 * 64 * 15104


# added latency


@pytest.mark.parametrize("with_lora", [False, True], ids=["alone", "with-lora"])
def test_the_projection_is_checked_with_and_without_lora(tmp_path, with_lora, monkeypatch):
    cfg = in_graphs(settled(tmp_path, ADDED), 1)
    batches, weights = operators.problems(cfg, "Uniform", 7, 16), operators.projection(cfg)
    assert weights.nbytes > 1 << 20
    calls = ext_added_latency.checked_calls(batches, weights, with_lora)
    for place, batch in ((0, batches[0]), (len(batches) - 1, batches[-1])):
        batch.y.fill_(torch.nan)
        calls[place]()
        expected = batch.x @ weights[place % len(weights)] + (batch.expected() if with_lora else 0)
        torch.testing.assert_close(batch.y, expected, rtol=1e-4, atol=1e-4)
    if with_lora:
        monkeypatch.setattr(operators, "layer_call", lambda batch: lambda: None)
        with pytest.raises(CheckFailed, match="base projection with LoRA"):
            ext_added_latency.checked_calls(batches, weights, with_lora)


def test_what_is_added_is_the_median_of_paired_differences(tmp_path, monkeypatch):
    cfg = settled(tmp_path, ADDED, "figure.batch_sizes=[4]", "workload.names=[Distinct,Identical]")
    samples = {"base": [10.0, 30.0, 20.0], "Distinct": [12.0, 31.0, 25.0], "Identical": [11.0, 31.0, 21.0]}
    monkeypatch.setattr(operators, "microseconds", lambda cfg, calls: {name: samples[name] for name in calls})
    ((first, second),) = ADDED.together(ADDED.points(cfg))
    for readings, added in zip(ADDED.measure_together(cfg, [first, second]), (2.0, 1.0), strict=True):
        medians = {one.metric: one.value for one in readings if one.statistic == "median"}
        assert medians == {"added_latency": added, "base_latency": 20.0, "latency": medians["latency"]}


# adapters in FP8


@pytest.mark.parametrize(("system", "low", "high"), [("SGMV", 0, 1e-5), ("FP8 e4m3", 0.01, 0.06),
                                                    ("FP8 e5m2", 0.03, 0.12), ("FP8 w8a8", 0.02, 0.08)])  # fmt: skip
@pytest.mark.parametrize("workload", ["Distinct", "Identical"])
def test_every_system_computes_what_it_holds(tmp_path, workload, system, low, high):
    batches = operators.problems(settled(tmp_path, FP8), workload, 8, 16)
    calls, error = fp8_operator.checked_calls(batches, system)
    assert len(calls) == len(batches)
    assert low <= error <= high


def test_wrong_scales_fail_the_check(tmp_path, monkeypatch):
    cfg = settled(tmp_path, FP8)
    batches, real = operators.problems(cfg, "Distinct", 4, 16), fp8_operator.quantised
    found = [real(batches[0], torch.float8_e4m3fn)]
    wrong = found[0]._replace(b_scale=found[0].b_scale * 1.01)
    answers = iter([wrong, found[0]])  # to the call; to the reference
    monkeypatch.setattr(fp8_operator, "quantised", lambda *_: next(answers))
    with pytest.raises(CheckFailed, match="FP8 e4m3 differs"):
        fp8_operator.checked_calls(batches[:1], "FP8 e4m3")


def test_w8a8_is_let_through_for_its_roundings_and_not_for_another_scale():
    """Exact but for both roundings, one row of rank 16, 100 draws: within the tolerance; a quarter too much is not."""

    def rounded(values):
        scale = values.abs().amax() / 448
        return (values / scale).to(torch.float8_e4m3fn).double() * scale

    errors = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        x, a, b = (torch.randn(shape, generator=generator).double() for shape in ((256,), (16, 256), (128, 16)))
        exact, found = b @ (a @ x), b @ rounded(a @ rounded(x))
        operators.check("FP8 w8a8", found, exact, fp8_operator.W8A8_TOLERANCE)
        with pytest.raises(CheckFailed):
            operators.check("FP8 w8a8", 1.25 * found, exact, fp8_operator.W8A8_TOLERANCE)
        errors.append(float((found - exact).norm() / exact.norm()))
    assert max(errors) > 0.05  # what was allowed before
