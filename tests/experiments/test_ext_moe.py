"""The popularity sweep on experts: what is measured, and that a wrong result is never timed."""

from dataclasses import replace

import pytest
import torch
from fakes import measured, points_of, settled

from experiments.benches.expert_models import MoEBench, MoESizes, decode_seconds, engine_of
from experiments.ext_moe import EXPERIMENT as MOE
from experiments.ext_moe import panel_of
from experiments.harness import ConfigError
from experiments.harness.experiment import CheckFailed
from experiments.measure.timing import Protocol

ENGINES = {"engine", "backbone engine"}
SYSTEMS = {"alignment", "w13 and w2", "layer", "backbone layer"}
PROTOCOL = Protocol("host_clock", "cpu", warmup=0, repeats=4, min_repeats=4, seconds=0.0, flush_mib=0)


def bench(name: str = "qwen3-30b-a3b", slots: int = 3, fp8: str | None = None) -> MoEBench:
    return MoEBench(MoESizes(name, 4, 1, 32, 3, 16, "float32", fp8), slots, "cpu")


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


def test_adapters_without_effect_are_not_timed(monkeypatch):
    one = bench()
    one.layers[0].adapter_enabled.zero_()
    monkeypatch.setattr(one, "_check_operator", lambda *operands: None)
    with pytest.raises(CheckFailed, match="as if it had no adapter"):
        one.checked_calls([0, 1])


@pytest.mark.parametrize("fp8", [None, "float8_e4m3fn"])
def test_slots_beyond_the_batch_hold_adapters_that_no_row_uses(fp8):
    one = bench("mixtral-8x7b", 9, fp8)
    layer = one.layers[0]
    assert layer.adapter_enabled.tolist() == [1] * 9 + [0]
    assert layer.lora_ranks.tolist() == [[4] * 9] * 3
    for stack in (*layer.w13_lora_b_stacked, *layer.w2_lora_a_stacked):
        assert stack.dtype == (torch.float32 if fp8 is None else torch.float8_e4m3fn)
        assert bool(stack[0].float().any())
        assert torch.equal(stack[8].float(), stack[0].float())
    assert set(one.checked_calls([0, 2])) == SYSTEMS


@pytest.mark.parametrize("fp8", [None, "float8_e4m3fn"])
def test_the_engine_steps_with_the_adapters_of_a_popularity_and_with_none(fp8):
    engine = engine_of(MoESizes("qwen3-30b-a3b", 4, 2, 32, 3, 16, "float32", fp8), "cpu")
    layers = list(engine.engine.manager.modules.values())
    stored = {layer.base_layer.routed_experts.lora_context.w2_lora_a_stacked[0].dtype for layer in layers}
    assert stored == {torch.float32 if fp8 is None else torch.float8_e4m3fn}
    adapters = {"engine": (1, 2, 2), "backbone engine": (0, 0, 0)}
    found = decode_seconds(engine, adapters, 16, PROTOCOL)
    assert {name: len(seconds) for name, seconds in found.items()} == {"engine": 4, "backbone engine": 4}
    assert min(map(min, found.values())) > 0
    for layer in layers:
        layer.adapter_enabled.zero_()
    with pytest.raises(CheckFailed, match="as if its rows had no adapters"):
        decode_seconds(engine, adapters, 16, PROTOCOL)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [None, "float8_e4m3fn"])
def test_a_step_with_adapters_on_experts_is_a_graph(fp8):
    engine = engine_of(MoESizes("qwen3-30b-a3b", 16, 2, 8, 4, 64, "float16", fp8), "cuda")
    adapters = {"engine": (1, 2, 3, 4), "backbone engine": (0,) * 4}
    found = decode_seconds(engine, adapters, 64, replace(PROTOCOL, device="cuda"))
    assert min(map(min, found.values())) > 0
    assert engine.engine.runner.graphs.statistics.graphs == 2


def test_steps_of_the_engine_are_timed_by_the_hosts_clock_alone(tmp_path):
    clocks = {clock: {point.system for point in points_of(tmp_path, MOE, "hardware=h200", f"timer={clock}")}
              for clock in ("host_clock", "cuda_graph")}  # fmt: skip
    assert clocks == {"host_clock": SYSTEMS | ENGINES, "cuda_graph": SYSTEMS}


def test_numbers_of_slots_are_panels_and_hold_the_adapters_of_the_batch(tmp_path):
    words = ("figure.slots=[3,7]", "figure.batch_sizes=[3]", "workload.names=[Distinct]", "figure.layers=1",
             "figure.models=[mixtral-8x7b]", "figure.divisor=64", "system.names=[layer,engine]",
             "timer=host_clock")  # fmt: skip
    few, many, engine = points_of(tmp_path, MOE, *words)
    panels = [panel_of("mixtral-8x7b", None, slots) for slots in (3, 7, None)]
    assert [(one.panel, one.settings["slots"]) for one in (few, many, engine)] == [*zip(panels, (3, 7, 3), strict=True)]
    (readings,) = MOE.measure_together(settled(tmp_path, MOE, *words), [many])
    assert min(one.value for one in readings) > 0
    with pytest.raises(ConfigError, match="slots is 2, Distinct has 3 adapters in a batch of 3"):
        points_of(tmp_path, MOE, *words, "figure.slots=[2,7]")


def test_steps_are_no_cell_of_the_layers_beside_them_at_one_batch_and_popularity(tmp_path):
    words = ("figure.batch_sizes=[2]", "workload.names=[Distinct]", "figure.models=[mixtral-8x7b]")
    points = points_of(tmp_path, MOE, *words, "timer=host_clock")
    assert [{one.system for one in cell} for cell in MOE.together(points)] == [SYSTEMS, ENGINES]


def test_every_system_is_measured_and_drawn(tmp_path):
    words = ("figure.batch_sizes=[1,3]", "workload.names=[Distinct,Identical]", "figure.layers=1")
    outcome, rows = measured(tmp_path, MOE, *words)
    assert outcome.measured == 2 * 2 * 2 * (len(SYSTEMS) + len(ENGINES))
    rows = [row for row in rows if row.statistic == "median"]
    units = {(row.system, row.metric, row.unit) for row in rows}
    assert units == {
        ("alignment", "latency", "us"), ("w13 and w2", "latency", "us"), ("layer", "layer_latency", "us"),
        ("backbone layer", "layer_latency", "us"),
        *((name, "step_latency", "ms") for name in ENGINES),
    }  # fmt: skip
    assert all(row.value > 0 for row in rows)
