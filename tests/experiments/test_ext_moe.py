"""The popularity sweep on experts: what is measured, and that a wrong result is never timed."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from fakes import composed

from experiments.benches.engine_steps import EngineSteps, StepShape
from experiments.benches.expert_models import MODELS, MoESizes, model_config
from experiments.claims.rows import Rows
from experiments.ext_moe import MoEBench, decode_seconds, engine_of, panel_of
from experiments.harness.catalogue import experiments
from experiments.harness.counted import frame_of
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import Row, read_rows, write_rows
from experiments.measure.timing import Protocol
from experiments.plots.extensions import draw_moe
from experiments.plots.frames import measured_frame, rows_of_repeats

MOE = next(iter(experiments(["ext_moe"])))
ENGINES = {"engine", "backbone engine"}
SYSTEMS = {"alignment", "w13 and w2", "layer", "backbone layer", "model", "backbone model"}


PROTOCOL = Protocol("host_clock", "cpu", warmup=0, repeats=4, min_repeats=4, seconds=0.0, flush_mib=0)


def modules_of(engine: EngineSteps) -> list:
    return list(engine.engine.manager.modules.values())


def bench(name: str = "qwen3-30b-a3b") -> MoEBench:
    return MoEBench(MoESizes(name, 4, 1, 32, 3, 16, "float32"), 3, "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_published(name):
    config = model_config(name, 3, 1)
    sizes = {"mixtral-8x7b": (4096, 14336, 8, 2, 32, 8), "qwen3-30b-a3b": (2048, 768, 128, 8, 32, 4)}[name]
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    found = (config.hidden_size, inner, config.num_local_experts, config.num_experts_per_tok)
    assert (*found, config.num_attention_heads, config.num_key_value_heads) == sizes
    assert model_config(name, 3, 4).hidden_size == sizes[0] // 4
    with pytest.raises(ValueError, match="no-such"):
        model_config("no-such", 1, 1)


def test_backbone_leaves_lora_out_and_gives_it_back():
    one = bench()
    calls = one.checked_calls([0, 1, 1])
    with_lora, without = calls["layer"][0](), calls["backbone layer"][0]()
    assert not torch.allclose(with_lora, without)
    assert torch.equal(calls["layer"][0](), with_lora)
    assert set(calls) == SYSTEMS


@pytest.mark.parametrize("part", ["w13_lora_b_stacked", "w2_lora_a_stacked"])
def test_wrong_products_are_not_timed(part, monkeypatch):
    from punica.ops import reference

    one, genuine = bench("mixtral-8x7b"), reference.fused_moe_lora
    weights = getattr(one.contexts[0], part)

    def other(output, x, a, b, *rest):
        genuine(output, x, *([2 * w for w in side] if side is weights else side for side in (a, b)), *rest)

    monkeypatch.setattr(reference, "fused_moe_lora", other)
    with pytest.raises(CheckFailed, match=part[:2]):
        one.checked_calls([0, 1])


def test_slots_may_be_fp8():
    one = MoEBench(MoESizes("mixtral-8x7b", 4, 1, 32, 3, 16, "float32", "float8_e5m2"), 3, "cpu")
    assert one.contexts[0].w2_lora_a_stacked[0].dtype == torch.float8_e5m2
    assert set(one.checked_calls([0, 2])) == SYSTEMS


def test_adapters_without_effect_are_not_timed(monkeypatch):
    one = bench()
    one.layers[0].adapter_enabled.zero_()
    monkeypatch.setattr(one, "_check_operator", lambda *operands: None)
    with pytest.raises(CheckFailed, match="as if it had no adapter"):
        one.checked_calls([0, 1])


@pytest.mark.parametrize("fp8", [None, "float8_e4m3fn"])
def test_the_engine_steps_with_the_adapters_of_a_popularity_and_with_none(fp8):
    engine = engine_of(MoESizes("qwen3-30b-a3b", 4, 2, 32, 3, 16, "float32", fp8), "cpu")
    stored = {layer.base_layer.routed_experts.lora_context.w2_lora_a_stacked[0].dtype for layer in modules_of(engine)}
    assert stored == {torch.float32 if fp8 is None else torch.float8_e4m3fn}
    shapes = {"engine": StepShape(3, 16, 0, (1, 2, 2)), "backbone engine": StepShape(3, 16, 0, (0, 0, 0))}
    found = decode_seconds(engine, shapes, PROTOCOL)
    assert {name: len(seconds) for name, seconds in found.items()} == {"engine": 4, "backbone engine": 4}
    assert min(map(min, found.values())) > 0


def test_an_engine_whose_experts_have_no_adapters_is_not_timed():
    engine = engine_of(MoESizes("mixtral-8x7b", 4, 1, 32, 2, 16, "float32"), "cpu")
    for layer in modules_of(engine):
        layer.adapter_enabled.zero_()
    shapes = {"engine": StepShape(2, 16, 0, (1, 2)), "backbone engine": StepShape(2, 16, 0, (0, 0))}
    with pytest.raises(CheckFailed, match="as if its rows had no adapters"):
        decode_seconds(engine, shapes, PROTOCOL)


def test_steps_of_the_engine_are_timed_by_the_hosts_clock_alone(tmp_path):
    clocks = {}
    for clock in ("host_clock", "cuda_graph"):
        cfg = settle(composed(tmp_path, "hardware=h200", f"timer={clock}", name="ext_moe"), MOE)
        clocks[clock] = {point.system for point in MOE.points(cfg)}
    assert clocks == {"host_clock": SYSTEMS | ENGINES, "cuda_graph": SYSTEMS}


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [None, "float8_e4m3fn"])
def test_a_step_with_adapters_on_experts_is_a_graph(fp8):
    engine = engine_of(MoESizes("qwen3-30b-a3b", 16, 2, 8, 4, 64, "float16", fp8), "cuda")
    shapes = {"engine": StepShape(4, 64, 0, (1, 2, 3, 4)), "backbone engine": StepShape(4, 64, 0, (0,) * 4)}
    found = decode_seconds(engine, shapes, replace(PROTOCOL, device="cuda"))
    assert min(map(min, found.values())) > 0
    assert engine.engine.runner.graphs.statistics.graphs == 2


def engine_and_layers(path, panels) -> None:
    """Rows of a GPU: layers by graphs and by the host's clock, the engine by the host's clock alone, in some panels."""
    about = {
        "figure": MOE.figure, "workload": "Distinct", "model": "qwen3-30b-a3b", "hardware": "h200", "seq_len": 64,
        "rank": 16, "statistic": "median", "scale": "gpu", "device": "an H200",
    }  # fmt: skip
    rows = [
        Row(**about, panel=panels[0], system=system, batch_size=batch, metric="layer_latency", unit="us", value=value,
            timer=timer)
        for system in ("layer", "backbone layer") for batch in (1, 8)
        for timer, value in (("cuda_graph", 100.0), ("host_clock", 900.0))
    ]  # fmt: skip
    rows += [
        Row(**about, panel=panel, system=system, batch_size=batch, metric="step_latency", unit="ms",
            value=10.0 + place, timer="host_clock")
        for place, panel in enumerate(panels) for system in ENGINES for batch in (1, 8)
    ]  # fmt: skip
    write_rows(path, rows)


def test_engine_and_fp8_stand_beside_what_other_clocks_time(tmp_path):
    panels = [panel_of("qwen3-30b-a3b", fp8) for fp8 in (None, "float8_e4m3fn")]
    engine_and_layers(tmp_path / "ext_moe.csv", panels)
    figure = draw_moe(measured_frame(rows_of_repeats(tmp_path / "ext_moe.csv")), pd.DataFrame())
    shown = {(axis.get_subplotspec().rowspan.start, axis.get_subplotspec().colspan.start): axis for axis in figure.axes}
    assert [line.get_ydata().tolist() for line in shown[0, 0].lines] == [[100, 100]] * 2, "layers by their best clock"
    assert [line.get_ydata().tolist() for line in shown[1, 0].lines] == [[10, 10]] * 2
    assert [line.get_ydata().tolist() for line in shown[1, 1].lines] == [[11, 11]] * 2, "FP8 replaces nothing"
    judged = Rows(frame_of(read_rows(tmp_path / "ext_moe.csv"))).figure(MOE.figure)
    assert {(row.panel, row.metric, row.timer) for row in judged.itertuples()} == {
        (panels[0], "layer_latency", "cuda_graph"), *((panel, "step_latency", "host_clock") for panel in panels),
    }  # fmt: skip


def test_numbers_of_slots_share_a_column(tmp_path):
    panels = [panel_of("qwen3-30b-a3b", None), *(panel_of("qwen3-30b-a3b", None, slots) for slots in (8, 256))]
    path = tmp_path / "ext_moe.csv"
    engine_and_layers(path, panels)
    rows = [row for row in read_rows(path) if "slots" not in row.panel or row.batch_size == 8]
    figure = draw_moe(frame_of(rows), pd.DataFrame())
    last = [axis for axis in figure.axes if axis.get_subplotspec().is_last_row()]
    assert [axis.get_xlabel() for axis in last] == ["batch size", "slots"]
    assert last[1].lines[0].get_xdata().tolist() == [8, 256]
    assert last[1].lines[0].get_ydata().tolist() == [11, 12]
    assert last[1].get_subplotspec().colspan.start == 1, "the layers' panel stays beside it"


def test_fp8_adapters_have_points_of_their_own(tmp_path):
    found = []
    for words in ((), ("figure.fp8=float8_e4m3fn",)):
        points = MOE.points(settle(composed(tmp_path, *words, name="ext_moe"), MOE))
        found.append({(point.panel, point.system, point.batch_size, point.workload) for point in points})
        assert {point.model for point in points} == {"mixtral-8x7b", "qwen3-30b-a3b"}
    assert len(found[0]) == len(found[1])
    assert not found[0] & found[1]


def test_slots_beyond_the_batch_hold_adapters_that_no_row_uses():
    for fp8 in (None, "float8_e4m3fn"):
        one = MoEBench(MoESizes("mixtral-8x7b", 4, 1, 32, 3, 16, "float32", fp8), 9, "cpu")
        layer = one.layers[0]
        assert layer.adapter_enabled.tolist() == [1] * 9 + [0]
        assert layer.lora_ranks.tolist() == [[4] * 9] * 3
        for stack in (*layer.w13_lora_b_stacked, *layer.w2_lora_a_stacked):
            assert bool(stack[0].float().any())
            assert torch.equal(stack[8].float(), stack[0].float())
        assert set(one.checked_calls([0, 2])) == SYSTEMS


def test_numbers_of_slots_are_panels(tmp_path):
    words = ("figure.slots=[3,7]", "figure.batch_sizes=[3]", "workload.names=[Uniform]", "figure.layers=1",
             "figure.models=[mixtral-8x7b]", "figure.divisor=64", "scale=smoke")  # fmt: skip
    cfg = settle(composed(tmp_path, *words, "system.names=[layer,engine]", "timer=host_clock", name="ext_moe"), MOE)
    panels = [panel_of("mixtral-8x7b", None, slots) for slots in (3, 7, None)]
    points = MOE.points(cfg)
    assert [(one.panel, one.system, one.settings["slots"]) for one in points] == [
        (panels[0], "layer", 3), (panels[1], "layer", 7), (panels[2], "engine", 3)
    ]  # fmt: skip
    (readings,) = MOE.measure_together(cfg, points[1:2])
    assert min(one.value for one in readings) > 0


def test_more_adapters_than_slots_are_refused(tmp_path):
    cfg = settle(composed(tmp_path, "figure.slots=[2]", "figure.batch_sizes=[3]", name="ext_moe"), MOE)
    points = [one for one in MOE.points(cfg) if one.workload == "Distinct" and one.system == "layer"]
    with pytest.raises(ValueError, match="slots is 2, Distinct has 3 adapters in a batch of 3"):
        MOE.measure_together(cfg, points)


def test_every_system_is_measured_and_drawn(tmp_path):
    words = ("figure.batch_sizes=[1,3]", "workload.names=[Distinct,Identical]", "figure.layers=1")
    outcome = run(composed(tmp_path, *words, "draw=true", name="ext_moe"), MOE)
    assert (outcome.failed, outcome.measured) == ([], 2 * 2 * 2 * (len(SYSTEMS) + len(ENGINES)))
    assert len(outcome.figures) == 3
    rows = [row for row in read_rows(outcome.rows_file) if row.statistic == "median"]
    units = {(row.system, row.metric, row.unit) for row in rows}
    assert units == {
        ("alignment", "latency", "us"), ("w13 and w2", "latency", "us"), ("layer", "layer_latency", "us"),
        ("backbone layer", "layer_latency", "us"), ("model", "throughput", "token/s"),
        ("backbone model", "throughput", "token/s"),
        *((name, *rest) for name in ENGINES for rest in (("engine_throughput", "token/s"), ("step_latency", "ms"))),
    }  # fmt: skip
    assert all(row.value > 0 for row in rows)
    assert run(composed(tmp_path, *words, name="ext_moe"), MOE).measured == 0
