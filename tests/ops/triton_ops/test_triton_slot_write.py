"""Packed adapters: what goes in comes out, and both writers fill one slot and touch nothing outside of it."""

import pytest
import torch

from punica.ops.slot_image import image_matrices, pack_image
from punica.ops.triton_ops.slot_write import BLOCK_BYTES, PROGRAMS, SlotTable, write_slot
from tests.ops import helpers

BLOCK = BLOCK_BYTES // 4  # elements of float32; half a tile of the narrower types

# rows and columns of each matrix of a slot, and of the adapter's part (None: it has none)
CASES = {
    "full": [((8, 64), (8, 64)), ((96, 8), (96, 8))],
    "narrow": [((16, 64), (5, 64)), ((96, 16), (96, 5))],
    "rank 20 of 64": [((64, 40), (20, 40)), ((64, 96), (20, 96)), ((64, 33), (20, 33))],
    "odd": [((7, 33), (3, 33)), ((65, 7), (65, 3)), ((1, 1), (1, 1))],
    "absent": [((8, 40), None), ((24, 8), (24, 8)), ((8, 40), (8, 40))],
    "empty part": [((4, 40), (0, 40)), ((24, 8), (24, 1))],
    "unit wide": [((16, 64), (8, 64)), ((96, 16), (96, 8)), ((96, 16), (40, 8))],
    "several tiles": [((3, BLOCK), (2, BLOCK)), ((2 * BLOCK + 5, 3), (2 * BLOCK + 5, 2)), ((BLOCK + 1, 1), None)],
    "more tiles than programs": [((3, 64), (3, 64))] * (PROGRAMS + 3),
}
GUARD = 64


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of random values in the middle of a larger allocation, and that allocation."""
    size = torch.Size(shape).numel()
    whole = torch.randn(size + 2 * GUARD, device=device).to(dtype)
    return whole[GUARD : GUARD + size].view(shape), whole


def by_kernel(image, slots, ranks, index):
    device = slots[0].device
    write_slot(image.pin_memory() if device.type == "cuda" else image, SlotTable(slots, ranks), index)


@pytest.mark.parametrize("write", [helpers.write_slot, by_kernel], ids=["torch", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_replaces_one_slot_and_touches_nothing_else(case, dtype, index, write, device):
    shapes, device = CASES[case], device if write is by_kernel else "cpu"
    pairs = [guarded((3, 1, *slot), dtype, device) for slot, _ in shapes]
    expected = [whole.cpu().clone() for _, whole in pairs]
    parts = [None if part is None else torch.randn(part) for _, part in shapes]
    matrices = [(part, 0 if part is None else m + 1) for m, part in enumerate(parts)]
    ranks = torch.full((len(shapes), 3), 9, dtype=torch.int32, device=device)
    write(pack_image(matrices, dtype), [slots for slots, _ in pairs], list(ranks), index)
    for (slots, whole), wanted, part in zip(pairs, expected, parts, strict=True):
        slot = wanted[GUARD : GUARD + slots.numel()].view(slots.shape)[index, 0]
        slot.zero_()
        if part is not None:
            slot[: part.shape[0], : part.shape[1]] = part.to(dtype)
        assert torch.equal(whole.cpu(), wanted)
    assert ranks[:, index].tolist() == [rank for _, rank in matrices]
    assert bool((ranks[:, [i for i in range(3) if i != index]] == 9).all())


def test_a_second_write_leaves_no_trace_of_the_first(device):
    slots, ranks = [torch.zeros(2, 1, 8, 20, device=device)], torch.zeros(1, 2, dtype=torch.int32, device=device)
    table = SlotTable(slots, list(ranks))
    for rank in (8, 2):
        a = torch.randn(rank, 20)
        write_slot(pack_image([(a, rank)], torch.float32).to(device), table, 1)
    assert torch.equal(slots[0][1, 0, :2].cpu(), a)
    assert not slots[0][1, 0, 2:].any()
    assert not slots[0][0].any()
    assert ranks.tolist() == [[0, 2]]


def test_bad_tables_and_writes_are_refused(device):
    slots, ranks = [torch.zeros(2, 4, 4, device=device)], [torch.zeros(2, dtype=torch.int32, device=device)]
    with pytest.raises(ValueError, match="one entry per matrix, got 0"):
        SlotTable([], [])
    with pytest.raises(TypeError, match=r"slots\[1\] has dtype torch.float16"):
        SlotTable([*slots, slots[0].half()], ranks * 2)
    with pytest.raises(ValueError, match="contiguous"):
        SlotTable([slots[0].transpose(1, 2)], ranks)
    with pytest.raises(TypeError, match=r"ranks\[0\] has dtype torch\.int64"):
        SlotTable(slots, [ranks[0].long()])
    with pytest.raises(ValueError, match=r"ranks\[0\] has shape \(1,\)"):
        SlotTable(slots, [ranks[0][:1]])
    table = SlotTable(slots, ranks)
    image = pack_image([(torch.ones(4, 4), 4)], torch.float32).to(device)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"\\[0, 2\\), got {index}"):
            write_slot(image, table, index)
    assert not slots[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matrices_come_back_aligned_with_zeros_between_whatever_the_memory_held(dtype):
    given = [torch.randn(3, 5), None, torch.ones(1, 1), torch.randn(4, 0), torch.randn(7, 2).t(), torch.ones(7, 3)]
    torch.use_deterministic_algorithms(True)  # new memory is then full of the largest number
    try:
        image = pack_image([(part, 3 if part is not None else 0) for part in given], dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    sizes = [0 if part is None else part.numel() * dtype.itemsize for part in given]
    assert image.numel() == sum(-(-size // 16) * 16 for size in (6 * 4 * 8, *sizes))
    for part, matrix, size in zip(given, image_matrices(image, len(given), dtype), sizes, strict=True):
        if part is None:
            assert matrix is None
            continue
        assert torch.equal(matrix, part.to(dtype))
        start = matrix.data_ptr() - image.data_ptr()
        assert start % 16 == 0
        assert not image[start + size : -(-(start + size) // 16) * 16].any()
