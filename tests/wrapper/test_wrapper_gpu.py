"""PunicaWrapperGPU: results of the CPU wrapper, few launches, no synchronisation, graphs that replay any mapping.

Without a GPU the small shapes run in a child process under Triton's interpreter, which has to be chosen before triton
is imported; the same file is its script there.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica.capture import capture
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperBase, PunicaWrapperCPU, PunicaWrapperGPU, get_punica_wrapper

L, N = 4, 48
ADAPTERS = [11, 12, 13, 14]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2)}


def on_kernels(test: Callable) -> Callable:
    """Needs a GPU in this process; runs on the CPU in the child process of `test_interpreter`."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def test_interpreter() -> None:
    """Every kernel test below, in the interpreter."""
    if INTERPRETED or torch.cuda.is_available() or not HAS_TRITON:
        pytest.skip("already interpreted, or the GPU runs these tests, or there is no Triton")
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def mapping(slots: list[int], sampled: list[int] | None = None) -> LoRAMapping:
    ids = [0, *ADAPTERS]
    return LoRAMapping([ids[s + 1] for s in slots], [ids[s + 1] for s in (slots if sampled is None else sampled)])


def pair(slots: list[int], sampled: list[int] | None = None, **config) -> tuple[PunicaWrapperCPU, PunicaWrapperGPU]:
    cpu = PunicaWrapperCPU(N, N, "cpu", max_loras=L)
    gpu = PunicaWrapperGPU(N, 2, DEVICE, lora_config=LoRAConfig(max_loras=L, max_lora_rank=64, **config))
    for wrapper in (cpu, gpu):
        update(wrapper, slots, sampled)
    return cpu, gpu


def update(wrapper: PunicaWrapperBase, slots: list[int], sampled: list[int] | None = None) -> None:
    wrapper.update_metadata(mapping(slots, sampled), ADAPTERS, L + 1, 1000)


def weights(hidden: int, rank: int, widths: list[int], dtype: torch.dtype):
    a = tuple((torch.randn(L, 1, rank, hidden) / hidden**0.5).to(dtype) for _ in widths)
    b = tuple((torch.randn(L, 1, width, rank) / rank**0.5).to(dtype) for width in widths)
    return a, b


def there(value):
    return tuple(tensor.to(DEVICE) for tensor in value) if isinstance(value, tuple) else value.to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=atol)


MIXED = [2, -1, 0, 2, 1] if INTERPRETED else [0, 2, 2, -1, 3, 0, 0, -1, 1, 2, 1]  # the interpreter is slow
T = len(MIXED)
CASES = {
    "mixed": (MIXED, T),
    "padded": (MIXED, T + 2),
    "identical": ([1] * 20, 20),
    "one token": ([3], 1),
    "distinct": ([0, 1, 2, 3], 4),
}
INTERPRETED_CASES = [("padded", False, torch.bfloat16), ("one token", True, torch.float32)]
GPU_CASES = [(case, specialize, dtype) for case in CASES for specialize in (False, True) for dtype in TOLERANCE]


@on_kernels
@pytest.mark.parametrize(("case", "specialize", "dtype"), INTERPRETED_CASES if INTERPRETED else GPU_CASES)
def test_linear_equals_the_cpu_wrapper(case: str, specialize: bool, dtype: torch.dtype) -> None:
    slots, rows = CASES[case]
    widths = [18, 16, 16]
    a, b = weights(40, 20, widths, dtype)
    x, y = torch.randn(rows, 40).to(dtype), torch.randn(rows, 55).to(dtype)
    cpu, gpu = pair(slots, specialize_active_lora=specialize)
    on_device = there(y.clone())
    cpu.add_lora_linear(y, x, a, b, 0.5, widths)
    gpu.add_lora_linear(on_device, there(x), there(a), there(b), 0.5, widths)
    assert_close(on_device, y)
    none = [t for t in range(rows) if t >= len(slots) or slots[t] < 0]
    assert torch.equal(on_device.cpu()[none], y[none])


@on_kernels
@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
def test_shrink_accumulates_and_expand_takes_columns(as_tuple: bool) -> None:
    a, b = weights(64, 8, [7, 5], torch.float32)
    x, buffer, y = torch.randn(T, 64), torch.randn(2, T, 8), torch.randn(T, 20)
    cpu, gpu = pair(MIXED)
    buffer_there, y_there = there(buffer.clone()), there(y.clone())
    for wrapper, low, out in ((cpu, buffer, y), (gpu, buffer_there, y_there)):
        to = there if wrapper is gpu else lambda value: value
        operand = tuple(low) if as_tuple else low
        wrapper.add_shrink(operand, to(x), to(a), 0.5)
        wrapper.add_expand(out, operand, to(b), (7, 5), 3, add_inputs=False)
    assert_close(buffer_there, buffer)
    assert_close(y_there, y)


