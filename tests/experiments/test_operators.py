"""The timed operators compute the same thing, a wrong one is not timed; the faster of torch's products is used."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes import settled
from tiny import TINY

from experiments.benches import operators
from experiments.benches.model_steps import LayerBench
from experiments.benches.operators import OPERATORS, Prepared, problems
from experiments.fig08_lora_operator import EXPERIMENT as FIG08
from experiments.harness import CheckFailed, Point, products
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import check
from punica.parallel import matmul
from punica.wrapper import PunicaWrapperCPU
from punica.wrapper.linear import LinearMethods


@pytest.mark.parametrize("workload", ["Distinct", "Uniform", "Skewed", "Identical"])
@pytest.mark.parametrize("rows", [1, 7])
def test_every_operator_of_figure_8_gives_the_reference(tmp_path, workload, rows):
    cfg = settled(tmp_path, FIG08)
    for name in cfg.system.names:
        (call,) = operators.prepare_checked(problems(cfg, workload, rows, 16), name)
        call()


@pytest.mark.parametrize("name", ["fig08", "readme", "fig09"])
def test_sgmv_of_the_figures_is_the_call_of_a_layer(tmp_path, monkeypatch, name):
    """The same function of a wrapper, on weights with a table of ranks, B stored rank after rank."""
    seen, right = [], LinearMethods.add_linear

    def noted(self, y, x, weights, *rest, **keywords):
        forms = weights.a.form.has_ranks, weights.b.form.has_ranks, weights.b.tensors[0].stride(-2) == 1
        seen.append((type(self), *forms))
        return right(self, y, x, weights, *rest, **keywords)

    monkeypatch.setattr(LinearMethods, "add_linear", noted)
    layer = LayerBench(TINY, 16, 2, 64, "cpu")
    layer.run(layer.rows(2), *layer.begin([1, 2], 8))
    of_layers, seen[:] = list(seen), []
    (experiment,) = experiments([name])
    cfg = settled(tmp_path, experiment)
    (call,) = experiment.calls(cfg, Point("", "SGMV", "Skewed", batch_size=7, rank=16))
    call()
    assert len(seen) == 2, "once for the check, once for the clock"
    assert set(seen) == set(of_layers) == {(PunicaWrapperCPU, True, True, True)}


def test_a_round_of_the_host_clock_begins_with_a_call_of_no_point(tmp_path, monkeypatch):
    """It comes behind emptied caches, has memory of its own, and no reading."""
    called, prepared = [], []

    def calls(self, cfg, point):
        prepared.append(point)
        return [partial(called.append, len(prepared))]

    monkeypatch.setattr(type(FIG08), "calls", calls)
    cfg = settled(tmp_path, FIG08)
    points = FIG08.points(cfg)[:3]
    assert all(FIG08.measure_together(cfg, points))
    assert prepared == [*points, points[0]]
    assert called[-8:] == [4, 1, 2, 3] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_passes_its_own_tolerance(tmp_path, dtype):
    cfg = settled(tmp_path, FIG08, f"figure.dtype={dtype}")
    for name in (*cfg.system.names, "SGMV expand"):
        if name != "grouped_mm" or operators.grouped_mm_available("cpu", getattr(torch, dtype)):
            operators.prepare_checked(problems(cfg, "Skewed", 7, 16), name)


def test_a_wrong_operator_is_refused_and_gets_no_row(tmp_path, monkeypatch):
    def off_by_a_row(problem):
        right = OPERATORS.get("Loop")(problem)

        def call():
            right.call()
            problem.y[0] += 0.01

        return Prepared(call, right.result, right.expected)

    monkeypatch.setitem(OPERATORS._entries, "SGMV", off_by_a_row)
    with pytest.raises(CheckFailed, match="SGMV differs from the reference"):
        FIG08.measure(settled(tmp_path, FIG08), Point("Skewed", "SGMV", "Skewed", batch_size=7, rank=16))
    with pytest.raises(CheckFailed):
        check("not a number", torch.tensor([float("nan")]), torch.tensor([1.0]), 1e-5)


@pytest.mark.parametrize(("name", "systems"), [("fig07", 1), ("fig09", 2)])
def test_all_popularities_of_a_batch_are_timed_side_by_side(tmp_path, name, systems):
    (experiment,) = experiments([name])
    cfg = settled(tmp_path, experiment)
    groups = [group for group in experiment.together(experiment.points(cfg)) if group[0].workload]
    assert {len(group) for group in groups} == {4 * systems}
    assert all(len({(point.batch_size, point.rank) for point in group}) == 1 for group in groups)


def test_an_operator_that_torch_lacks_gets_no_row_and_no_failure(tmp_path, monkeypatch, capsys):
    points = [Point("Skewed", name, "Skewed", batch_size=7, rank=16) for name in ("grouped_mm", "Loop")]
    with monkeypatch.context() as patched:
        patched.setattr(operators, "grouped_mm_available", lambda *_: False)
        without, some = FIG08.measure_together(settled(tmp_path, FIG08), points)
    assert without == []
    assert some
    assert "no grouped_mm" in capsys.readouterr().err
    with pytest.raises(operators.Unsupported, match=r"no grouped_mm for torch.float32 at rank 3 on cpu"):
        FIG08.calls(settled(tmp_path, FIG08), replace(points[0], rank=3))


def test_batches_of_a_graph_read_adapters_of_their_own(tmp_path):
    cfg = settled(tmp_path, FIG08)
    cfg.timer.name, cfg.hardware.flush_mib = "cuda_graph", 1  # as on a GPU
    batches = problems(cfg, "Uniform", 7, 16)
    read = {batch.a[slot].data_ptr() for batch in batches for slot in batch.slots.tolist()}
    assert len(read) == sum(len(batch.sizes) for batch in batches) > 40
    operators.OPERATORS.get("SGMV")(batches[-1]).call()
    torch.testing.assert_close(batches[-1].y, batches[-1].expected(), rtol=1e-4, atol=1e-4)


faster_products = products.use_faster_products.__wrapped__


@pytest.mark.skipif(matmul.onednn_linear() is None, reason="this torch has no oneDNN linear")
@pytest.mark.parametrize("seconds", [[1.0, 2.0], [2.0, 1.0]], ids=["torch", "oneDNN"])
def test_the_faster_product_is_used_from_then_on(seconds, monkeypatch):
    for kind, before in [*vars(matmul.onednn_for).items()]:
        monkeypatch.setattr(matmul.onednn_for, kind, before)  # what is chosen ends with the test
    samples = dict(zip(("torch", "oneDNN"), ([one, 3.0] for one in seconds), strict=True))
    monkeypatch.setattr(products, "time_side_by_side", lambda *_: samples)
    faster = "torch" if seconds[0] < seconds[1] else "oneDNN"
    assert faster_products(hidden=8, inner=8) == {"one": faster, "several": faster}
    called, onednn = [], matmul.onednn_linear()
    monkeypatch.setattr(matmul, "onednn_linear", lambda: lambda x, *rest: called.append(x.shape[0]) or onednn(x, *rest))
    weight = torch.randn(5, 8)
    for shape in ((1, 8), (1, 1, 8), (4, 8), (2, 1, 8), (0, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(matmul.linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-4)
    assert called == ([1, 1, 4, 2] if faster == "oneDNN" else [])
