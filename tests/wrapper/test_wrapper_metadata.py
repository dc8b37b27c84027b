"""The wrapper's interface, metadata of a step, choice of backend; on a GPU few launches and no synchronisation."""

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperBase, PunicaWrapperCPU, PunicaWrapperGPU, backends, get_punica_wrapper

SLOTS = [7, None, 3]


def updated(mapping: LoRAMapping, **construct) -> PunicaWrapperCPU:
    wrapper = PunicaWrapperCPU(8, 4, "cpu", **construct)
    wrapper.update_metadata(mapping, SLOTS, 4, 100)
    return wrapper


def metadata(wrapper: PunicaWrapperBase) -> list:
    read = [wrapper.token_lora_indices, wrapper.sampler_indices, wrapper.sampler_indices_padded,
            wrapper.embeddings_indices]  # fmt: skip
    segments = [part.tolist() if isinstance(part, torch.Tensor) else part for part in
                (wrapper.prefill_metadata if wrapper.is_prefill else ())]  # fmt: skip
    state = [wrapper.indices_len, wrapper.is_prefill, wrapper.no_lora, wrapper.vocab_size, wrapper.batch_size]
    return [tensor.tolist() for tensor in read] + segments + state


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((0, 4, "cpu"), {}, ValueError, "max_num_batched_tokens is 0"),
        ((8, 0, "cpu"), {}, ValueError, "max_batches is 0"),
        ((8.0, 4, "cpu"), {}, TypeError, "max_num_batched_tokens"),
        ((8, 4, "cpu"), {"max_loras": 0}, ValueError, "max_loras is 0"),
        ((8, 4, "cpu"), {"lora_config": {"max_loras": 2}}, TypeError, "lora_config"),
        ((8, 4, "cpu"), {"max_loras": 2, "lora_config": LoRAConfig(max_loras=3)}, ValueError, "2.*3"),
    ],
)
def test_bad_construction(arguments, keywords, error, message) -> None:
    with pytest.raises(error, match=message):
        PunicaWrapperCPU(*arguments, **keywords)


def test_nothing_works_before_the_first_update() -> None:
    wrapper = PunicaWrapperCPU(8, 4, "cpu")
    a, b, x, y = torch.ones(3, 2, 4), torch.ones(3, 5, 2), torch.ones(1, 4), torch.zeros(1, 5)
    calls = {
        "add_shrink": (torch.zeros(1, 1, 2), x, (a,), 1.0),
        "add_expand": (y, torch.ones(1, 1, 2), (b,), (5,)),
        "add_lora_embedding": (y, torch.ones(1, 2), b),
        "add_lora_linear": (y, x, (a,), (b,), 1.0, (5,)),
        "add_lora_logits": (y, x, a, b, 1.0),
    }
    for method, arguments in calls.items():
        with pytest.raises(RuntimeError, match="call update_metadata first"):
            getattr(wrapper, method)(*arguments)
    assert not y.any()
    for name in ("token_lora_indices", "sampler_indices", "sampler_indices_padded", "embeddings_indices",
                 "prefill_metadata"):  # fmt: skip
        with pytest.raises(RuntimeError, match="call update_metadata first"):
            getattr(wrapper, name)


def test_properties_of_a_decode_step() -> None:
    wrapper = updated(LoRAMapping((3, 3, 0, 7), (3, 0, 7)))
    assert wrapper.token_lora_indices.tolist() == [2, 2, -1, 0]
    assert wrapper.sampler_indices.tolist() == [2, -1, 0]
    assert wrapper.sampler_indices_padded.tolist() == [6, 10, 2]
    assert wrapper.embeddings_indices.tolist() == [[0] * 4, [200, 200, 0, 0]]
    assert wrapper.indices_len == [4, 3, 3, 4]
    assert (wrapper.vocab_size, wrapper.no_lora, wrapper.is_prefill) == (100, False, False)
    with pytest.raises(RuntimeError, match="is_prefill"):
        _ = wrapper.prefill_metadata


def test_properties_of_a_prefill_step() -> None:
    wrapper = updated(LoRAMapping((3, 3, 3, 0, 0, 7, 7, 3), (3, 0, 7, 3), is_prefill=True))
    starts, lengths, slots, *sizes = wrapper.prefill_metadata
    assert (starts.tolist(), lengths.tolist(), slots.tolist()) == ([0, 3, 5, 7], [3, 2, 2, 1], [2, -1, 0, 2])
    assert sizes == [4, 3, 8]
    assert (wrapper.batch_size, wrapper.max_length, wrapper.token_nums) == (4, 3, 8)


@pytest.mark.parametrize("previous_is_prefill", [False, True])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LoRAMapping((9,), ()), SLOTS, 4, 100), ValueError, r"9 \(first at position 0\).*\[3, 7\]"),
        ((LoRAMapping((3,) * 9, (3,)), SLOTS, 4, 100), ValueError, "index_mapping has 9 rows.*=8"),
        ((LoRAMapping((3,), (3,) * 9), SLOTS, 4, 100), ValueError, "prompt_mapping has 9 rows.*=8"),
        ((LoRAMapping((3, 7, 3, 7, 3), (3,), is_prefill=True), SLOTS, 4, 100), ValueError, "5 runs.*max_batches=4"),
        ((LoRAMapping((3,), (3,)), [*SLOTS, 5], 4, 100), ValueError, "4 slots.*max_loras=3"),
        (((3,), SLOTS, 4, 100), TypeError, "LoRAMapping"),
        ((LoRAMapping((3,), (3,)), SLOTS, 4, 0), ValueError, "vocab_size is 0"),
        ((LoRAMapping((3,), (3,)), SLOTS, 2, 100), ValueError, "max_loras is 2"),
    ],
    ids=["unknown id", "T > N", "S > N", "too many runs", "too many slots", "no mapping", "vocab", "max_loras"],
)
def test_a_failed_update_keeps_the_previous_step(arguments, error, message, previous_is_prefill: bool) -> None:
    wrapper = updated(LoRAMapping((3, 3, 0, 7), (3, 0, 7), previous_is_prefill), max_loras=3)
    before = metadata(wrapper)
    with pytest.raises(error, match=message):
        wrapper.update_metadata(*arguments)
    assert metadata(wrapper) == before
    y = torch.zeros(4, 5)
    wrapper.add_lora_linear(y, torch.ones(4, 2), (torch.ones(3, 1, 2),), (torch.ones(3, 5, 1),), 1.0, (5,))
    assert y.tolist() == [[2.0] * 5, [2.0] * 5, [0.0] * 5, [2.0] * 5]


def test_backend_follows_the_device_unless_it_is_named() -> None:
    assert type(get_punica_wrapper(8, 4, "cpu", max_loras=2)) is PunicaWrapperCPU
    for backend, error, message in (("gpu", RuntimeError, "CUDA"), ("tpu", ValueError, "'tpu'; known: cpu, gpu")):
        with pytest.raises(error, match=message):
            get_punica_wrapper(8, 4, "cpu", backend=backend, max_loras=2)


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


@pytest.mark.parametrize("checks", [True, False], ids=["debug", "plain"])
def test_indices_are_verified_with_debug_checks_alone(checks, monkeypatch) -> None:
    seen: list = []
    monkeypatch.setattr(backends, "verify_indices", seen.append)
    wrapper = PunicaWrapperGPU(8, 4, "cpu", lora_config=LoRAConfig(max_loras=4, debug_checks=checks))
    wrapper.update_metadata(LoRAMapping((7, 3), (3,)), SLOTS, 4, 100)
    assert seen == ([wrapper.batch, wrapper.batch.sampled] if checks else [])
