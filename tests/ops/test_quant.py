"""FP8 quantisation: the three schemes, their bounds, and what is refused."""

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

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2]
EPSILON = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}
"""Half a unit in the last place, and half the least subnormal: the largest relative and absolute rounding."""


def assert_round_trip(w: torch.Tensor, back: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = EPSILON[dtype]
    bound = torch.maximum(relative * w.abs(), absolute * scale)
    assert ((back - w).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 17), (1, 1)], ids=str)
class TestRoundTrip:
    def test_per_tensor(self, shape, dtype):
        w = torch.randn(shape) * 3
        q, scale = quantize_per_tensor(w, dtype)
        assert q.dtype == dtype
        assert q.shape == w.shape
        assert scale.shape == ()
        assert float(scale) == pytest.approx(float(w.abs().max()) / FP8_MAX[dtype])
        assert_round_trip(w, dequantize(q, scale), scale, dtype)

    def test_per_channel(self, shape, dtype):
        w = torch.randn(shape) * torch.logspace(-3, 3, shape[-2])[:, None]
        q, scale = quantize_per_channel(w, dtype)
        assert scale.shape == shape[:-1]
        assert torch.equal(scale, w.abs().amax(-1) / FP8_MAX[dtype])
        assert_round_trip(w, dequantize(q, scale), scale[..., None], dtype)

    @pytest.mark.parametrize("block", [(2, 16), (128, 128), (1, 7)], ids=str)
    def test_block_wise(self, shape, block, dtype):
        w = torch.randn(shape)
        q, scale = quantize_blockwise(w, *block, dtype)
        rows, columns = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
        assert scale.shape == (*shape[:-2], rows, columns)
        for i in range(rows):
            for j in range(columns):
                there = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                assert torch.equal(scale[..., i, j], w[there].abs().amax((-1, -2)) / FP8_MAX[dtype])
                assert_round_trip(w[there], dequantize(q, scale, block)[there], scale[..., i, j, None, None], dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_largest_values_and_zeros(dtype):
    w = torch.tensor([[1e30, -1e30, 3.0], [0.0, 0.0, 0.0], [65504.0, 1.0, -2.0]])
    for q, scale in (quantize_per_channel(w, dtype), quantize_per_tensor(w, dtype), quantize_blockwise(w, 1, 2, dtype)):
        assert torch.isfinite(q.float()).all()
        assert torch.isfinite(scale).all()
        assert (q.float()[1] == 0).all()
    assert float(quantize_per_channel(w, dtype)[1][1]) == pytest.approx(1e-12 / FP8_MAX[dtype])


def test_rounds_to_nearest_even():
    w = torch.tensor([[448.0, 1.0625, 1.1875]])  # between 1 and 1.125, and between 1.125 and 1.25
    assert quantize_per_channel(w)[0].float().tolist() == [[448.0, 1.0, 1.25]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_source_types(dtype):
    w = torch.randn(4, 8).to(dtype)
    q, scale = quantize_per_channel(w)
    assert_round_trip(w.float(), dequantize(q, scale), scale[:, None], E4M3)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_widened_is_the_plain_cast(dtype):
    """All 256 values, NaN among them, in any layout."""
    q = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for stored in (q, q.T, q[:, ::2], q[0], q[:0]):
        assert torch.equal(upcast(stored).nan_to_num(nan=7e5), stored.float().nan_to_num(nan=7e5))


class TestPerToken:
    def test_one_scale_per_row(self):
        x = torch.randn(5, 40)
        q, scale = quantize_per_token(x)
        assert torch.equal(scale, x.abs().amax(1, keepdim=True) / 448)
        assert_round_trip(x, q.float() * scale, scale, E4M3)

    def test_groups(self):
        x = torch.randn(5, 40)
        q, scale = quantize_per_token(x, 16)
        assert scale.shape == (5, 3)
        assert torch.equal(scale[:, 2], x[:, 32:].abs().amax(1) / 448)
        assert_round_trip(x, q.float() * scale.repeat_interleave(16, 1)[:, :40], scale.max(), E4M3)

    def test_slices_share_their_scales(self):
        x = torch.randn(3, 5, 40)
        q, scale = quantize_per_token(x, 16)
        assert q.shape == x.shape
        assert torch.equal(scale, quantize_per_token(x.abs().amax(0), 16)[1])

    def test_no_rows(self):
        q, scale = quantize_per_token(torch.zeros(0, 40), 16)
        assert q.shape == (0, 40)
        assert scale.shape == (0, 3)


class TestRefusals:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_not_finite(self, value):
        w = torch.ones(3, 4)
        w[1, 2] = value
        for quantize in (quantize_per_tensor, quantize_per_channel, quantize_per_token):
            with pytest.raises(ValueError, match=r"\[1, 2\].*finite"):
                quantize(w)
        with pytest.raises(ValueError, match=r"\[1, 2\]"):
            quantize_blockwise(w, 2, 2)

    def test_not_checked(self):
        w = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
        q, scale = quantize_per_token(w, check=False)
        assert q[0].isnan().any()
        assert scale[1].isinf()

    def test_types_and_shapes(self):
        with pytest.raises(TypeError, match="int64"):
            quantize_per_tensor(torch.ones(2, dtype=torch.int64))
        with pytest.raises(TypeError, match="float16"):
            quantize_per_channel(torch.ones(2, 2), torch.float16)
        with pytest.raises(ValueError, match=r"\(2,\)"):
            quantize_per_channel(torch.ones(2))
        with pytest.raises(ValueError, match="blocks"):
            quantize_blockwise(torch.ones(2, 2), 0, 2)
        with pytest.raises(ValueError, match="group_k"):
            quantize_per_token(torch.ones(2, 2), -1)
        with pytest.raises(ValueError, match=r"\(2, 2, 2, 2\)"):
            quantize_per_token(torch.ones(2, 2, 2, 2))
        q, scale = quantize_per_channel(torch.ones(2, 3))
        with pytest.raises(ValueError, match=r"\(2, 1\)"):
            dequantize(q, scale[:, None])
        with pytest.raises(ValueError, match="blocks"):
            dequantize(q, scale, (1, 1))
        with pytest.raises(TypeError, match="float32"):
            dequantize(q.float(), scale)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
    def test_scales(self, bad):
        validate_scales([torch.ones(3), torch.zeros(2, 2)], "b_scale")
        scale = torch.ones(2, 3)
        scale[1, 0] = bad
        with pytest.raises(ValueError, match=r"b_scale\[1\].*\[1, 0\]"):
            validate_scales([torch.ones(3), scale], "b_scale")
        with pytest.raises(TypeError, match="float16"):
            validate_scales(torch.ones(2, dtype=torch.float16), "scale")


class TestMatrix:
    def test_cut_takes_the_scales_along(self):
        w = torch.randn(6, 8)
        matrix = Fp8Matrix.of(w, E4M3)
        part = matrix.cut(lambda t: t[2:5, 3:])
        assert torch.equal(part.real(), matrix.real()[2:5, 3:])
        assert [p.shape[0] for p in matrix.split([1, 5])] == [1, 5]
        assert torch.equal(torch.cat([p.real() for p in matrix.split([1, 5])]), matrix.real())
        joined = matrix.cut(lambda t: torch.cat([t[4:], t[:1]]))
        assert torch.equal(joined.real(), torch.cat([matrix.real()[4:], matrix.real()[:1]]))

    @pytest.mark.parametrize("factor", [2.0, -0.3, 0.0])
    def test_scaled_keeps_the_values(self, factor):
        matrix = Fp8Matrix.of(torch.randn(6, 8), E4M3)
        torch.testing.assert_close(matrix.scaled(factor).real(), matrix.real() * factor)
        assert (matrix.scaled(factor).scale >= 0).all()

    def test_of(self):
        matrix = Fp8Matrix.of(torch.randn(6, 8), E4M3)
        assert Fp8Matrix.of(matrix, E4M3) is matrix
        assert Fp8Matrix.of(matrix, E5M2).dtype == E5M2
        with pytest.raises(ValueError, match=r"\(6, 8\)"):
            Fp8Matrix(matrix.values, matrix.scale[:3])
