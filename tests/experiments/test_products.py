"""Experiments use the faster of torch's two products on a CPU, for every caller of `punica.parallel.matmul`."""

import dataclasses

import pytest
import torch

from experiments.harness import products
from punica.parallel import matmul

faster_products = products.use_faster_products.__wrapped__


@pytest.fixture(autouse=True)
def default_products():
    """What a measurement chooses ends with the test."""
    before = dataclasses.asdict(matmul.onednn_for)
    if matmul.onednn_linear() is None:
        pytest.skip("this torch has no oneDNN linear")
    yield
    vars(matmul.onednn_for).update(before)


@pytest.mark.parametrize("seconds", [[1.0, 2.0], [2.0, 1.0]], ids=["torch", "oneDNN"])
def test_the_faster_product_is_used_from_then_on(seconds, monkeypatch):
    samples = dict(zip(("torch", "oneDNN"), ([one, 3.0] for one in seconds), strict=True))
    monkeypatch.setattr(products, "time_side_by_side", lambda *_: samples)
    faster = "torch" if seconds[0] < seconds[1] else "oneDNN"
    assert faster_products(hidden=8, inner=8) == {"one": faster, "several": faster}
    called, onednn = [], matmul.onednn_linear()
    monkeypatch.setattr(matmul, "onednn_linear", lambda: lambda x, *rest: called.append(x.shape[0]) or onednn(x, *rest))
    weight = torch.randn(5, 8)
    for shape in ((1, 8), (1, 1, 8), (4, 8), (2, 1, 8), (0, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(matmul.linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-4)
    assert called == ([1, 1, 4, 2] if faster == "oneDNN" else [])