@on_kernels
def test_embedding_logits_and_true_ranks() -> None:
    (a,), (b,) = weights(32, 8, [50], torch.float32)
    cpu, gpu = pair(MIXED, [2, -1, 3])
    ranks = torch.tensor([[8, 3, 0, 5]], dtype=torch.int32)
    low, rows = torch.randn(T, 8), torch.randn(T, 50)
    hidden, logits = torch.randn(3, 32), torch.randn(3, 64)
    rows_there, logits_there = there(rows.clone()), there(logits.clone())
    cpu.add_lora_embedding(rows, low, b, False, lora_ranks=ranks)
    gpu.add_lora_embedding(rows_there, there(low), there(b), False, lora_ranks=there(ranks))
    assert_close(rows_there, rows)
    cpu.add_lora_logits(logits, hidden, a, b, 0.5, lora_ranks=ranks)
    gpu.add_lora_logits(logits_there, there(hidden), there(a), there(b), 0.5, lora_ranks=there(ranks))
    assert_close(logits_there, logits)


@on_kernels
def test_metadata_of_both_mappings_and_segments_on_demand() -> None:
    _, gpu = pair(MIXED, [2, -1, 3])
    assert gpu.token_mapping_meta.token_lora_mapping.tolist() == MIXED + [-1] * (N - T)
    assert gpu.prompt_mapping_meta.token_lora_mapping[:4].tolist() == [2, -1, 3, -1]
    with pytest.raises(RuntimeError, match="is_prefill"):
        _ = gpu.prefill_metadata
    gpu.update_metadata(LoRAMapping((11, 11, 0, 12, 11), (11,), is_prefill=True), ADAPTERS, L + 1, 1000)
    starts, lengths, slots, *counts = gpu.prefill_metadata
    assert (starts.tolist(), lengths.tolist(), slots.tolist()) == ([0, 2, 3, 4], [2, 1, 1, 1], [0, -1, 1, 0])
    assert counts == [4, 2, 5]


@on_kernels
def test_errors_write_nothing_and_a_buffer_is_refused() -> None:
    a, b = weights(32, 8, [50], torch.float32)
    _, gpu = pair(MIXED)
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


@on_kernels
def test_strided_parts_of_a_shrink_are_refused_before_the_first_is_written() -> None:
    _, gpu = pair(MIXED)
    a, _ = weights(32, 8, [6, 5], torch.float32)
    parts = torch.zeros(T, 8, device=DEVICE), torch.zeros(T, 16, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match=r"y\[1\] has strides \(16, 2\)"):
        gpu.add_shrink(parts, there(torch.ones(T, 32)), there(a), 1.0)
    assert not parts[0].any()


@on_kernels
def test_debug_checks_look_at_the_device_once_per_step() -> None:
    a, b = weights(32, 8, [50], torch.float32)
    _, gpu = pair(MIXED, debug_checks=True)
    verify, seen = gpu._verify_indices, []
    gpu._verify_indices = lambda tensors, slots: (seen.append(slots), verify(tensors, slots))
    update(gpu, MIXED)
    for _ in range(3):
        gpu.add_lora_linear(there(torch.zeros(T, 50)), there(torch.ones(T, 32)), there(a), there(b), 1.0, (50,))
    assert seen == [L, L]  # the tokens, and the sampled rows
    gpu.batch.kernel_meta.active_lora_ids.fill_(L)
    with pytest.raises(ValueError, match=rf"lora_ids\[0\] is {L}"):
        verify(gpu.batch.tensors, L)


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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [N])
def test_one_graph_replays_every_mapping(rows: int) -> None:
    widths = [33, 16]
    a, b = (there(w) for w in weights(128, 16, widths, torch.float16))
    x, y = torch.randn(rows, 128, device="cuda").half(), torch.zeros(rows, 49, device="cuda").half()
    _, gpu = pair([0, 1, 2, 3, -1] * (rows // 5))
    gpu.add_lora_linear(y, x, a, b, 1.0, widths)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        gpu.add_lora_linear(y, x, a, b, 1.0, widths)
    for step in range(20):
        slots = [-1] * 7 if step == 3 else torch.randint(-1, L, (int(torch.randint(1, rows + 1, ())),)).tolist()
        update(gpu, slots)
        y.zero_()
        graph.replay()
        replayed = y.clone()
        y.zero_()
        gpu.add_lora_linear(y, x, a, b, 1.0, widths)
        assert_close(replayed, y.cpu())
        assert not replayed[len(slots) :].any()
