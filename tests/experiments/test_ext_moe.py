"""The popularity sweep on experts: what is measured, and that a wrong result is never timed."""

import pytest
import torch
from fakes import composed

from experiments.benches.moe_bench import MODELS, MoEBench, model_config
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from punica.measure.records import read_rows

MOE = next(iter(experiments(["ext_moe"])))
SYSTEMS = {"alignment", "w13 and w2", "layer", "backbone layer", "model", "backbone model"}


def bench(name: str = "qwen3-30b-a3b") -> MoEBench:
    return MoEBench(name, 4, 1, 32, 3, 3, 16, "float32", "cpu")


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
    one = MoEBench("mixtral-8x7b", 4, 1, 32, 3, 3, 16, "float32", "cpu", fp8="float8_e5m2")
    assert one.contexts[0].w2_lora_a_stacked[0].dtype == torch.float8_e5m2
    assert set(one.checked_calls([0, 2])) == SYSTEMS


def test_adapters_without_effect_are_not_timed(monkeypatch):
    one = bench()
    one.layers[0].adapter_enabled.zero_()
    monkeypatch.setattr(one, "_check_operator", lambda *operands: None)
    with pytest.raises(CheckFailed, match="as if it had no adapter"):
        one.checked_calls([0, 1])


def test_every_system_is_measured_and_drawn(tmp_path):
    words = ("figure.batch_sizes=[1,3]", "workload.names=[Distinct,Identical]", "figure.layers=1")
    outcome = run(composed(tmp_path, *words, "draw=true", name="ext_moe"), MOE)
    assert (outcome.failed, outcome.measured) == ([], 2 * 2 * 2 * len(SYSTEMS))
    assert len(outcome.figures) == 3
    rows = [row for row in read_rows(outcome.rows_file) if row.statistic == "median"]
    units = {(row.system, row.metric, row.unit) for row in rows}
    assert units == {
        ("alignment", "latency", "us"), ("w13 and w2", "latency", "us"), ("layer", "layer_latency", "us"),
        ("backbone layer", "layer_latency", "us"), ("model", "throughput", "token/s"),
        ("backbone model", "throughput", "token/s"),
    }  # fmt: skip
    assert all(row.value > 0 for row in rows)
    assert run(composed(tmp_path, *words, name="ext_moe"), MOE).measured == 0
