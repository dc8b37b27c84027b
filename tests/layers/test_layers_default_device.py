"""A default device changes nothing: programs set one and the library still makes its host tensors on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layer_cases import (
    ALONE,
    IN,
    LINEAR,
    MAX_LORAS,
    MIXED,
    NEVER_SHARDED,
    RANKS,
    config_for,
    linear_layer,
    random_pair,
    use,
    wrapper_for,
)
from torch import Tensor

from punica.layers import from_layer, from_layer_logits_processor
from punica.parallel import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding, matmul

ORG, VOCAB, DIM = 15, 20, 24
KINDS = [
    *(pytest.param(name, False, id=name) for name in LINEAR),
    *(pytest.param(name, True, id=f"{name}-sharded") for name in LINEAR if name not in NEVER_SHARDED),
    *(pytest.param(name, False, id=name) for name in ("embedding", "logits")),
]
Result = tuple[Tensor, list[Tensor]]


def linear(name: str, sharded: bool, device: str, wrapper: Any) -> Result:
    config = config_for(torch.float32, fully_sharded_loras=sharded)
    layer, _ = linear_layer(LINEAR[name], config, device, ALONE)
    layer.set_mapping(wrapper)
    x = torch.randn(len(MIXED), IN, device="cpu").to(device)
    return layer(x), [part.slots for part in layer.slot_parts()]


def embedding(device: str, wrapper: Any) -> Result:
    with torch.device(device):
        base = VocabParallelEmbedding(VOCAB, DIM, torch.float32, org_num_embeddings=ORG, padding_size=4)
    base.weight_loader(base.weight, torch.randn(VOCAB, DIM, device="cpu"))
    layer = from_layer(base, MAX_LORAS, config_for(torch.float32), [])
    layer.set_mapping(wrapper)
    for slot, rank in RANKS.items():
        layer.set_lora(slot, *random_pair(rank, ORG, DIM))
    ids = torch.tensor([0, 3, 14, 19, 7, 2, 8], device=device)
    return layer(ids), [part.slots for part in layer.slot_parts()]


def logits(device: str, wrapper: Any) -> Result:
    with torch.device(device):
        head = ParallelLMHead(VOCAB, DIM, True, torch.float32, org_num_embeddings=ORG, padding_size=4)
    head.weight_loader(head.weight, torch.randn(VOCAB, DIM, device="cpu"))
    layer = from_layer_logits_processor(LogitsProcessor(VOCAB), head, MAX_LORAS, config_for(torch.float32))
    layer.set_mapping(wrapper)
    for slot, rank in RANKS.items():
        layer.set_lora(slot, *random_pair(rank, DIM, VOCAB))
    hidden = torch.randn(len(MIXED), DIM, device="cpu").to(device)
    return layer(head, hidden), [part.slots for part in layer.slot_parts()]


def run(name: str, sharded: bool, device: str, default: str | None) -> Result:
    """Build the layer, fill its slots and run it with a default device; the wrapper comes from outside."""
    wrapper = wrapper_for(config_for(torch.float32), device)
    use(wrapper, MIXED, ORG if name == "embedding" else 32)
    torch.manual_seed(3)
    other: dict[str, Callable[..., Result]] = {"embedding": embedding, "logits": logits}
    with torch.device(default) if default else nullcontext():
        return other[name](device, wrapper) if name in other else linear(name, sharded, device, wrapper)


def assert_same(found: Result, expected: Result) -> None:
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize(("name", "sharded"), KINDS)
def test_a_layer_on_the_cpu_under_default_device_meta(name: str, sharded: bool) -> None:
    assert_same(run(name, sharded, "cpu", "meta"), run(name, sharded, "cpu", None))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "sharded"), KINDS)
def test_a_layer_under_default_device_cuda(name: str, sharded: bool, device: str) -> None:
    assert_same(run(name, sharded, device, "cuda"), run(name, sharded, device, None))


def test_the_probe_of_the_dense_product() -> None:
    known = matmul.onednn_linear.__wrapped__()
    with torch.device("meta"):
        assert matmul.onednn_linear.__wrapped__() is known
