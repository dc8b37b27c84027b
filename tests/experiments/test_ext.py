"""The extensions: cost of padding (on any device) and price of determinism (Triton only; here in its interpreter)."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch
from fakes import composed

from experiments import ext_determinism, ext_padding
from experiments.benches import operators
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY
from experiments.harness.settings import settle
from experiments.plots.extensions import draw_determinism
from punica.measure.records import read_rows
from punica.workload.popularity import popularity

PADDING, DETERMINISM = (next(iter(experiments([name]))) for name in ("ext_padding", "ext_determinism"))


VARIANTS = ("deterministic", "deterministic, no PDL", "batch invariant", "atomics", "atomics, finer split")


def settled(tmp_path, *overrides, experiment=PADDING):
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def test_they_come_after_the_figures_of_the_paper():
    measured = [one for one in experiments() if not one.name.startswith("ext_") and one.name != "fig13_cluster"]
    orders = [experiment.order for experiment in measured]
    assert max(orders) < PADDING.order < DETERMINISM.order


# cost of padding


@pytest.mark.parametrize(
    ("adapters", "length"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (8, 1), (9, 4), (64, 1)], ids=str
)
def test_a_round_holds_every_rank_equally_often(adapters, length):
    assert ext_padding.round_length(adapters, 4) == length
    ranks = [slot % 4 for slot in range(length * adapters)]
    assert {ranks.count(rank) for rank in range(4)} == {length * adapters // 4}


@pytest.mark.parametrize("workload", ["Distinct", "Uniform", "Skewed", "Identical"])
@pytest.mark.parametrize("rows", [1, 7])
def test_padded_and_true_rank_give_the_same_and_read_what_they_should(tmp_path, workload, rows):
    cfg = settled(tmp_path)
    results = []
    for system in ("true rank", "padded"):
        batches = ext_padding.batches(cfg, workload, rows, system, 64)
        calls = ext_padding.checked_rounds(cfg, batches)
        length = ext_padding.round_length(len(batches[0].sizes), 4)
        assert len(batches) == length * len(calls)
        for batch in batches:
            batch.y.zero_()
        calls[0]()
        results.append(torch.stack([batch.y for batch in batches]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert (batches[0].ranks is None, len({id(batch.y) for batch in batches})) == (True, length)


def test_the_true_ranks_cycle_over_the_adapters_and_what_lies_above_is_not_read(tmp_path):
    cfg = settled(tmp_path)
    (batch,) = ext_padding.batches(cfg, "Distinct", 16, "true rank", 64)
    ranks = batch.ranks[0, batch.slots].tolist()
    assert ranks == [8, 16, 32, 64] * 4
    expected = batch.expected()
    a, b = batch.a.clone(), batch.b.clone()
    for slot, rank in zip(batch.slots.tolist(), ranks, strict=True):
        assert a[slot, :rank].abs().min() > 0
        assert not a[slot, rank:].any()
        assert not b[slot, :, rank:].any()
        a[slot, rank:] = torch.nan
        b[slot, :, rank:] = torch.nan
    stored = b.mT.contiguous().mT
    poisoned = replace(batch, a=a, b=b, stored_b=stored)
    operators.OPERATORS.get("SGMV")(poisoned).call()
    torch.testing.assert_close(batch.y, expected, rtol=1e-4, atol=1e-4)


def test_a_table_of_ranks_that_cuts_too_much_fails_its_check(tmp_path):
    cfg = settled(tmp_path)
    batches = ext_padding.batches(cfg, "Distinct", 4, "true rank", 64)
    batches[0].ranks.fill_(8)
    with pytest.raises(CheckFailed, match="SGMV differs"):
        ext_padding.checked_rounds(cfg, batches)


def test_uniform_ranks_lie_in_slots_of_their_own_width(tmp_path):
    cfg = settled(tmp_path)
    batches = ext_padding.batches(cfg, "Uniform", 7, "uniform rank", 8)
    assert {(batch.a.shape[1], batch.b.shape[2], batch.a.is_contiguous()) for batch in batches} == {(8, 8, True)}
    first = {batch.a[batch.slots[0]].data_ptr() for batch in batches}
    assert len(first) == len(batches) == 4


def test_under_cuda_graph_every_variant_reads_more_than_the_caches_hold(tmp_path):
    cfg = settled(tmp_path, "figure.batch_sizes=[1,7]")
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", 2
    ranks = cfg.adapters.ranks
    for workload in cfg.workload.names:
        for system, rank in [("true rank", 64), ("padded", 64), *(("uniform rank", rank) for rank in ranks)]:
            batches = ext_padding.batches(cfg, workload, 7, system, rank)
            adapters = popularity(workload).number_of_adapters(7)
            mean = ext_padding.mean_rank(system, rank, ranks)
            assert ext_padding.bytes_read(cfg, 7, adapters, mean) * len(batches) >= 2 << 20
            used = [batch.a[slot].data_ptr() for batch in batches for slot in set(batch.slots.tolist())]
            assert len(used) == len(set(used)) == adapters * len(batches)


@pytest.mark.parametrize(
    ("adapters", "mean_rank", "expected"), [(64, 30, 2 * 15104 * 64 * 31), (1, 64, 2 * 15104 * 128)], ids=["mix", "one"]
)
def test_bytes_read_by_arithmetic(tmp_path, adapters, mean_rank, expected):
    cfg = settled(tmp_path, "figure.h1=4096", "figure.h2=11008", "figure.dtype=float16")
    assert ext_padding.bytes_read(cfg, 64, adapters, mean_rank) == expected


def test_padding_measures_every_system_and_draws(tmp_path):
    words = ("figure.batch_sizes=[1,7]", "workload.names=[Distinct,Skewed]")
    outcome = run(composed(tmp_path, *words, "draw=true", name="ext_padding"), PADDING)
    assert (outcome.failed, outcome.measured) == ([], 2 * 2 * 6)
    assert len(outcome.figures) == 3
    rows = read_rows(outcome.rows_file)
    found = {
        (row.system, row.rank): row.value
        for row in rows
        if row.metric == "bytes_over_true_rank" and row.batch_size == 7
    }
    assert set(found) == {("true rank", 64), ("padded", 64), *(("uniform rank", rank) for rank in (8, 16, 32, 64))}
    assert found["true rank", 64] == 1
    assert found["padded", 64] == found["uniform rank", 64] > 1.5
    assert found["uniform rank", 8] < 1
    latencies = [row for row in rows if row.metric == "latency" and row.statistic == "median"]
    assert len(latencies) == 24
    assert min(row.value for row in latencies) > 0
    assert run(composed(tmp_path, *words, name="ext_padding"), PADDING).measured == 0


# price of determinism


def test_on_a_cpu_determinism_says_what_it_needs_and_measures_nothing(tmp_path, capsys):
    outcome = run(composed(tmp_path, name="ext_determinism"), DETERMINISM)
    assert (outcome.points, outcome.measured, outcome.failed, outcome.figures) == (0, 0, [], [])
    assert "it needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "cpu").exists()


def test_determinism_has_the_whole_grid_on_a_gpu(tmp_path):
    cfg = settled(tmp_path, "hardware=h200", experiment=DETERMINISM)
    points = DETERMINISM.points(cfg)
    assert len(points) == len(VARIANTS) * 4 * len(cfg.figure.batch_sizes)
    assert {1, 7, 64} <= set(cfg.figure.batch_sizes)


def needs_triton(test):
    return pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")(test)


INTERPRETED = """
import sys, json
sys.path[:0] = ["tests/experiments", "tests/ops/triton_ops"]
import fast_interpreter
from fakes import composed
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness.catalogue import experiments
from experiments.harness.settings import settle
fast_interpreter.install()
(experiment,) = experiments(["ext_determinism"])
cfg = settle(composed(sys.argv[1], *sys.argv[2:], name=experiment.name), experiment)
points = OperatorExperiment.points(experiment, cfg)
for group in experiment.together(points):
    for point, readings in zip(group, experiment.measure_together(cfg, group), strict=True):
        values = {f"{one.metric} {one.statistic}": one.value for one in readings}
        print(json.dumps([point.system, point.workload, point.batch_size, values]))
