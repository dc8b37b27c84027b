"""The packed form of an adapter: what goes in comes out, and `write_slot` replaces exactly one slot."""

import pytest
import torch

from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image, write_slot

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@DTYPES
def test_matrices_come_back_and_begin_aligned(dtype):
    given = [torch.randn(3, 5), None, torch.randn(1, 1), torch.randn(4, 0), torch.randn(7, 2).t()]
    image = pack_image([SlotMatrix(part, 3 if part is not None else 0) for part in given], dtype)
    found = image_matrices(image, len(given), dtype)
    for part, matrix in zip(given, found, strict=True):
        if part is None:
            assert matrix is None
            continue
        assert torch.equal(matrix, part.to(dtype))
        assert (matrix.data_ptr() - image.data_ptr()) % 16 == 0


@DTYPES
def test_what_lies_between_matrices_is_zero_whatever_the_memory_held(dtype):
    parts = [torch.ones(3, 5), torch.ones(1, 1), torch.ones(4, 0), torch.ones(7, 3)]
    matrices = [SlotMatrix(part, 1) for part in parts]
    torch.use_deterministic_algorithms(True)  # new memory is then full of the largest number
    try:
        image = pack_image(matrices, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    data = image[4 * 4 * 8 :].view(dtype)
    assert data.sum() == sum(part.numel() for part in parts)
    assert ((data == 0) | (data == 1)).all()


@DTYPES
def test_size_is_the_formula(dtype):
    """A header of four int64 per matrix, then the matrices, each rounded up to 16 bytes."""
    parts = [torch.randn(8, 100), torch.randn(33, 8), None, torch.randn(1, 3)]
    expected = 4 * 4 * 8 + sum(-(-part.numel() * dtype.itemsize // 16) * 16 for part in parts if part is not None)
    assert pack_image([SlotMatrix(part, 0) for part in parts], dtype).numel() == expected


@DTYPES
def test_a_write_replaces_one_slot(dtype):
    slots = [torch.randn(3, 1, 8, 6).to(dtype), torch.randn(3, 5, 8).to(dtype), torch.randn(3, 1, 4, 8).to(dtype)]
    ranks = list(torch.full((3, 3), 7, dtype=torch.int32))
    before = [stacked.clone() for stacked in slots]
    a, b = torch.randn(2, 6), torch.randn(5, 2)
    write_slot(pack_image([SlotMatrix(a, 2), SlotMatrix(b, 2), SlotMatrix(None, 0)], dtype), slots, ranks, 1)
    for stacked, old in zip(slots, before, strict=True):
        assert torch.equal(stacked[[0, 2]], old[[0, 2]])
    assert torch.equal(slots[0][1, 0, :2], a.to(dtype))
    assert not slots[0][1, 0, 2:].any()
    assert torch.equal(slots[1][1, :, :2], b.to(dtype))
    assert not slots[1][1, :, 2:].any()
    assert not slots[2][1].any()
    assert [rank.tolist() for rank in ranks] == [[7, 2, 7], [7, 2, 7], [7, 0, 7]]
