"""The studies of operators: padding, determinism (in Triton's interpreter), the paper's step, added latency, FP8.

Every system computes the reference, or is not timed; bytes are arithmetic; rows are measured and drawn.
"""

import json
from dataclasses import replace

import pytest
import torch
from fakes import composed, interpreted

from experiments import ext_added_latency, ext_determinism, ext_padding, ext_paper_step
from experiments import ext_fp8 as fp8
from experiments.benches import fp8_operator, operators
from experiments.harness import Point
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows

PADDING, DETERMINISM = ext_padding.EXPERIMENT, ext_determinism.EXPERIMENT
FIG08 = next(iter(experiments(["fig08"])))
STEP, ADDED, FP8 = ext_paper_step.EXPERIMENT, ext_added_latency.EXPERIMENT, fp8.EXPERIMENT
VARIANTS = ("deterministic", "deterministic, no PDL", "batch invariant", "atomics", "atomics, finer split")
SMALL = ("figure.batch_sizes=[1,7]",)
PAPER = ("figure.h1=4096", "figure.h2=11008", "figure.dtype=float16")


def settled(tmp_path, experiment, *overrides):
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def in_graphs(cfg, flush_mib):
    """`cfg` as if a GPU were timed by graphs, whose caches hold `flush_mib`."""
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", flush_mib
    return cfg


def calls_on(monkeypatch, experiment, cfg, point, batches):
    """The calls of `point` on `batches`."""
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "problems", lambda *_: batches)
        return experiment.calls(cfg, point)


@pytest.mark.parametrize(
    ("experiment", "words", "points", "metrics"),
    [
        (PADDING, (*SMALL, "workload.names=[Distinct,Skewed]"), 2 * 2 * 6,
         {"latency", "bytes_read", "bytes_over_true_rank"}),
        (STEP, (), 2 * 4, {"latency", "bytes_moved"}),  # a CPU's bandwidth is not in conf/hardware, so no floor
        (ADDED, (*SMALL, "workload.names=[Distinct,Skewed]"), 4, {"latency", "base_latency", "added_latency"}),
        (FP8, (*SMALL, "adapters.ranks=[8]", "workload.names=[Distinct]"), 2 * 4 + 2,
         {"latency", "error", "bytes_read", "logit_error", "changed_greedy_tokens", "bytes"}),
    ],
    ids=["padding", "paper-step", "added-latency", "fp8"],
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
@pytest.mark.parametrize("experiment", [STEP, ADDED, PADDING, DETERMINISM, FP8], ids=lambda one: one.name)
def test_they_measure_on_a_gpu(tmp_path, experiment):
    words = ["hardware=auto", "figure.h1=128", "figure.h2=256", "hardware.bandwidth_gb_s=1000"]
    words += [] if experiment is STEP else ["figure.batch_sizes=[7]"]
    words += ["system.names=[SGMV,FP8 w8a8]"] if experiment is FP8 else []  # which no model is computed with
    outcome = run(composed(tmp_path, *words, name=experiment.name), experiment)
    assert (outcome.failed, outcome.measured) == ([], outcome.points)
    assert "cuda_graph" in {row.timer for row in read_rows(outcome.rows_file)}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda cfg: ext_padding.bytes_read(cfg, 64, 64, 30), 2 * 15104 * 64 * 31),
        (lambda cfg: ext_padding.bytes_read(cfg, 64, 1, 64), 2 * 15104 * 128),
        (lambda cfg: ext_paper_step.bytes_moved(cfg, Point(batch_size=32, seq_len=128, rank=16)), 23770112),
        (lambda cfg: fp8.bytes_read(cfg.figure, 64, 64, 16, "SGMV"), 64 * 16 * 15104 * 2 + 2 * 64 * 15104),
        (lambda cfg: fp8.bytes_read(cfg.figure, 64, 64, 16, "FP8 e4m3"),
         64 * (16 * 15104 + 4 * (16 + 11008)) + 2 * 64 * 15104),
    ],
    ids=["mixed-ranks", "one-adapter", "step", "16-bits", "fp8"],
)  # fmt: skip
def test_bytes_by_arithmetic(tmp_path, found, expected):
    assert found(settled(tmp_path, PADDING, *PAPER)) == expected


