"""The faster of torch's two float32 products on a CPU, so that all systems compared get the machine's best."""

from functools import cache, partial

import torch
import torch.nn.functional as F

from experiments.measure.timing import Protocol, time_side_by_side
from punica.parallel.matmul import onednn_for, onednn_linear, through


@cache
def use_faster_products(hidden: int = 2048, inner: int = 5504, attempts: int = 7) -> dict[str, str]:
    """Time MKL and oneDNN for one row and four against ``[inner, hidden]`` float32 weights, and use the faster in this
    process; return its name for ``"one"`` and ``"several"``.
    """
    onednn = onednn_linear()
    if onednn is None:
        return {"one": "torch", "several": "torch"}
    clock = Protocol("host_clock", "cpu", 1, attempts, attempts, seconds=0.0, flush_mib=64)
    weight = torch.ones(inner, hidden, device="cpu")
    for kind, rows in (("one", 1), ("several", 4)):
        x = torch.ones(rows, hidden, device="cpu")
        calls = {"torch": [partial(F.linear, x, weight)], "oneDNN": [partial(through, onednn, x, weight)]}
        samples = time_side_by_side(calls, clock)
        setattr(onednn_for, kind, min(samples["oneDNN"]) < min(samples["torch"]))
    return {kind: "oneDNN" if getattr(onednn_for, kind) else "torch" for kind in ("one", "several")}
