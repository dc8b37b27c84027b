"""Mappings, segments and the kernels' metadata against slow, independent definitions; what a step leaves behind."""

import numpy as np
import pytest
import torch

from punica.metadata import LoRAKernelMeta, LoRAMapping, compute_meta, convert_mapping, get_captured_lora_counts

DEVICE_FIELDS = (
    "token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora",
    "lora_token_start_loc",
)  # fmt: skip
HOST_FIELDS = ("no_lora_flag_cpu", "num_active_loras_cpu", "default_num_active_loras_cpu")


def snapshot(meta: LoRAKernelMeta) -> dict[str, list]:
    return {name: getattr(meta, name).tolist() for name in DEVICE_FIELDS + HOST_FIELDS}


def test_what_kernels_read_is_32_bits_wide() -> None:
    meta = LoRAKernelMeta.make(3, 8, "cpu")
    assert meta.default_num_active_loras_cpu.tolist() == [4]
    assert {getattr(meta, name).dtype for name in (*DEVICE_FIELDS, *HOST_FIELDS[1:])} == {torch.int32}
    assert meta.no_lora_flag_cpu.dtype == torch.bool
    assert all(getattr(meta, name).is_contiguous() for name in DEVICE_FIELDS)


@pytest.mark.parametrize("max_loras", [1, 8, 40000])
def test_kernel_meta_invariants_on_random_mappings(max_loras: int) -> None:
    """Each step also without what the one before has left, at the same addresses."""
    capacity = 70
    meta = LoRAKernelMeta.make(max_loras, capacity, "cpu")
    addresses = [getattr(meta, name).data_ptr() for name in DEVICE_FIELDS + HOST_FIELDS]
    rng = np.random.default_rng(max_loras)
    for step in range(100 if max_loras < 100 else 5):
        tokens = int(rng.integers(0, capacity + 1)) if step else 0
        slots = rng.integers(-1, 0 if step == 2 else max_loras, tokens)
        meta.prepare_tensors(torch.from_numpy(slots))
        order = meta.token_indices_sorted_by_lora_ids[:tokens].tolist()
        assert order == sorted(range(tokens), key=lambda t: slots[t])  # Python's sort is stable
        present = sorted(set(slots.tolist()))
        assert meta.active_lora_ids.tolist() == present + [-1] * (max_loras + 1 - len(present))
        starts, counts = meta.lora_token_start_loc.tolist(), meta.num_tokens_per_lora.tolist()
        assert sum(counts) == tokens
        for position, slot in enumerate(present):
            owned = order[starts[position] : starts[position] + counts[position]]
            assert [slots[t] for t in owned] == [slot] * int((slots == slot).sum())
        assert not any(starts[len(present) + 1 :])
        assert meta.token_lora_mapping.tolist() == slots.tolist() + [-1] * (capacity - tokens)
        assert meta.no_lora_flag_cpu.item() == (tokens == 0 or slots.max() < 0)
        assert meta.num_active_loras_cpu.item() == (0 if meta.no_lora_flag_cpu.item() else len(present))
    assert [getattr(meta, name).data_ptr() for name in DEVICE_FIELDS + HOST_FIELDS] == addresses


@pytest.mark.parametrize(
    ("max_loras", "specialize", "counts"),
    [(8, True, [1, 2, 4, 8, 9]), (3, True, [1, 2, 4]), (1, True, [1, 2]), (8, False, [9])],
)
def test_captured_counts(max_loras: int, specialize: bool, counts: list[int]) -> None:
    assert get_captured_lora_counts(max_loras, specialize) == counts


@pytest.mark.parametrize(
    ("captured", "slots", "rounded"),
    [
        ([1, 2, 4], [2, -1, 0], 4),
        ([4, 1, 2], [2, 0], 2),
        ([1, 2], [2, -1, 0], 3),
        ([], [2, -1, 0], 3),
        ([1, 2, 4], [-1], 0),
    ],
    ids=["up", "exact, given unsorted", "above the largest", "none captured", "no adapter"],
)
def test_active_count_is_rounded_up_to_a_captured_one(captured, slots, rounded) -> None:
    meta = LoRAKernelMeta.make(3, 8, "cpu", captured)
    meta.prepare_tensors(torch.tensor(slots))
    assert meta.num_active_loras_cpu.item() == rounded
    assert meta.captured_lora_counts == sorted(captured)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (torch.zeros(9, dtype=torch.int64), ValueError, r"9 .*=8"),
        (torch.tensor([0, 3, -2]), ValueError, r"\[1\] is 3.*=3"),
        (torch.tensor([0, -2]), ValueError, r"\[1\] is -2"),
        (torch.zeros(3), TypeError, "float32"),
        (torch.zeros(3, dtype=torch.bool), TypeError, "bool"),
        (torch.zeros(1, 3, dtype=torch.int64), ValueError, "1-D"),
        ([0, 1], TypeError, "list"),
    ],
    ids=["too many", "slot too large", "slot too small", "float", "bool", "2-D", "list"],
)
def test_bad_slots_raise_and_keep_the_previous_step(slots, error, message) -> None:
    meta = LoRAKernelMeta.make(3, 8, "cpu")
    meta.prepare_tensors(torch.tensor([2, -1, 0]))
    before = snapshot(meta)
    with pytest.raises(error, match=message):
        meta.prepare_tensors(slots)
    assert snapshot(meta) == before


