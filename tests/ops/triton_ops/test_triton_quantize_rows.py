"""Activations to FP8 in one kernel: the bits of `quantize_per_token`, which is its meaning."""

import pytest
import torch

from punica.ops.quant import quantize_per_token
from punica.ops.triton_ops import quantize_rows, quantized_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")


def assert_same(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        torch.testing.assert_close(one.cpu().float(), other.cpu().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("shape", "group_k"),
    [((5, 300), 0), ((3, 9000), 0), ((2, 70, 20), 0), ((3, 4, 24), 16), ((4, 100), 32), ((2, 40), 64), ((1, 1), 0)],
)
def test_equals_torch(shape, group_k, fp8, dtype, device):
    x = (torch.randn(shape) * torch.logspace(-9, 3, shape[-2])[:, None]).to(dtype).to(device)
    x[..., 0, :] = 0
    assert_same(quantized_rows(x, group_k, fp8), quantize_per_token(x, group_k, fp8, check=False))


def test_every_value_of_half_precision_is_rounded_alike(device):
    """In rows whose largest element is that of the format, so that the scale is 1."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float()
    x = bits.nan_to_num(0, 0, 0).clamp(-448, 448).view(16, -1).to(device)
    x[:, 0] = 448
    found = quantized_rows(x)
    assert bool((found[1] == 1).all())
    assert_same(found, quantize_per_token(x, check=False))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40)])
def test_what_is_not_finite_stays_visible(bad, shape, device):
    x = torch.randn(shape).to(device)
    x[..., 1, 7] = bad
    found = quantized_rows(x, 16)
    assert_same(found, quantize_per_token(x, 16, check=False))
    assert not bool(torch.isfinite(found[0].float() * found[1].repeat_interleave(16, 1)[:, :40])[..., 1, 7].any())
    assert bool(torch.isfinite(found[1][[0, 2]]).all())


def test_any_strides_and_no_rows(device):
    x = torch.randn(40, 2, 6, device=device).permute(1, 2, 0)[..., ::2]
    assert_same(quantized_rows(x), quantize_per_token(x.contiguous(), check=False))
    for shape in ((0, 8), (3, 0), (2, 0, 8)):
        empty = torch.empty(shape, device=device)
        assert_same(quantized_rows(empty), quantize_per_token(empty, check=False))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"inputs": torch.zeros(3, 40, dtype=torch.int32)}, TypeError, "int32"),
        ({"values": torch.zeros(3, 40)}, TypeError, "values has dtype torch.float32"),
        ({"values": torch.zeros(3, 39).to(E4M3)}, ValueError, r"\(3, 39\)"),
        ({"scale": torch.zeros(3, 2)}, ValueError, r"\(3, 2\)"),
        ({"scale": torch.zeros(3, 1).half()}, TypeError, "float16"),
        ({"group_k": -1}, ValueError, "-1"),
        ({"values": torch.zeros(40, 3).to(E4M3).mT}, ValueError, "contiguous"),
    ],
)
def test_bad_input(changes, error, message):
    given = {"inputs": torch.ones(3, 40), "values": torch.zeros(3, 40).to(E4M3), "scale": torch.zeros(3, 1)} | changes
    with pytest.raises(error, match=message):
        quantize_rows(**given)
