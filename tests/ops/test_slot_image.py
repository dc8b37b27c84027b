"""The packed form of an adapter: what goes in comes out (`write_slot`: `test_triton_slot_write`)."""

import pytest
import torch

from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
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
