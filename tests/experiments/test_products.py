"""Experiments use the faster of torch's two products on a CPU, for every caller of `punica.parallel.matmul`."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from experiments.harness import products
from punica.parallel import matmul

faster_products = products.use_faster_products.__wrapped__


@pytest.fixture
def default_products() -> Iterator[None]:
    """What a measurement chooses ends with the test."""
    before = dataclasses.asdict(matmul.onednn_for)
    yield
    vars(matmul.onednn_for).update(before)


@pytest.mark.usefixtures("default_products")
@pytest.mark.parametrize("seconds", [[1.0, 2.0], [2.0, 1.0]], ids=["torch", "oneDNN"])
def test_the_faster_product_is_used_from_then_on(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    if matmul.onednn_linear() is None:
        pytest.skip("this torch has no oneDNN linear")
    monkeypatch.setattr(products, "_best_of", lambda *_: seconds)
    faster = "torch" if seconds[0] < seconds[1] else "oneDNN"
    assert faster_products(hidden=8, inner=8) == {"one": faster, "several": faster}
    called: list[int] = []
    onednn = matmul.onednn_linear()

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        called.append(x.shape[0])
        return onednn(x, *rest)

    monkeypatch.setattr(matmul, "onednn_linear", lambda: counted)
    weight = torch.randn(5, 8)
    for shape in ((1, 8), (1, 1, 8), (4, 8), (2, 1, 8), (0, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(matmul.linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-4)
    assert called == ([1, 1, 4, 2] if faster == "oneDNN" else [])


@pytest.mark.usefixtures("default_products")
def test_both_products_are_timed() -> None:
    assert set(faster_products(hidden=16, inner=16, attempts=2)) == {"one", "several"}
    counts = [0, 0]

    def product(index: int, weight: torch.Tensor) -> torch.Tensor:
        counts[index] += 1
        return weight

    best = products._best_of([lambda w: product(0, w), lambda w: product(1, w)], [torch.ones(1)] * 2, attempts=3)
    assert counts == [6, 6]
    assert all(0 < seconds < float("inf") for seconds in best)
