"""The check for NaN and inf by integers, against torch's; and the product that scales B, against float32."""

import pytest
import torch

from punica.adapters.check import all_finite
from punica.adapters.weights import times

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_sixteen_bits(dtype):
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    finite = torch.isfinite(numbers)
    assert all_finite(numbers[finite])
    assert not any(all_finite(numbers[i : i + 1]) for i in (~finite).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_one_bad_number_among_others(dtype, turned):
    largest = torch.finfo(dtype).max
    for bad in (float("nan"), float("inf"), -float("inf"), largest, -largest, 0.0, -0.0):
        matrix = torch.randn(5, 7).to(dtype)
        matrix[3, 2] = bad
        matrix = matrix.T if turned else matrix
        assert all_finite(matrix) == bool(torch.isfinite(matrix).all())
    for sign in (1, -1):  # NaN of both signs
        nan = (torch.isfinite(torch.tensor(1.0)).to(dtype) * float("nan")).copysign(torch.tensor(sign, dtype=dtype))
        assert not all_finite(nan.reshape(1))


def test_nothing_is_finite():
    assert all_finite(torch.empty(0, 4))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scaling", [2.0, 1 / 3, -0.7, 1e-3, 0.0, 3e5])
def test_the_scaling_is_multiplied_in_float32_and_rounded_once(dtype, scaling):
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    wide = (numbers.to(torch.float32) * scaling).to(dtype)
    assert torch.equal(times(numbers, scaling).nan_to_num(7.0), wide.nan_to_num(7.0))
    for piece in (numbers[:37], numbers[::3]):  # without and with vector instructions
        expected = (piece.to(torch.float32) * scaling).to(dtype)
        assert torch.equal(times(piece, scaling).nan_to_num(7.0), expected.nan_to_num(7.0))
