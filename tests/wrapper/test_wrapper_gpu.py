"""PunicaWrapperGPU: few launches, no synchronisation, graphs that replay any mapping, checks of its own."""

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperBase, PunicaWrapperCPU, PunicaWrapperGPU, get_punica_wrapper

L, N = 4, 48
ADAPTERS = [11, 12, 13, 14]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [2, -1, 0, 2, 1]
T = len(MIXED)


def mapping(slots: list[int], sampled: list[int] | None = None) -> LoRAMapping:
    ids = [0, *ADAPTERS]
    return LoRAMapping([ids[s + 1] for s in slots], [ids[s + 1] for s in (slots if sampled is None else sampled)])


def made(slots: list[int], sampled: list[int] | None = None, **config) -> PunicaWrapperGPU:
    gpu = PunicaWrapperGPU(N, 2, DEVICE, lora_config=LoRAConfig(max_loras=L, max_lora_rank=64, **config))
    update(gpu, slots, sampled)
    return gpu


def update(wrapper: PunicaWrapperBase, slots: list[int], sampled: list[int] | None = None) -> None:
    wrapper.update_metadata(mapping(slots, sampled), ADAPTERS, L + 1, 1000)


def weights(hidden: int, rank: int, widths: list[int], dtype: torch.dtype):
    a = tuple((torch.randn(L, 1, rank, hidden) / hidden**0.5).to(dtype) for _ in widths)
    b = tuple((torch.randn(L, 1, width, rank) / rank**0.5).to(dtype) for width in widths)
    return a, b


def there(value):
    return tuple(tensor.to(DEVICE) for tensor in value) if isinstance(value, tuple) else value.to(DEVICE)


def test_metadata_of_both_mappings() -> None:
    gpu = made(MIXED, [2, -1, 3])
    assert gpu.token_mapping_meta.token_lora_mapping.tolist() == MIXED + [-1] * (N - T)
    assert gpu.prompt_mapping_meta.token_lora_mapping[:4].tolist() == [2, -1, 3, -1]


def test_errors_write_nothing_and_a_buffer_is_refused() -> None:
    a, b = weights(32, 8, [50], torch.float32)
    gpu = made(MIXED)
    y = there(torch.zeros(T, 50))
    x, a, b = there(torch.ones(T, 32)), there(a), there(b)
    with pytest.raises(ValueError, match="created internally"):
        gpu.add_lora_linear(y, x, a, b, 1.0, (50,), buffer=torch.zeros(1, T, 8))
    with pytest.raises(ValueError, match=f"{T - 1} rows"):
        gpu.add_lora_linear(y[:-1], x[:-1], a, b, 1.0, (50,))
    with pytest.raises(TypeError, match="scales"):
        gpu.add_lora_linear(y, x, a, b, 1.0, (50,), scales=1)
    with pytest.raises(ValueError, match="scale is nan"):
        gpu.add_lora_linear(y, x, a, b, float("nan"), (50,))
    update(gpu, [-1] * T)
    gpu.add_lora_linear(y, x, a, b, 1.0, (50,))
    assert not y.any()


def test_strided_parts_of_a_shrink_are_refused_before_the_first_is_written() -> None:
    gpu = made(MIXED)
    a, _ = weights(32, 8, [6, 5], torch.float32)
    parts = torch.zeros(T, 8, device=DEVICE), torch.zeros(T, 16, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match=r"y\[1\] has strides \(16, 2\)"):
        gpu.add_shrink(parts, there(torch.ones(T, 32)), there(a), 1.0)
    assert not parts[0].any()


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
