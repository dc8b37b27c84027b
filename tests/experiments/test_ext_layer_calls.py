"""The extensions that time what a layer calls: the paper's step, and what LoRA adds behind a projection."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from fakes import composed

from experiments import ext_added_latency, ext_paper_step
from experiments.benches import operators
from experiments.benches.operators import layer_calls
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.plots.extensions import draw_added_latency, draw_paper_step
from punica.measure.records import read_rows

STEP, ADDED = (next(iter(experiments([name]))) for name in ("ext_paper_step", "ext_added_latency"))


def settled(tmp_path, *overrides, experiment=STEP):
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def test_the_extensions_come_last_in_the_order_of_their_stories():
    """Among them Figure 13, which predicts what the others measured."""
    names = [experiment.name for experiment in sorted(experiments(), key=lambda one: one.order)]
    stories = ["ext_paper_step", "ext_added_latency", "ext_breakdown", "ext_fp8", "ext_moe", "ext_stated_lengths"]
    stories += ["ext_latency_under_load", "fig13_cluster", "ext_many_adapters", "ext_today"]
    stories += ["ext_placement", "ext_disaggregated", "ext_cluster_scale", "ext_server", "ext_own_server"]
    assert names[-len(stories) :] == stories


# what a layer calls


def test_batches_of_the_same_slots_share_a_wrapper_and_add_the_reference(tmp_path):
    cfg = settled(tmp_path, "figure.batch_sizes=[7]", experiment=ADDED)
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", 1
    batches = operators.problems(cfg, "Skewed", 7, 16)
    calls = layer_calls(batches)
    wrappers = {id(call.func.__self__) for call in calls}
    assert len(wrappers) == len({tuple(batch.slots.tolist()) for batch in batches}) < len(batches)
    for batch, call in zip(batches, calls, strict=True):
        call()
        torch.testing.assert_close(batch.y, batch.expected(), rtol=1e-4, atol=1e-4)


def test_a_layer_hands_over_its_slots_and_their_true_ranks(tmp_path):
    batch = ext_paper_step.steps(settled(tmp_path), 32, 16, 16)[0]
    (call,) = layer_calls([batch])
    assert call.func.__self__.max_loras == batch.a.shape[0] == 64
    assert call.args[2].a.ranks.tolist() == [[16] * 64]


# the paper's step


@pytest.mark.parametrize("requests", [1, 2, 7])
def test_every_system_computes_the_step(tmp_path, requests, monkeypatch):
    cfg = settled(tmp_path)
    results = []
    for system in cfg.system.names if requests > 1 else ["SGMV"]:
        (batch,) = ext_paper_step.steps(cfg, requests, 5, 16)
        point = replace(STEP.points(cfg)[0], system=system, batch_size=requests, seq_len=5)
        monkeypatch.setattr(ext_paper_step, "steps", lambda *_, batch=batch: [batch])
        (call,) = STEP.calls(cfg, point)
        monkeypatch.undo()
        assert batch.sizes == (5, *[1] * (requests - 1))
        batch.y.zero_()
        call()
        results.append(batch.y)
    for result in results:
        torch.testing.assert_close(result, batch.expected(), rtol=1e-4, atol=1e-4)


def test_a_part_that_is_missing_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "in_turn", lambda calls: calls[0]())
    cfg = settled(tmp_path)
    point = next(one for one in STEP.points(cfg) if one.system == "apart")
    with pytest.raises(CheckFailed, match="apart differs from the reference"):
        STEP.calls(cfg, point)


def test_under_cuda_graph_the_steps_move_more_than_the_caches_hold(tmp_path):
    cfg = settled(tmp_path)
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", 2
    batches = ext_paper_step.steps(cfg, 32, 16, 16)
    assert len(batches) * ext_paper_step.bytes_moved(cfg, 32, 16, 16) >= 2 << 20
    used = [batch.a[slot].data_ptr() for batch in batches for slot in batch.slots.tolist()[15:]]
    assert len(set(used)) == 32 * len(batches)


def test_bytes_moved_by_arithmetic(tmp_path):
    cfg = settled(tmp_path, "figure.h1=4096", "figure.h2=11008")
    assert ext_paper_step.bytes_moved(cfg, 32, 128, 16) == 2 * 23770112  # the anchors' bytes are of half precision


def test_the_step_is_measured_and_drawn(tmp_path):
    outcome = run(composed(tmp_path, "draw=true", name=STEP.name), STEP)
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], 2 * 4, 3)
    rows = read_rows(outcome.rows_file)
    assert {row.metric for row in rows} == {"latency", "bytes_moved"}  # a CPU's bandwidth is not in conf/hardware
    assert {(row.batch_size, row.seq_len) for row in rows} == {(32, 16), (32, 32)}
    assert run(composed(tmp_path, name=STEP.name), STEP).measured == 0


def test_the_floor_is_the_time_of_the_bytes_where_the_bandwidth_is_known(tmp_path):
    cfg = settled(tmp_path, "hardware.bandwidth_gb_s=100")
    point = STEP.points(cfg)[0]
    found = {one.metric: one for one in STEP.readings(cfg, point, [5.0])}
    assert found["floor"].value == pytest.approx(found["bytes_moved"].value / 100e9 * 1e6)
    assert found["floor"].unit == "us"


def test_the_workload_is_not_read_by_the_step():
    assert not any(key.startswith("workload") for key in STEP.reads)


def drawn(**columns):
    about = {"device": "d", "timer": "cuda_graph", "scale": "laptop", "statistic": "median", "rank": 16, "unit": "us"}
    return {**about, "workload": "", "system": "", "batch_size": 32, "seq_len": 128, **columns}


def test_the_floor_and_the_ratios_are_drawn():
    import matplotlib.pyplot as plt

    rows = []
    for prompt, (system, us) in [(p, one) for p in (128, 512) for one in {"SGMV": 9.0, "apart": 10.0}.items()]:
        place = {"panel": "32 requests", "system": system, "seq_len": prompt}
        rows += [drawn(metric="latency", value=us, **place), drawn(metric="floor", value=4.0, **place)]
    figure = draw_paper_step(pd.DataFrame(rows), pd.DataFrame())
    try:
        above, below = figure.axes
        assert [list(line.get_ydata()) for line in above.lines] == [[9.0, 9.0], [10.0, 10.0], [4.0, 4.0]]
        assert list(below.lines[0].get_ydata()) == [0.9, 0.9]
        assert below.get_xlabel() == "rows of the prompt"
    finally:
        plt.close(figure)


# added latency


@pytest.mark.parametrize("with_lora", [False, True], ids=["alone", "with-lora"])
def test_the_projection_is_checked_with_and_without_lora(tmp_path, with_lora, monkeypatch):
    cfg = settled(tmp_path, experiment=ADDED)
    (batch,), weights = operators.problems(cfg, "Uniform", 7, 16), ext_added_latency.projection(cfg)
    (call,) = ext_added_latency.checked_calls([batch], weights, with_lora)
    batch.y.fill_(torch.nan)
    call()
    expected = batch.x @ weights[0] + (batch.expected() if with_lora else 0)
    torch.testing.assert_close(batch.y, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(operators, "layer_calls", lambda batches: [lambda: None] * len(batches))
    if with_lora:
        with pytest.raises(CheckFailed, match="base projection with LoRA"):
            ext_added_latency.checked_calls([batch], weights, with_lora)


def test_under_cuda_graph_the_weights_rotate(tmp_path):
    cfg = settled(tmp_path, experiment=ADDED)
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", 1
    weights = ext_added_latency.projection(cfg)
    assert weights.nbytes > 1 << 20
    assert weights[0].ne(weights[1]).any()
    batches = operators.problems(cfg, "Distinct", 7, 16)
    for call in ext_added_latency.checked_calls(batches, weights, with_lora=False):
        call()
    last = len(batches) - 1
    torch.testing.assert_close(batches[last].y, batches[last].x @ weights[last % len(weights)], rtol=1e-4, atol=1e-4)


def test_what_is_added_is_the_median_of_paired_differences(tmp_path, monkeypatch):
    cfg = settled(tmp_path, "figure.batch_sizes=[4]", "workload.names=[Distinct,Identical]", experiment=ADDED)
    samples = {"base": [10.0, 30.0, 20.0], "Distinct": [12.0, 31.0, 25.0], "Identical": [11.0, 31.0, 21.0]}
    monkeypatch.setattr(operators, "microseconds", lambda cfg, calls: {name: samples[name] for name in calls})
    ((first, second),) = ADDED.together(ADDED.points(cfg))
    for readings, added in zip(ADDED.measure_together(cfg, [first, second]), (2.0, 1.0), strict=True):
        medians = {one.metric: one.value for one in readings if one.statistic == "median"}
        assert medians == {"added_latency": added, "base_latency": 20.0, "latency": medians["latency"]}


def test_added_latency_is_measured_and_drawn(tmp_path):
    words = ("figure.batch_sizes=[1,7]", "workload.names=[Distinct,Skewed]")
    outcome = run(composed(tmp_path, *words, "draw=true", name=ADDED.name), ADDED)
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], 4, 3)
    rows = read_rows(outcome.rows_file)
    assert {row.metric for row in rows} == {"added_latency", "base_latency", "latency"}
    assert run(composed(tmp_path, *words, name=ADDED.name), ADDED).measured == 0


@pytest.mark.parametrize(("added", "scale"), [(3.0, "log"), (-3.0, "linear")])
def test_the_projection_stands_beside_what_is_added(added, scale):
    import matplotlib.pyplot as plt

    rows = [
        drawn(panel="rank 16", workload=workload, batch_size=rows, metric=metric, value=us)
        for workload in ("Distinct", "Identical") for rows in (1, 64)
        for metric, us in (("added_latency", added), ("base_latency", 24.0), ("latency", 24.0 + added))
    ]  # fmt: skip
    figure = draw_added_latency(pd.DataFrame(rows), pd.DataFrame())
    try:
        above, below = figure.axes
        assert [line.get_label() for line in above.lines] == ["Distinct", "Identical", "the projection alone"]
        assert list(below.lines[1].get_ydata()) == [added / 24, added / 24]
        assert above.get_yscale() == scale
    finally:
        plt.close(figure)


@pytest.mark.gpu
@pytest.mark.parametrize("experiment", [STEP, ADDED], ids=["step", "added"])
def test_they_measure_on_a_gpu(tmp_path, experiment):
    words = ("hardware=auto", "figure.h1=128", "figure.h2=256", "hardware.bandwidth_gb_s=1000")
    outcome = run(composed(tmp_path, *words, name=experiment.name), experiment)
    assert (outcome.failed, outcome.measured) == ([], outcome.points)
    assert {row.timer for row in read_rows(outcome.rows_file)} == {"cuda_graph"}
