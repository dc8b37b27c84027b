"""The dense product equals float64 arithmetic for every layout that takes its own path."""

import pytest
import torch

from punica.parallel import matmul


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 33], ids=lambda rows: f"rows{rows}")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
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


def test_falls_back_where_torch_lacks_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_onednn_linear", lambda: None)
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    assert torch.equal(matmul.linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.fixture
def default_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a measurement chooses ends with the test."""
    monkeypatch.setattr(matmul, "_onednn_for", matmul._Choice())
    monkeypatch.setattr(matmul, "use_faster_products", matmul.use_faster_products.__wrapped__)


@pytest.mark.usefixtures("default_products")
@pytest.mark.parametrize("seconds", [[1.0, 2.0], [2.0, 1.0]], ids=["torch", "oneDNN"])
def test_the_faster_product_is_used_from_then_on(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    if matmul._onednn_linear() is None:
        pytest.skip("this torch has no oneDNN linear")
    monkeypatch.setattr(matmul, "_best_of", lambda *_: seconds)
    faster = "torch" if seconds[0] < seconds[1] else "oneDNN"
    assert matmul.use_faster_products(hidden=8, inner=8) == {"one": faster, "several": faster}
    called: list[int] = []
    onednn = matmul._onednn_linear()

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        called.append(x.shape[0])
        return onednn(x, *rest)

    monkeypatch.setattr(matmul, "_onednn_linear", lambda: counted)
    weight = torch.randn(5, 8)
    for shape in ((1, 8), (1, 1, 8), (4, 8), (2, 1, 8), (0, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(matmul.linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-4)
    assert called == ([1, 1, 4, 2] if faster == "oneDNN" else [])


@pytest.mark.usefixtures("default_products")
def test_both_products_are_timed() -> None:
    assert set(matmul.use_faster_products(hidden=16, inner=16, attempts=2)) == {"one", "several"}
    counts = [0, 0]

    def product(index: int, weight: torch.Tensor) -> torch.Tensor:
        counts[index] += 1
        return weight

    best = matmul._best_of([lambda w: product(0, w), lambda w: product(1, w)], [torch.ones(1)] * 2, attempts=3)
    assert counts == [6, 6]
    assert all(0 < seconds < float("inf") for seconds in best)
