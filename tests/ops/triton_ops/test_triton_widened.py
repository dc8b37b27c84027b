"""What the kernels read FP8 as: every code of both formats, exactly, in every wide type."""

import pytest
import torch
import triton
import triton.language as tl

from punica.ops.triton_ops.fp8_device import TYPES, as_operand, fp8_format, upcast

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _widen(stored_ptr, wide_ptr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(wide_ptr + offs, upcast(tl.load(stored_ptr + offs), FORMAT, DTYPE))


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as it comes", "by its bits"])
@pytest.mark.parametrize("wide", TYPES, ids=str)
@pytest.mark.parametrize("fp8", FORMATS, ids=str)
def test_every_code(fp8, wide, as_bytes, device):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    stored, found = codes.to(device), torch.empty(256, dtype=wide, device=device)
    operand = stored.view(torch.uint8) if as_bytes else as_operand(stored)
    _widen[(1,)](operand, found, fp8_format(fp8), TYPES[wide], 256)
    expected = codes.float()
    assert torch.equal(found.cpu().isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found.cpu().float()[finite], expected[finite])
    assert torch.equal(found.cpu()[finite].signbit(), expected[finite].signbit())
