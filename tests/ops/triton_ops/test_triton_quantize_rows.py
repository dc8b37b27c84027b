"""FP8 quantisation: the three schemes, their bounds, what is refused; activations in one kernel have the same bits."""

import pytest
import torch

from punica.ops.quant import (
    FP8_MAX,
    Fp8Matrix,
    dequantize,
    quantize_blockwise,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
    upcast,
    validate_scales,
)
from punica.ops.triton_ops import quantize_rows, quantized_rows
from tests.ops.helpers import E4M3, E5M2

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
        ({"scale": torch.zeros(3, 2)}, ValueError, r"scale .*\(3, 2\), must be \(3, 40\) and \(3, 1\)"),
        ({"scale": torch.zeros(3, 1).half()}, TypeError, "float16"),
        ({"group_k": -1}, ValueError, "-1"),
        ({"values": torch.zeros(40, 3).to(E4M3).mT}, ValueError, "contiguous"),
    ],
)
def test_bad_input(changes, error, message):
    given = {"inputs": torch.ones(3, 40), "values": torch.zeros(3, 40).to(E4M3), "scale": torch.zeros(3, 1)} | changes
    with pytest.raises(error, match=message):
        quantize_rows(**given)


FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(3, 40), (2, 5, 17)], ids=str)
EPSILON = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}
"""Half a unit in the last place, and half the least subnormal: the largest relative and absolute rounding."""


def assert_round_trip(w: torch.Tensor, back: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = EPSILON[dtype]
    bound = torch.maximum(relative * w.abs(), absolute * scale)
    assert ((back - w).abs() <= bound * (1 + 1e-6)).all()


@FORMATS
@SHAPES
def test_per_tensor_and_per_channel(shape, dtype):
    w = torch.randn(shape) * torch.logspace(-3, 3, shape[-2])[:, None]
    q, scale = quantize_per_tensor(w, dtype)
    assert (q.dtype, q.shape, scale.shape) == (dtype, w.shape, ())
    assert float(scale) == pytest.approx(float(w.abs().max()) / FP8_MAX[dtype])
    assert_round_trip(w, dequantize(q, scale), scale, dtype)
    q, scale = quantize_per_channel(w, dtype)
    assert torch.equal(scale, w.abs().amax(-1) / FP8_MAX[dtype])
    assert_round_trip(w, dequantize(q, scale), scale[..., None], dtype)


@FORMATS
@SHAPES
@pytest.mark.parametrize("block", [(2, 16), (128, 128), (1, 7)], ids=str)
def test_block_wise(shape, block, dtype):
    w = torch.randn(shape)
    q, scale = quantize_blockwise(w, *block, dtype)
    rows, columns = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
    assert scale.shape == (*shape[:-2], rows, columns)
    for i in range(rows):
        for j in range(columns):
            there = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            assert torch.equal(scale[..., i, j], w[there].abs().amax((-1, -2)) / FP8_MAX[dtype])
            assert_round_trip(w[there], dequantize(q, scale, block)[there], scale[..., i, j, None, None], dtype)


@FORMATS
def test_largest_values_and_zeros(dtype):
    w = torch.tensor([[1e30, -1e30, 3.0], [0.0, 0.0, 0.0], [65504.0, 1.0, -2.0]])
    for q, scale in (quantize_per_channel(w, dtype), quantize_per_tensor(w, dtype), quantize_blockwise(w, 1, 2, dtype)):
        assert torch.isfinite(q.float()).all()
        assert torch.isfinite(scale).all()
        assert (q.float()[1] == 0).all()
    assert float(quantize_per_channel(w, dtype)[1][1]) == pytest.approx(1e-12 / FP8_MAX[dtype])


def test_rounds_to_nearest_even_whatever_the_source():
    w = torch.tensor([[448.0, 1.0625, 1.1875]])  # between 1 and 1.125, and between 1.125 and 1.25
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert quantize_per_channel(w.to(dtype))[0].float().tolist() == [[448.0, 1.0, 1.25]]


@FORMATS
def test_upcast_is_the_plain_cast(dtype):
    """All 256 values, NaN among them, in any layout."""
    q = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for stored in (q, q.T, q[:, ::2], q[0], q[:0]):
        assert torch.equal(upcast(stored).nan_to_num(nan=7e5), stored.float().nan_to_num(nan=7e5))


def test_per_token_by_row_and_by_group_with_slices_that_share_their_scales():
    x = torch.randn(5, 40)
    q, scale = quantize_per_token(x)
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / 448)
    assert_round_trip(x, q.float() * scale, scale, E4M3)
    q, scale = quantize_per_token(x, 16)
    assert scale.shape == (5, 3)
    assert torch.equal(scale[:, 2], x[:, 32:].abs().amax(1) / 448)
    assert_round_trip(x, q.float() * scale.repeat_interleave(16, 1)[:, :40], scale.max(), E4M3)
    x = torch.randn(3, 5, 40)
    q, scale = quantize_per_token(x, 16)
    assert q.shape == x.shape
    assert torch.equal(scale, quantize_per_token(x.abs().amax(0), 16)[1])
    assert [part.shape for part in quantize_per_token(torch.zeros(0, 40), 16)] == [(0, 40), (0, 3)]


