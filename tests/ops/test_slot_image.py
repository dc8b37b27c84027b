"""The packed form of an adapter: what goes in comes out, and `write_slot` replaces exactly one slot."""

import pytest
import torch

from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image, write_slot

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@DTYPES
def test_matrices_come_back_aligned_with_zeros_between_whatever_the_memory_held(dtype):
    given = [torch.randn(3, 5), None, torch.ones(1, 1), torch.randn(4, 0), torch.randn(7, 2).t(), torch.ones(7, 3)]
    torch.use_deterministic_algorithms(True)  # new memory is then full of the largest number
    try:
        image = pack_image([SlotMatrix(part, 3 if part is not None else 0) for part in given], dtype)
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


@DTYPES
def test_a_write_replaces_one_slot(dtype):
    slots = [torch.randn(3, 1, 8, 6).to(dtype), torch.randn(3, 5, 8).to(dtype), torch.randn(3, 1, 4, 8).to(dtype)]
    ranks = list(torch.full((3, 3), 7, dtype=torch.int32))
    wanted = [stacked.clone() for stacked in slots]
    a, b = torch.randn(2, 6), torch.randn(5, 2)
    write_slot(pack_image([SlotMatrix(a, 2), SlotMatrix(b, 2), SlotMatrix(None, 0)], dtype), slots, ranks, 1)
    for stacked in wanted:
        stacked[1] = 0
    wanted[0][1, 0, :2], wanted[1][1, :, :2] = a.to(dtype), b.to(dtype)
    assert all(torch.equal(stacked, right) for stacked, right in zip(slots, wanted, strict=True))
    assert [rank.tolist() for rank in ranks] == [[7, 2, 7], [7, 2, 7], [7, 0, 7]]