@pytest.mark.parametrize(
    ("sizes", "captured", "message"),
    [((0, 8), [], "is 0"), ((3, 0), [], "is 0"), ((3, 8), [5], "5.* 4"), ((3, 8), [0], "0")],
)
def test_make_rejects_bad_sizes(sizes: tuple, captured: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAKernelMeta.make(*sizes, "cpu", captured)


def test_meta_args_are_views_in_the_order_of_the_ops() -> None:
    meta = LoRAKernelMeta.make(3, 8, "cpu")
    meta.prepare_tensors(torch.tensor([2, -1, 0]))
    mapping, order, counts, starts, ids, flag, active = meta.meta_args(5, True)
    assert mapping.tolist() == [2, -1, 0, -1, -1]
    assert order.shape == (5,)
    whole = meta.token_lora_mapping, meta.token_indices_sorted_by_lora_ids
    assert [one.data_ptr() for one in (mapping, order)] == [one.data_ptr() for one in whole]
    assert (counts, starts, ids) == (meta.num_tokens_per_lora, meta.lora_token_start_loc, meta.active_lora_ids)
    assert flag is meta.no_lora_flag_cpu
    assert active is meta.num_active_loras_cpu
    assert meta.meta_args(5)[6] is meta.default_num_active_loras_cpu
    assert meta.meta_args(0)[0].shape == (0,)
    for token_nums in (-1, 9):
        with pytest.raises(ValueError, match=str(token_nums)):
            meta.meta_args(token_nums)


@pytest.mark.gpu
def test_cuda_updates_never_synchronise_and_keep_every_step_intact() -> None:
    """Steps are queued behind a long kernel: double-buffered staging must not be overwritten before it was copied."""
    meta = LoRAKernelMeta.make(8, 4096, "cuda")
    steps = [torch.randint(-1, 8, (4096,)) for _ in range(2)]
    seen = []
    for slots in steps:  # pinned memory, events and streams exist after a first round
        meta.prepare_tensors(slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        for slots in steps:
            meta.prepare_tensors(slots)
            seen.append(meta.token_lora_mapping.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slots, copy in zip(steps, seen, strict=True):
        assert torch.equal(copy.cpu().long(), slots)
    addresses = [getattr(meta, name).data_ptr() for name in DEVICE_FIELDS]
    for _ in range(100):
        slots = torch.randint(-1, 8, (int(torch.randint(0, 4097, ())),))
        meta.prepare_tensors(slots)
        assert torch.equal(meta.token_lora_mapping[: len(slots)].cpu().long(), slots)
    assert [getattr(meta, name).data_ptr() for name in DEVICE_FIELDS] == addresses


@pytest.mark.gpu
def test_cuda_input_gives_the_same_as_cpu_input() -> None:
    slots = torch.randint(-1, 8, (100,))
    on_host, on_device = (LoRAKernelMeta.make(8, 128, "cuda") for _ in range(2))
    on_host.prepare_tensors(slots)
    on_device.prepare_tensors(slots.cuda())
    assert snapshot(on_host) == snapshot(on_device)


@pytest.mark.parametrize(
    "ids",
    [[3, 0, 7], (3, 0, 7), torch.tensor([3, 0, 7]), np.array([3, 0, 7], dtype=np.uint8), [np.int32(3), 0, 7]],
    ids=["list", "tuple", "tensor", "numpy", "mixed"],
)
def test_mapping_stores_tuples_of_int(ids) -> None:
    mapping = LoRAMapping(ids, ids)
    assert mapping.index_mapping == (3, 0, 7)
    assert {type(i) for i in mapping.index_mapping} == {int}
    assert mapping == LoRAMapping((3, 0, 7), [3, 0, 7])
    assert mapping != LoRAMapping((3, 0, 7), [3, 0, 7], is_prefill=True)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, True], TypeError, r"\[1\].*True"),
        ([1, np.bool_(True)], TypeError, r"\[1\]"),
        ([1.0], TypeError, r"\[0\].*1.0"),
        ([2, None], TypeError, r"\[1\].*None"),
        (torch.tensor([True]), TypeError, r"\[0\]"),
        (5, TypeError, "5"),
        ([4, 0, -1], ValueError, r"\[2\] is -1"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "1-D"),
    ],
)
def test_bad_ids_raise_with_position_and_value(ids, error, message) -> None:
    with pytest.raises(error, match=f"index_mapping.*{message}"):
        LoRAMapping(ids, (1,))
    with pytest.raises(error, match="prompt_mapping"):
        LoRAMapping((), ids)
    with pytest.raises(TypeError, match="is_prefill"):
        LoRAMapping((1,), (1,), is_prefill=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_convert_mapping_equals_a_search_per_token(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    slots = [int(i) if i % 5 else None for i in rng.permutation(np.arange(1, 40))]
    choices = [0] + [i for i in slots if i is not None]
    index = rng.choice(choices, size=tokens).tolist()
    prompt = rng.choice(choices, size=tokens // 3).tolist()
    vocab, extra, max_loras = 1000, 8, len(slots) + 1

    mapping = LoRAMapping(index, prompt)
    base, sampler, padded, embeddings, lengths = convert_mapping(mapping, slots, max_loras, vocab, extra, "cpu")

    def slot(adapter: int) -> int:
        return slots.index(adapter) if adapter else -1

    expected = [slot(i) for i in index]
    sampled = [slot(i) for i in prompt]
    assert base.tolist() == expected
    assert sampler.tolist() == sampled
    assert padded.tolist() == [row + len(prompt) * (s if s >= 0 else max_loras - 1) for row, s in enumerate(sampled)]
    of_numpy = [None if i is None else np.int64(i) for i in slots]
    assert torch.equal(convert_mapping(mapping, of_numpy, max_loras, vocab, extra, "cpu")[0], base)
    assert embeddings[0].tolist() == [max(s, 0) * extra for s in expected]
    assert embeddings[1].tolist() == [max(s, 0) * (vocab + extra) for s in expected]
    assert lengths == [tokens, len(prompt), len(prompt), tokens]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mapping": LoRAMapping((9, 3, 8, 9), (3,))}, ValueError, r"index_mapping.*9 .*0\), 8 .*2.*\[3\]"),
        ({"mapping": LoRAMapping((3,), (3, 5))}, ValueError, r"prompt_mapping.*5 .*1\)"),
        ({"mapping": ((3,), (3,))}, TypeError, "LoRAMapping"),
        ({"lora_index_to_id": [3, 3]}, ValueError, "slots 0 and 1"),
        ({"lora_index_to_id": [3, 0]}, ValueError, r"lora_index_to_id\[1\] is 0"),
        ({"lora_index_to_id": [3, "4"]}, TypeError, r"lora_index_to_id\[1\]"),
        ({"lora_index_to_id": 3}, TypeError, "lora_index_to_id"),
        ({"max_loras": 1}, ValueError, "max_loras is 1.* 2"),
        ({"max_loras": 0, "lora_index_to_id": [], "mapping": LoRAMapping((), ())}, ValueError, "max_loras is 0"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        ({"extra_vocab_size": -1}, ValueError, "extra_vocab_size is -1"),
    ],
)  # fmt: skip
def test_convert_mapping_errors(arguments: dict, error: type[Exception], message: str) -> None:
    call = {
        "mapping": LoRAMapping((3, 0), (3,)), "lora_index_to_id": [3, None], "max_loras": 3, "vocab_size": 10,
        "extra_vocab_size": 0, "device": "cpu",
    }  # fmt: skip
    convert_mapping(**call)
    with pytest.raises(error, match=message):
        convert_mapping(**{**call, **arguments})


def test_segments_example() -> None:
    starts, lengths, slots, *rest = compute_meta(torch.tensor([2, 2, 2, -1, -1, 0, 0, 2]))
    assert (starts.tolist(), lengths.tolist(), slots.tolist()) == ([0, 3, 5, 7], [3, 2, 2, 1], [2, -1, 0, 2])
    assert rest == [4, 3, 8, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segments_of_no_tokens_and_of_no_adapter(dtype: torch.dtype) -> None:
    starts, lengths, slots, *rest = compute_meta(torch.empty(0, dtype=dtype))
    assert (starts.numel(), lengths.numel(), slots.numel(), *rest) == (0, 0, 0, 0, 0, 0, True)
    assert compute_meta(torch.full((5,), -1, dtype=dtype))[3:] == (1, 5, 5, True)
    with pytest.raises(ValueError, match=r"\[1\] is -2"):
        compute_meta(torch.tensor([0, -2]))
