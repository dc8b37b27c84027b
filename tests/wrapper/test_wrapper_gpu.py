"""PunicaWrapperGPU: few launches, no synchronisation, graphs that replay any mapping, checks of its own."""

import pytest
import torch

from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU, get_punica_wrapper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_buffer_and_strided_parts_are_refused_before_anything_is_written() -> None:
    gpu, ids = PunicaWrapperGPU(48, 2, DEVICE, max_loras=4), [3, 0, 1, 3, 2]
    gpu.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 5, 1000)
    x, y, b = (torch.ones(shape, device=DEVICE) for shape in ((5, 32), (5, 50), (4, 1, 50, 8)))
    a = tuple(torch.ones(2, 4, 1, 8, 32, device=DEVICE))
    with pytest.raises(ValueError, match="created internally"):
        gpu.add_lora_linear(y, x, a[:1], (b,), 1.0, (50,), buffer=torch.zeros(1, 5, 8))
    parts = torch.ones(5, 8, device=DEVICE), torch.ones(5, 16, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match=r"y\[1\] has strides \(16, 2\)"):
        gpu.add_shrink(parts, x, a, 1.0)
    assert bool((y == 1).all() and (parts[0] == 1).all())


@pytest.mark.gpu
def test_backend_follows_the_device() -> None:
    assert type(get_punica_wrapper(8, 4, "cuda", max_loras=2)) is PunicaWrapperGPU
    assert type(get_punica_wrapper(8, 4, "cuda", max_loras=2, backend="cpu")) is PunicaWrapperCPU


@pytest.mark.gpu
def test_at_most_two_launches_one_allocation_and_no_synchronisation() -> None:
    slots, widths = list(range(-1, 63)), [256, 64, 64]
    gpu = PunicaWrapperGPU(128, 2, "cuda", max_loras=64)
    gpu.update_metadata(LoRAMapping([s + 1 for s in slots], []), list(range(1, 65)), 65, 1000)
    a = tuple(torch.randn(64, 1, 16, 512, device="cuda").half() for _ in widths)
    b = tuple(torch.randn(64, 1, width, 16, device="cuda").half() for width in widths)
    x, y = torch.randn(64, 512, device="cuda").half(), torch.zeros(64, 384, device="cuda").half()
    none = LoRAMapping([0] * 64, [])
    gpu.add_lora_linear(y, x, a, b, 1.0, widths)  # compiles
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.add_lora_linear(y, x, a, b, 1.0, widths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocated <= 1
    launches = []
    for step in (None, none):
        if step is not None:
            gpu.update_metadata(step, list(range(1, 65)), 65, 1000)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            gpu.add_lora_linear(y, x, a, b, 1.0, widths)
            torch.cuda.synchronize()
        launches.append([e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA])
    assert 1 <= len(launches[0]) <= 2
    assert launches[1] == []
