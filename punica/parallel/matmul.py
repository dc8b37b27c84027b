"""The dense product of every base layer: ``x @ weight^T + bias``.

torch sends float32 products on a CPU to MKL, which on other makers' processors multiplies a few rows against a large
weight at a fraction of their speed: on an AMD EPYC with two cores the linear layers of ``llama-small`` take 17 ms for
one row and 81 ms for four, where oneDNN (also in torch, used by ``torch.compile``) takes 19 and 33 ms, and less than
half of MKL's time up to 512 rows. What batching gains would drown in that, so rows of a batch go to oneDNN and a
single row stays where torch sends it. The operator is not public API: where torch lacks it, or its answer differs,
``F.linear`` does all the work.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., in]``, ``weight [out, in]``, ``bias [out]`` or None to ``[..., out]``; any device, any dtype."""
    if x.is_cpu and x.dtype == weight.dtype == torch.float32 and x.dim() == 2 and x.shape[0] > 1:
        onednn = _onednn_linear()
        if onednn is not None:
            return onednn(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@functools.cache
def _onednn_linear() -> Any | None:
    """oneDNN's fused linear, if this torch has it and it agrees with ``F.linear`` on a small product; probed once."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    numbers = torch.linspace(-1, 1, 20, device="cpu")  # wherever tensors are made by default
    x, weight, bias = numbers[:15].view(3, 5), numbers.view(4, 5), numbers[:4]
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (RuntimeError, TypeError):  # built without it, or with another signature
        return None
    return torch.ops.mkldnn._linear_pointwise if torch.allclose(found, F.linear(x, weight, bias), atol=1e-5) else None
