"""Models whose linear layers hold FP8: they compute what the model of the dequantised weights computes."""

import math
from typing import Any

import pytest
import torch

from punica.engine.attention import token_bytes
from punica.engine.config import EngineConfig, EngineMemory, fit_blocks
from punica.models import LlamaForCausalLM, load_model
from punica.ops.quant import dequantize, quantize_per_channel
from punica.parallel import LinearBase, MergedColumnParallelLinear, RowParallelLinear, matmul
from tests.models.moe_world import CONFIGS as EXPERTS
from tests.models.moe_world import hugging_face, logits_of
from tests.models.test_llama import CONFIGS, IDS

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
MOST_ERROR = 0.2
"""Bound of |logits in FP8 - logits| / |logits| for these models, whose weights are random; 0.10 to 0.15 were found."""


def linears(model: LlamaForCausalLM) -> list[LinearBase]:
    return [module for module in model.modules() if isinstance(module, LinearBase)]


def both(config: Any, dtype: torch.dtype) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Models with the same random weights, in FP8 and not."""
    narrow, plain = LlamaForCausalLM(config, dtype, fp8_weights=True), LlamaForCausalLM(config, dtype)
    narrow.init_random_weights(5)
    plain.init_random_weights(5)
    return narrow, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama2", "biases", "tied", "odd sizes", "qwen2", "qwen3"])
def test_logits_are_those_of_the_dequantised_weights_and_near_the_models(name: str, dtype: torch.dtype) -> None:
    narrow, plain = both(CONFIGS[name], dtype)
    logits = logits_of(plain, IDS).double()
    for low, full in zip(linears(narrow), linears(plain), strict=True):
        values, scale = quantize_per_channel(full.weight)
        assert torch.equal(low.weight.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(low.weight_scale, scale)
        full.weight.data = dequantize(values, scale).to(dtype)
    assert torch.equal(found := logits_of(narrow, IDS), logits_of(plain, IDS))
    assert 0 < (found.double() - logits).norm() / logits.norm() < MOST_ERROR


def test_blocks_take_the_memory_that_the_weights_leave(monkeypatch) -> None:
    """Of a device with as much memory as the model of 16 bits takes, and a few blocks."""
    narrow, plain = both(CONFIGS["llama2"], torch.bfloat16)
    config = EngineConfig(num_blocks=1000)
    taken, blocks = [EngineMemory.of(model, None, config, 0).weights for model in (narrow, plain)], []
    assert taken[1] - taken[0] == sum(one.weight.numel() - 4 * one.output_size for one in linears(plain)) > 0
    for model, weights in zip((narrow, plain), taken, strict=True):
        left = taken[1] + (1 << 16) - weights
        monkeypatch.setattr("punica.engine.config.free_bytes", lambda device, left=left: left)
        blocks.append((fit_blocks(model, config, 0, 1.0), left // (16 * token_bytes(model))))
    assert blocks[0][0] == blocks[0][1] > blocks[1][0] == blocks[1][1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_parts_of_the_whole_and_one_scale_for_a_row(rank: int) -> None:
    place: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "tp_rank": rank, "tp_size": 2}
    down, merged = RowParallelLinear(48, 20, **place), MergedColumnParallelLinear(48, [8, 12], **place)
    matrix = torch.randn(20, 48) * torch.logspace(-2, 2, 48)  # the largest of a row is on the last rank
    real = dequantize(*quantize_per_channel(matrix.bfloat16()))
    for layer, parts in (down, {None: matrix}), (merged, {0: matrix[:8], 1: matrix[8:]}):
        layer.hold_fp8()
        for shard, part in parts.items():
            layer.weight.weight_loader(layer.weight, part, shard)
        with pytest.raises(ValueError, match="checkpoint tensor must have shape"):
            layer.weight.weight_loader(layer.weight, matrix[1:], next(iter(parts)))
    rows = [*range(4 * rank, 4 * rank + 4), *range(8 + 6 * rank, 14 + 6 * rank)]
    assert torch.equal(dequantize(down.weight, down.weight_scale), real[:, 24 * rank :][:, :24])
    assert torch.equal(dequantize(merged.weight, merged.weight_scale), real[rows])


def test_rows_of_zeros_and_of_extreme_numbers() -> None:
    layer = RowParallelLinear(16, 5, bias=False, params_dtype=torch.bfloat16, return_bias=False)
    layer.hold_fp8()
    weight = torch.randn(5, 16) * torch.tensor([0.0, 1e-38, 1e-7, 1.0, 1e37])[:, None]
    layer.weight.weight_loader(layer.weight, weight)
    assert bool((torch.isfinite(layer.weight_scale) & (layer.weight_scale > 0)).all())
    found, expected = layer(torch.eye(16, dtype=torch.bfloat16)).T.float(), weight.bfloat16().float()
    assert bool(((found - expected).abs() <= expected.abs().amax(1, keepdim=True) / 16 + 1e-14).all())


def test_what_has_no_fp8_form_is_refused_by_name(tmp_path) -> None:
    reference = hugging_face(CONFIGS["llama2"])
    for number, message in (math.nan, Q_PROJ), (math.inf, Q_PROJ), (1e6, r"1\.self_attn\.qkv_proj has .* beyond torch"):
        reference.get_parameter(Q_PROJ).data[3] = number
        reference.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path, torch.float16, fp8_weights=True)
    hugging_face(EXPERTS["mixtral"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"fp8_weights is for dense models .* is a mixtral"):
        load_model(tmp_path, fp8_weights=True)
    with pytest.raises(TypeError, match="fp8_weights must be a bool, got 'fp8'"):
        LlamaForCausalLM(CONFIGS["llama2"], fp8_weights="fp8")  # type: ignore[arg-type]


def test_large_weights_are_dequantised_in_parts(monkeypatch) -> None:
    (values, scale), x, bias = quantize_per_channel(torch.randn(33, 24)), torch.randn(2, 5, 24), torch.randn(33)
    wholes = [matmul.fp8_linear(x, values, scale, one) for one in (None, bias)]
    monkeypatch.setattr(matmul, "MOST_DEQUANTISED", 24 * 10)
    torch.testing.assert_close([matmul.fp8_linear(x, values, scale, one) for one in (None, bias)], wholes)