"""


def interpreted(*words):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *map(str, words)], capture_output=True, text=True, cwd=REPOSITORY,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_variant_is_right_and_its_bits_are_compared(tmp_path, dtype):
    found = interpreted(
        tmp_path, f"figure.dtype={dtype}", "figure.h1=600", "figure.h2=40", "figure.runs=2",
        "workload.names=[Skewed]", "figure.batch_sizes=[1,3]", "scale.warmup=0",
        "scale.repeats=1", "scale.min_repeats=1",
    )  # fmt: skip
    assert [(system, rows) for system, _, rows, _ in found] == [
        (system, rows) for rows in (1, 3) for system in VARIANTS
    ]
    for system, _, rows, values in found:
        assert values["latency median"] > 0
        # the interpreter runs programs one after the other, so even atomic adds repeat here
        assert values["outputs_differing_between_runs value"] == values["max_ulp_between_runs value"] == 0
        if rows == 1 or system == "batch invariant":
            assert values["outputs_differing_from_row_alone value"] == values["max_ulp_from_row_alone value"] == 0


def ones():
    weights = torch.ones(1, 4, 3), torch.ones(1, 5, 4), torch.ones(1, 5, 4)
    return operators.Problem(torch.ones(2, 3), *weights, torch.zeros(2, 5), torch.zeros(2).long(), (2,))


def test_bits_that_change_between_runs_are_seen(monkeypatch):
    problem = ones()
    calls = []

    def drifting(_):
        def call():
            calls.append(None)
            problem.y.fill_(1)
            if len(calls) == 3:
                problem.y[0, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))

        return call

    monkeypatch.setitem(ext_determinism.VARIANTS, "atomics", drifting)
    bits = ext_determinism.between_runs(problem, "atomics", 4)
    assert (bits.share, bits.ulp) == (0.1, 1)
    assert bits.absolute == 2**-23


def test_a_row_that_depends_on_its_neighbours_is_seen(monkeypatch):
    problem = ones()

    def crowded(batch):
        return lambda: batch.y.add_(batch.x.shape[0])

    monkeypatch.setitem(ext_determinism.VARIANTS, "deterministic", crowded)
    bits = ext_determinism.from_row_alone(problem, "deterministic")
    assert (bits.share, bits.absolute, bits.ulp) == (1.0, 1.0, 1 << 23)


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


def test_determinism_draws_its_rows():
    import matplotlib.pyplot as plt

    rows = pd.DataFrame(
        [
            {"workload": workload, "system": system, "batch_size": batch, "rank": 16, "metric": metric, "value": value,
             "statistic": "value", "device": "d", "timer": "cuda_graph", "scale": "laptop"}
            for workload in ("Distinct", "Identical")
            for system in VARIANTS
            for batch in (1, 64)
            for metric, value in (("latency", batch + 1.0), ("outputs_differing_from_row_alone", 0.2),
                                  ("outputs_differing_between_runs", 0.1 if system.startswith("atomics") else 0.0))
        ]
    )  # fmt: skip
    figure = draw_determinism(rows, pd.DataFrame())
    try:
        above, price, changes, runs = (figure.axes[2 * line] for line in range(4))
        assert len(above.lines) == 5
        assert [list(line.get_ydata()) for line in price.lines[:3]] == [[1.0, 1.0]] * 3
        assert len(changes.lines) == 5
        assert len(runs.lines) == sum(system.startswith("atomics") for system in VARIANTS)
        never = runs.texts[0].get_text().splitlines()
        assert never == ["0 at every batch:", *(name for name in VARIANTS if not name.startswith("atomics"))]
    finally:
        plt.close(figure)
