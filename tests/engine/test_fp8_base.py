"""Engines over a model in FP8 generate, with adapters, the tokens of an engine over the dequantised weights."""

import pytest
import torch

from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from punica.ops.quant import dequantize
from punica.parallel import LinearBase, spawn_tensor_parallel
from tests.world import Backbone, Wish


def models(backbone: Backbone, dtype: torch.dtype, device: str = "cpu") -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The model in FP8, and one of its dequantised weights."""
    narrow, model = LlamaForCausalLM(backbone.folder, dtype, device, fp8_weights=True), backbone.model(device, dtype)
    narrow.load_weights(backbone.folder)
    for name, module in narrow.named_modules():
        if isinstance(module, LinearBase):
            model.get_submodule(name).weight.data = dequantize(module.weight, module.weight_scale).to(dtype)
    return narrow, model


def tokens_of(model: LlamaForCausalLM, backbone: Backbone, wishes: list[Wish], **sizes: bool) -> list[list[int]]:
    config = EngineConfig(max_batch_size=8, max_model_len=64, **sizes)
    return backbone.serve(Engine(model, config.lora_config(16, max_loras=3), config), wishes)


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_tokens_are_those_of_the_dequantised_weights(backbone, mixed_wishes, dtype, cache) -> None:
    found, expected = (
        tokens_of(model, backbone, mixed_wishes[:8], fp8_kv_cache=cache) for model in models(backbone, dtype)
    )
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 4


def test_batch_invariance_is_refused(backbone) -> None:
    with pytest.raises(ValueError, match="batch_invariant needs plain linear layers"):
        Engine.from_pretrained(backbone.folder, max_model_len=64, fp8_weights=True, batch_invariant=True)


def on_rank(rank: int, backbone: Backbone, wishes: list[Wish]) -> list[list[int]]:
    return tokens_of(models(backbone, torch.float32)[0], backbone, wishes)


@pytest.mark.slow
def test_two_ranks_generate_what_one_generates(backbone, mixed_wishes) -> None:
    given = backbone, mixed_wishes[1:3]
    assert spawn_tensor_parallel(on_rank, 2, *given, backend="gloo") == [on_rank(0, *given)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tokens_on_a_gpu(backbone, mixed_wishes, cuda_graphs) -> None:
    """In float32 all weights are dequantised; in bfloat16 few rows have kernels of their own, and other roundings."""
    for dtype, least in ((torch.float32, 16), (torch.bfloat16, 9)):
        found, expected = (
            tokens_of(model, backbone, mixed_wishes, cuda_graphs=cuda_graphs)
            for model in models(backbone, dtype, "cuda")
        )
        assert sum(mine == theirs for mine, theirs in zip(found, expected, strict=True)) >= least
