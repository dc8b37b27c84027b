"""Operations between the dense projections of a decoder layer: norms after residual connections, the activation of the
MLP, heads and their rotation; and of a step, the angles of RoPE and the most probable tokens. One Triton kernel each on
a GPU (:mod:`punica.ops.triton_ops.backbone`), plain torch elsewhere.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.ops.expect import FLOATS

MAX_HEAD_SIZE = 256
"""Elements of a head for which there is a kernel of decode attention."""


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta [T, hidden]`` (or ``None``) to ``x`` in place and return the RMSNorm of that, a new tensor."""
    if runs_kernels(x):
        from punica.ops.triton_ops import backbone

        normed = torch.empty_like(x)
        backbone.add_rms_norm(normed, x, delta, weight, eps)
        return normed
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute, of ``gate_up [T, 2 * I]`` (gate, then up), ``silu(gate) * up`` ``[T, I]``."""
    if runs_kernels(gate_up):
        from punica.ops.triton_ops import backbone

        product = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        backbone.swiglu(product, gate_up)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute ``factor`` times cos and sin of ``positions [T] * frequencies [D / 2]``, each ``[T, 1, D / 2]``."""
    if positions.is_cuda and dtype in FLOATS:
        from punica.ops.triton_ops import backbone

        cos, sin = (positions.new_empty((len(positions), 1, len(frequencies)), dtype=dtype) for _ in range(2))
        backbone.rotary_angles(cos, sin, positions, frequencies, factor)
        return cos, sin
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def argmax(logits: Tensor, no_index: int) -> Tensor:
    """Return the first index of each row's maximum in ``logits [S, vocab]``, int64; for a NaN ``no_index``, < 0."""
    if runs_kernels(logits) and logits.stride(-1) == 1:
        from punica.ops.triton_ops import backbone

        best = logits.new_empty(len(logits), dtype=torch.int64)
        backbone.argmax(best, logits, no_index)
        return best
    best = logits.argmax(dim=-1)  # counts NaN as the highest: one look tells whether there is any
    highest = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return best.masked_fill(highest.isnan(), no_index)


def runs_kernels(x: Tensor) -> bool:
    """Tell whether Triton kernels serve ``x``: on a GPU, of a dtype that they have."""
    return x.is_cuda and x.dtype in FLOATS


class HeadNorms(NamedTuple):
    """Weights ``[D]`` of the norms of query and key heads, of the model's dtype, and their eps."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class PackedHeads(NamedTuple):
    """Packed q, k and v of T rows before rotation, ``heads [T, H + 2 * Hkv, D]``. ``cos``, ``sin`` ``[T, 1, D / 2]``:
    angles of rows; ``norms``: of query and key heads before rotation (Qwen3).
    """

    heads: Tensor
    num_kv_heads: int
    cos: Tensor
    sin: Tensor
    norms: HeadNorms | None

    @property
    def num_heads(self) -> int:
        return self.heads.shape[1] - 2 * self.num_kv_heads

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q [T, H, D]``, ``k`` and ``v`` ``[T, Hkv, D]``, queries and keys normalised and rotated, in plain torch."""
        queries, keys = self.num_heads, self.num_kv_heads
        turned, v = self.heads.split((queries + keys, keys), dim=1)
        if self.norms is not None:
            q, k = turned.split((queries, keys), dim=1)
            q_weight, k_weight, eps = self.norms
            q, k = F.rms_norm(q, q_weight.shape, q_weight, eps), F.rms_norm(k, k_weight.shape, k_weight, eps)
            turned = torch.cat((q, k), dim=1)
        q, k = rotate(turned, self.cos, self.sin).split((queries, keys), dim=1)
        return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x [T, H, D]`` by the angles of their rows, ``cos`` and ``sin`` ``[T, 1, D / 2]``; a new tensor."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
