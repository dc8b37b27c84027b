"""A default device changes nothing: programs set one and the library still makes its host tensors on the host."""

from contextlib import nullcontext

import pytest
import torch
from layer_cases import (
    ALONE,
    DIM,
    IN,
    LINEAR,
    MIXED,
    ORG,
    config_for,
    embedding_layer,
    linear_layer,
    logits_layer,
    use,
    wrapper_for,
)
from torch import Tensor

from punica.parallel import matmul

KINDS = pytest.mark.parametrize(
    ("name", "sharded"),
    [("replicated", False), ("merged-gathered", True), ("qkv", False), ("row-whole-input", True), ("embedding", False),
     ("logits", False)],
)  # fmt: skip
Result = tuple[Tensor, list[Tensor]]


def run(name: str, sharded: bool, device: str, default: str | None) -> Result:
    """Build the layer, fill its slots and run it with a default device; the wrapper comes from outside."""
    wrapper = wrapper_for(config_for(torch.float32), device)
    use(wrapper, MIXED, ORG if name == "embedding" else 32)
    torch.manual_seed(3)
    config, rows = config_for(torch.float32, fully_sharded_loras=sharded), len(MIXED)
    with torch.device(default) if default else nullcontext():
        if name == "embedding":
            layer, _ = embedding_layer(config, device)
            given = (torch.tensor([0, 3, 14, 19, 7, 2, 8], device=device),)
        elif name == "logits":
            layer, head, _ = logits_layer(config, device)
            given = (head, torch.randn(rows, DIM, device="cpu").to(device))
        else:
            layer, _ = linear_layer(LINEAR[name], config, device, ALONE)
            given = (torch.randn(rows, IN, device="cpu").to(device),)
        layer.set_mapping(wrapper)
        return layer(*given), [part.slots for part in layer.slot_parts()]


def assert_same(found: Result, expected: Result) -> None:
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


@KINDS
def test_a_layer_on_the_cpu_under_default_device_meta(name: str, sharded: bool) -> None:
    assert_same(run(name, sharded, "cpu", "meta"), run(name, sharded, "cpu", None))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@KINDS
def test_a_layer_under_default_device_cuda(name: str, sharded: bool, device: str) -> None:
    assert_same(run(name, sharded, device, "cuda"), run(name, sharded, device, None))


def test_the_probe_of_the_dense_product() -> None:
    known = matmul.onednn_linear.__wrapped__()
    with torch.device("meta"):
        assert matmul.onednn_linear.__wrapped__() is known
