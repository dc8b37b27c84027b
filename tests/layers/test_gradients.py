"""LoRA layers outside of `torch.no_grad`: they work where nothing needs a gradient, else one error says the remedy."""

import pytest
import torch
from torch import nn

from punica.config import LoRAConfig
from punica.layers import from_layer
from punica.metadata import LoRAMapping
from punica.parallel import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, VocabParallelEmbedding
from punica.wrapper import get_punica_wrapper

CONFIG = LoRAConfig(max_lora_rank=4, max_loras=2, lora_dtype=torch.float32)
LINEAR = [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear]


def wrapped(base: nn.Module, width: int, height: int) -> nn.Module:
    for parameter in base.parameters():
        parameter.data.normal_()
    layer = from_layer(base, 2, CONFIG, [])
    wrapper = get_punica_wrapper(8, 4, "cpu", max_loras=2, lora_config=CONFIG)
    wrapper.update_metadata(LoRAMapping((1, 0, 1), (1,)), [1, None], 3, 12)
    layer.set_mapping(wrapper)
    layer.set_lora(0, torch.randn(4, width), torch.randn(height, 4))
    return layer


@pytest.mark.parametrize("base", LINEAR, ids=lambda base: base.__name__)
def test_a_linear_layer(base) -> None:
    layer = wrapped(base(6, 5, bias=False, return_bias=False), 6, 5).requires_grad_(False)
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = layer(x)
    assert torch.equal(layer(x), expected), "nothing needs a gradient"
    for needs in (x.clone().requires_grad_(), x):
        layer.requires_grad_(needs is x)
        with pytest.raises(RuntimeError, match=r"WithLoRA is for inference.*torch\.no_grad\(\), or .*requires_grad_"):
            layer(needs)
        with torch.inference_mode():
            assert torch.equal(layer(needs), expected)


def test_an_embedding() -> None:
    layer, ids = wrapped(VocabParallelEmbedding(12, 5), 12, 5).requires_grad_(False), torch.tensor([3, 1, 2])
    with torch.no_grad():
        expected = layer(ids)
    assert torch.equal(layer(ids), expected)
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"VocabParallelEmbeddingWithLoRA is for inference.*inference_mode"):
        layer(ids)


@pytest.mark.parametrize(
    ("layer", "instead"),
    [(nn.Linear(3, 2), "ReplicatedLinear"), (nn.Embedding(3, 2), "VocabParallelEmbedding")],
    ids=["linear", "embedding"],
)
def test_what_no_class_wraps_is_named_once(layer, instead) -> None:
    name = type(layer).__name__
    with pytest.warns(UserWarning, match=f"{name} without LoRA, .* punica.parallel.{instead} with its weight") as told:
        assert from_layer(layer, 2, CONFIG, []) is layer
    assert len(told) == 1
