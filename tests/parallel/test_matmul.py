"""The dense product equals float64 arithmetic for every layout that takes its own path."""

from collections.abc import Callable

import pytest
import torch

from punica.ops.quant import dequantize, quantize_per_channel
from punica.parallel import matmul


@pytest.mark.parametrize("rows", [0, 1, 33], ids=lambda rows: f"rows{rows}")
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_equals_float64(rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight, b = torch.randn(rows, 70).to(dtype), torch.randn(45, 70).to(dtype), torch.randn(45).to(dtype)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    found = matmul.linear(x, weight, b if bias else None)
    assert found.shape == (rows, 45)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype != torch.bfloat16 else 2e-1
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=tolerance)


def test_strided_rows_and_leading_dimensions() -> None:
    wide, weight = torch.randn(6, 200), torch.randn(9, 100)
    strided = wide[::2, :100]
    torch.testing.assert_close(matmul.linear(strided, weight), strided.contiguous() @ weight.T, atol=1e-4, rtol=1e-4)
    cube = torch.randn(2, 3, 100)
    torch.testing.assert_close(matmul.linear(cube, weight), cube @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "weight", "bias"])
def test_gradients_are_those_of_the_product(which: int, shape: tuple[int, ...]) -> None:
    def gradient(product: Callable[..., torch.Tensor]) -> torch.Tensor:
        operands[which].grad = None
        product(*operands).square().sum().backward()
        return operands[which].grad

    operands = [torch.randn(*shape), torch.randn(5, 8), torch.randn(5)]
    operands[which].requires_grad_()
    torch.testing.assert_close(gradient(matmul.linear), gradient(torch.nn.functional.linear))
    if which == 0:
        values, scale = quantize_per_channel(operands[1])
        operands[1] = dequantize(values, scale)
        found = gradient(lambda x, _, bias: matmul.fp8_linear(x, values, scale, bias))
        torch.testing.assert_close(found, gradient(torch.nn.functional.linear))


def test_falls_back_where_torch_lacks_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "onednn_linear", lambda: None)
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    assert torch.equal(matmul.linear(x, weight), torch.nn.functional.linear(x, weight))
