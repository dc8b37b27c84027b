"""The faster of torch's two float32 products on a CPU, so that all systems compared get the machine's best."""

import time
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.parallel.matmul import onednn_for, onednn_linear, through


@cache
def use_faster_products(hidden: int = 2048, inner: int = 5504, attempts: int = 7) -> dict[str, str]:
    """Time MKL and oneDNN for one row and four against ``[inner, hidden]`` float32 weights, and use the faster in this
    process; return its name for ``"one"`` and ``"several"``.
    """
    onednn = onednn_linear()
    if onednn is None:
        return {"one": "torch", "several": "torch"}
    weights = [torch.ones(inner, hidden, device="cpu") for _ in range(2)]
    for kind, rows in (("one", 1), ("several", 4)):
        x = torch.ones(rows, hidden, device="cpu")
        products: list[Callable[[Tensor], Tensor]] = [partial(F.linear, x), partial(through, onednn, x)]
        plain, other = _best_of(products, weights, attempts)
        setattr(onednn_for, kind, other < plain)
    return {kind: "oneDNN" if getattr(onednn_for, kind) else "torch" for kind in ("one", "several")}


def _best_of(products: list[Callable[[Tensor], Tensor]], weights: list[Tensor], attempts: int) -> list[float]:
    """Least seconds of each product for all weights, measured in turns."""
    best = [float("inf")] * len(products)
    for _ in range(attempts):
        for index, product in enumerate(products):
            started = time.perf_counter()
            for weight in weights:
                product(weight)
            best[index] = min(best[index], time.perf_counter() - started)
    return best
