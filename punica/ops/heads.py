"""Queries, keys and values of a layer, as its projections leave them, and their rotation in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_HEAD_SIZE = 256
"""Elements of a head for which there is a kernel of decode attention."""


class HeadNorms(NamedTuple):
    """Weights ``[D]`` of the norms of query and key heads, of the model's dtype, and their eps."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class PackedHeads(NamedTuple):
    """Packed q, k and v of T rows before rotation: ``heads [T, H + 2 * Hkv, D]``.

    ``cos`` and ``sin`` ``[T, 1, D / 2]`` are the angles of the rows (:mod:`punica.models.rotary`); ``norms`` is the
    norm of every query and key head before rotation (Qwen3).
    """

    heads: Tensor
    num_kv_heads: int
    cos: Tensor
    sin: Tensor
    norms: HeadNorms | None

    @property
    def num_heads(self) -> int:
        """H: query heads."""
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
