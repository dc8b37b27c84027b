"""The popularity sweep on experts: what is measured, and that a wrong result is never timed."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from fakes import composed

from experiments.benches.expert_models import MODELS, MoEBench, MoESizes, decode_seconds, engine_of, model_config
from experiments.ext_moe import EXPERIMENT as MOE
from experiments.ext_moe import panel_of
from experiments.harness.counted import frame_of
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import Row, read_rows
from experiments.measure.timing import Protocol
from experiments.plots.extensions import draw_moe

ENGINES = {"engine", "backbone engine"}
SYSTEMS = {"alignment", "w13 and w2", "layer", "backbone layer"}
PROTOCOL = Protocol("host_clock", "cpu", warmup=0, repeats=4, min_repeats=4, seconds=0.0, flush_mib=0)


def bench(name: str = "qwen3-30b-a3b", slots: int = 3, fp8: str | None = None) -> MoEBench:
    return MoEBench(MoESizes(name, 4, 1, 32, 3, 16, "float32", fp8), slots, "cpu")


def points(tmp_path, *words):
    return MOE.points(settle(composed(tmp_path, *words, name="ext_moe"), MOE))


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


# points


def test_steps_of_the_engine_are_timed_by_the_hosts_clock_alone(tmp_path):
    clocks = {clock: {point.system for point in points(tmp_path, "hardware=h200", f"timer={clock}")}
              for clock in ("host_clock", "cuda_graph")}  # fmt: skip
    assert clocks == {"host_clock": SYSTEMS | ENGINES, "cuda_graph": SYSTEMS}


def test_fp8_adapters_have_points_of_their_own(tmp_path):
    plain, fp8 = points(tmp_path), points(tmp_path, "figure.fp8=float8_e4m3fn")
    assert len(plain) == len(fp8)
    assert not {point.panel for point in plain} & {point.panel for point in fp8}


def test_numbers_of_slots_are_panels_and_hold_the_adapters_of_the_batch(tmp_path):
    words = ("figure.slots=[2,7]", "figure.batch_sizes=[3]", "workload.names=[Distinct]", "figure.layers=1",
             "figure.models=[mixtral-8x7b]", "figure.divisor=64", "system.names=[layer,engine]",
             "timer=host_clock")  # fmt: skip
    few, many, engine = points(tmp_path, *words)
    panels = [panel_of("mixtral-8x7b", None, slots) for slots in (2, 7, None)]
    assert [(one.panel, one.settings["slots"]) for one in (few, many, engine)] == [*zip(panels, (2, 7, 3), strict=True)]
    cfg = settle(composed(tmp_path, *words, name="ext_moe"), MOE)
    (readings,) = MOE.measure_together(cfg, [many])
    assert min(one.value for one in readings) > 0
    with pytest.raises(ValueError, match="slots is 2, Distinct has 3 adapters in a batch of 3"):
        MOE.measure_together(cfg, [few])


def test_every_system_is_measured_and_drawn(tmp_path):
    words = ("figure.batch_sizes=[1,3]", "workload.names=[Distinct,Identical]", "figure.layers=1")
    outcome = run(composed(tmp_path, *words, "draw=true", name="ext_moe"), MOE)
    assert (outcome.failed, outcome.measured) == ([], 2 * 2 * 2 * (len(SYSTEMS) + len(ENGINES)))
    assert len(outcome.figures) == 3
    rows = [row for row in read_rows(outcome.rows_file) if row.statistic == "median"]
    units = {(row.system, row.metric, row.unit) for row in rows}
    assert units == {
        ("alignment", "latency", "us"), ("w13 and w2", "latency", "us"), ("layer", "layer_latency", "us"),
        ("backbone layer", "layer_latency", "us"),
        *((name, *rest) for name in ENGINES for rest in (("engine_throughput", "token/s"), ("step_latency", "ms"))),
    }  # fmt: skip
    assert all(row.value > 0 for row in rows)
    assert run(composed(tmp_path, *words, name="ext_moe"), MOE).measured == 0


def test_engine_fp8_and_slots_are_drawn_beside_layers(tmp_path):
    """Layers in one panel; steps of the engine also in FP8, and at two numbers of slots, which share a column."""
    about = {
        "figure": MOE.figure, "workload": "Distinct", "model": "qwen3-30b-a3b", "hardware": "h200", "seq_len": 64,
        "rank": 16, "statistic": "median", "scale": "gpu", "device": "an H200", "timer": "host_clock",
    }  # fmt: skip
    plain, fp8, *slots = [panel_of("qwen3-30b-a3b", *kind) for kind in ((None,), ("e4m3",), (None, 8), (None, 256))]
    rows = [Row(**about, panel=plain, system=system, batch_size=batch, metric="layer_latency", unit="us", value=100.0)
            for system in ("layer", "backbone layer") for batch in (1, 8)]  # fmt: skip
    rows += [Row(**about, panel=panel, system=system, batch_size=batch, metric="step_latency", unit="ms", value=value)
             for panel, value, batches in ((plain, 10.0, (1, 8)), (fp8, 11.0, (1, 8)), (slots[0], 12.0, (8,)),
                                           (slots[1], 13.0, (8,)))
             for system in ENGINES for batch in batches]  # fmt: skip
    shown = {(axis.get_subplotspec().rowspan.start, axis.get_subplotspec().colspan.start): axis
             for axis in draw_moe(frame_of(rows), pd.DataFrame()).axes}  # fmt: skip
    values = {place: [line.get_ydata().tolist() for line in axis.lines] for place, axis in shown.items()}
    assert values == {(0, 0): [[100, 100]] * 2, (1, 0): [[10, 10]] * 2, (0, 1): [], (1, 1): [[11, 11]] * 2,
                      (0, 2): [], (1, 2): [[12, 13]] * 2}  # fmt: skip
    assert (shown[1, 2].get_xlabel(), shown[1, 2].lines[0].get_xdata().tolist()) == ("slots", [8, 256])