def test_values_that_are_not_finite_are_refused_where_they_are_checked():
    for value in (NAN, INF, -INF):
        w = torch.ones(3, 4)
        w[1, 2] = value
        for quantize in (quantize_per_tensor, quantize_per_channel, quantize_per_token):
            with pytest.raises(ValueError, match=r"\[1, 2\].*finite"):
                quantize(w)
        with pytest.raises(ValueError, match=r"\[1, 2\]"):
            quantize_blockwise(w, 2, 2)
    q, scale = quantize_per_token(torch.tensor([[1.0, NAN], [1.0, INF]]), check=False)
    assert q[0].isnan().any()
    assert scale[1].isinf()


ONES, (Q, SCALE) = torch.ones, quantize_per_channel(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: quantize_per_tensor(ONES(2, dtype=torch.int64)), TypeError, "int64"),
        (lambda: quantize_per_channel(ONES(2, 2), torch.float16), TypeError, "float16"),
        (lambda: quantize_blockwise(ONES(2, 2), 0, 2), ValueError, "0 rows"),
        (lambda: quantize_per_token(ONES(2, 2), -1), ValueError, "group_k is -1"),
        (lambda: quantize_per_token(ONES(2, 2, 2, 2)), ValueError, r"\(2, 2, 2, 2\)"),
        (lambda: dequantize(Q, SCALE[:, None]), ValueError, r"\(2, 1\)"),
        (lambda: dequantize(Q, SCALE, (1, 1)), ValueError, r"\(2, 3\)"),
        (lambda: validate_scales([ONES(3), torch.tensor([[1, 1], [NAN, 1]])], "b"), ValueError, r"b\[1\].*\[1, 0\]"),
        (lambda: validate_scales([torch.tensor([0.0, -1.0])], "b"), ValueError, r"-1.0 at \[1\]"),
        (lambda: Fp8Matrix(Q, SCALE[:1]), ValueError, r"\(2, 3\)"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_matrix_takes_its_scales_along():
    matrix = Fp8Matrix.of(torch.randn(6, 8), E4M3)
    real = matrix.real()
    assert Fp8Matrix.of(matrix, E4M3) is matrix
    assert Fp8Matrix.of(matrix, E5M2).dtype == E5M2
    assert torch.equal(matrix.cut(lambda t: t[2:5, 3:]).real(), real[2:5, 3:])
    assert torch.equal(matrix.cut(lambda t: torch.cat([t[4:], t[:1]])).real(), torch.cat([real[4:], real[:1]]))
    assert [p.shape[0] for p in matrix.split([1, 5])] == [1, 5]
    assert torch.equal(torch.cat([p.real() for p in matrix.split([1, 5])]), real)
