"""Explicit devices under a default device: host tensors stay on the host.

``meta`` stands in for any other device: a host tensor built without a device would become a meta tensor and fail.
"""

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRABatch, LoRAKernelMeta, LoRAMapping, compute_meta, convert_mapping
from punica.ops import reference
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import Stack
from punica.wrapper import PunicaWrapperGPU, get_punica_wrapper

IDS = (7, 0, 9, 7)


def step(backend: str) -> list[torch.Tensor]:
    """Run a linear on the wrapper, with metadata in every form and all tensors of the caller on the host."""
    mapping = LoRAMapping(IDS, IDS, is_prefill=True)
    if backend == "kernels":
        wrapper = PunicaWrapperGPU(8, 8, "cpu", lora_config=LoRAConfig(max_loras=2, max_lora_rank=4))
    else:
        wrapper = get_punica_wrapper(8, 8, "cpu", max_loras=2, backend=backend)
    wrapper.update_metadata(mapping, [7, 9], 3, 100)
    a = (torch.ones(2, 1, 4, 16, device="cpu"),)
    b = (torch.ones(2, 1, 16, 4, device="cpu"),)
    y = torch.zeros(4, 16, device="cpu")
    wrapper.add_lora_linear(y, torch.ones(4, 16, device="cpu"), a, b, 0.5, (16,))
    logits = torch.zeros(4, 16, device="cpu")
    wrapper.add_lora_logits(logits, torch.ones(4, 16, device="cpu"), a[0], b[0], 0.5)
    slots = torch.tensor([1, -1], device="cpu")
    meta = LoRAKernelMeta.make(2, 4, "cpu")
    meta.prepare_tensors(slots)
    h = torch.zeros(1, 2, 4, device="cpu")
    x = torch.ones(2, 16, device="cpu")
    TorchOps().shrink(h, x, Stack.of_a((a[0].cpu(),)), LoRABatch.of_slots(slots))
    out = torch.zeros(2, 4, device="cpu")
    reference.bgmv_shrink(torch.ones(2, 16, device="cpu"), a[0].cpu(), out, slots)
    read = [wrapper.token_lora_indices, wrapper.sampler_indices_padded, wrapper.embeddings_indices]
    more = [*wrapper.prefill_metadata[:3], *convert_mapping(mapping, [7, 9], 3, 100, 0, "cpu")[:4]]
    return [y, logits, *meta.meta_args(3)[:6], h, out, *read, *more, *compute_meta(slots)[:3]]


@pytest.mark.parametrize("backend", ["cpu", "kernels"])
def test_metadata_wrappers_and_operators_under_meta(backend: str) -> None:
    if backend == "kernels" and torch.cuda.is_available():
        pytest.skip("kernels on CPU tensors need Triton's interpreter; the GPU test runs them on the device")
    outside = step(backend)
    with torch.device("meta"):
        inside = step(backend)
    assert all(tensor.device.type == "cpu" for tensor in inside)
    for one, other in zip(outside, inside, strict=True):
        assert torch.equal(one, other)