# batches


# cost of padding


@pytest.mark.parametrize(("adapters", "length"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (64, 1)])
def test_a_round_holds_every_rank_equally_often(adapters, length):
    assert ext_padding.round_length(adapters, 4) == length
    ranks = [slot % 4 for slot in range(length * adapters)]
    assert {ranks.count(rank) for rank in range(4)} == {length * adapters // 4}


@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
def test_padded_and_true_rank_give_the_same(tmp_path, monkeypatch, workload):
    cfg, results = settled(tmp_path, PADDING), []
    for system in ("true rank", "padded"):
        point = Point(workload, system, workload, batch_size=7, rank=64)
        batches = PADDING.problems(cfg, point)
        calls = calls_on(monkeypatch, PADDING, cfg, point, batches)
        assert len(batches) == ext_padding.round_length(len(batches[0].sizes), 4) * len(calls)
        for batch in batches:
            batch.y.zero_()
        calls[0]()
        results.append(torch.stack([batch.y for batch in batches]))
        assert (batches[0].ranks is None) == (system == "padded")
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_true_ranks_cycle_over_the_adapters_and_what_is_above_is_not_read(tmp_path, monkeypatch):
    cfg, point = settled(tmp_path, PADDING), Point("", "true rank", "Distinct", batch_size=16, rank=64)
    (batch,) = PADDING.problems(cfg, point)
    ranks = batch.ranks[0, batch.slots].tolist()
    assert ranks == [8, 16, 32, 64] * 4
    expected = batch.expected()
    a, b = batch.a.clone(), batch.b.clone()
    for slot, rank in zip(batch.slots.tolist(), ranks, strict=True):
        assert a[slot, :rank].abs().min() > 0
        assert a[slot, rank:].count_nonzero() + b[slot, :, rank:].count_nonzero() == 0
        a[slot, rank:], b[slot, :, rank:] = torch.nan, torch.nan
    operators.layer_call(replace(batch, a=a, b=b, stored_b=b.mT.contiguous().mT))()
    torch.testing.assert_close(batch.y, expected, rtol=1e-4, atol=1e-4)
    batch.ranks.fill_(8)
    with pytest.raises(CheckFailed, match="SGMV differs"):
        calls_on(monkeypatch, PADDING, cfg, point, [batch])


# price of determinism


def test_determinism_has_points_on_a_gpu_alone(tmp_path, capsys):
    outcome = run(composed(tmp_path, name="ext_determinism"), DETERMINISM)
    assert (outcome.points, outcome.measured, outcome.failed, outcome.figures) == (0, 0, [], [])
    assert "it needs a GPU" in capsys.readouterr().err
    cfg = settled(tmp_path, DETERMINISM, "hardware=h200")
    assert len(DETERMINISM.points(cfg)) == len(VARIANTS) * 4 * len(cfg.figure.batch_sizes)


INTERPRETED = """
import sys, json
from fakes import composed
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness.catalogue import experiments
from experiments.harness.settings import settle
(experiment,) = experiments(["ext_determinism"])
cfg = settle(composed(sys.argv[1], *sys.argv[2:], name=experiment.name), experiment)
for group in experiment.together(OperatorExperiment.points(experiment, cfg)):
    for point, readings in zip(group, experiment.measure_together(cfg, group), strict=True):
        values = {f"{one.metric} {one.statistic}": one.value for one in readings}
        print(json.dumps([point.system, point.workload, point.batch_size, values]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_variant_is_right_and_its_bits_are_compared(tmp_path, dtype):
    words = (f"figure.dtype={dtype}", "figure.h1=600", "figure.h2=40", "figure.runs=2", "workload.names=[Skewed]",
             "figure.batch_sizes=[1,3]", "scale.warmup=0", "scale.repeats=1", "scale.min_repeats=1")  # fmt: skip
    found = [json.loads(line) for line in interpreted(INTERPRETED, str(tmp_path), *words)]
    assert [(rows, system) for system, _, rows, _ in found] == [(n, system) for n in (1, 3) for system in VARIANTS]
    for system, _, rows, values in found:
        assert values["latency median"] > 0
        # the interpreter runs programs one after the other, so even atomic adds repeat here
        assert values["outputs_differing_between_runs value"] == values["max_ulp_between_runs value"] == 0
        if rows == 1 or system == "batch invariant":
            assert values["outputs_differing_from_row_alone value"] == values["max_ulp_from_row_alone value"] == 0


@pytest.fixture
def problem():
    weights = torch.ones(1, 4, 3), torch.ones(1, 5, 4), torch.ones(1, 5, 4)
    return operators.Problem(torch.ones(2, 3), *weights, torch.zeros(2, 5), torch.zeros(2).long(), (2,))


def readings_of(monkeypatch, problem, variant):
    """Readings on `problem` of a system whose calls `variant(problem)` makes."""
    atomics = pytest.importorskip("experiments.benches.atomics")
    monkeypatch.setitem(atomics.VARIANTS, "atomics", variant)
    runs = ext_determinism.between_runs(problem, "atomics", 4)
    alone = ext_determinism.from_row_alone(problem, "atomics")
    return [[one.value for one in ext_determinism._bits("", *found)] for found in (runs, alone)]


def test_bits_that_change_between_runs_are_seen(monkeypatch, problem):
    calls = []

    def drifting(batch):
        def call():
            calls.append(None)
            batch.y.fill_(1)
            if len(calls) == 3:
                batch.y[0, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))

        return call

    assert readings_of(monkeypatch, problem, drifting)[0] == [pytest.approx(0.1), 2**-23, 1]


def test_a_row_that_depends_on_its_neighbours_is_seen(monkeypatch, problem):
    runs, alone = readings_of(monkeypatch, problem, lambda batch: lambda: batch.y.add_(batch.x.shape[0]))
    assert (runs, alone) == ([0.0, 0.0, 0], [1.0, 1.0, 1 << 23])


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulp"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1),
        (torch.float16, 1.0, 1.0 + 2**-9, 2),
        (torch.bfloat16, -1.0, -1.0 - 2**-7, 1),
        (torch.float16, 2.0**-24, -(2.0**-24), 2),
        (torch.float32, 0.0, -0.0, 0),
    ],
    ids=["float32", "float16", "bfloat16-negative", "float16-around-zero", "zeros"],
)
def test_differences_count_units_in_the_last_place(dtype, a, b, ulp):
    one, other = (torch.tensor([value, 3.0], dtype=dtype) for value in (a, b))
    changed, _, found = ext_determinism.differences(one, other)
    assert (found, changed.tolist()) == (ulp, [ulp > 0, False])


# the paper's step


@pytest.mark.parametrize("system", ["SGMV", "apart", "Loop", "grouped_mm"])
def test_every_system_computes_the_step(tmp_path, monkeypatch, system):
    cfg = settled(tmp_path, STEP)
    point = replace(STEP.points(cfg)[0], system=system, batch_size=7, seq_len=5)
    (batch,) = STEP.problems(cfg, point)
    (call,) = calls_on(monkeypatch, STEP, cfg, point, [batch])
    assert batch.sizes == (5, *[1] * 6)
    batch.y.zero_()
    call()
    torch.testing.assert_close(batch.y, batch.expected(), rtol=1e-4, atol=1e-4)
    if system == "apart":
        monkeypatch.setattr(operators, "in_turn", lambda calls: calls[0]())
        with pytest.raises(CheckFailed, match="apart differs from the reference"):
            STEP.calls(cfg, point)


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


# figures


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
