"""Attention over the paged cache in plain torch: the CPU path, and the reference for `gpu_attention.py`.

For a request with queries ``Q`` at positions up to ``n - 1`` and cached ``K, V`` of ``n`` tokens:
``softmax(Q K^T / sqrt(D)) V``, causal within a prompt. Requests differ in length, so this part of a step runs per
request. It reads each request's blocks in place: at batch 32 a gather would move several times the bytes.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from punica.engine.kv_cache import KVCache
from punica.ops.backbone import PackedHeads
from punica.scheduling import Span


class PagedAttention:
    """Implements ``punica.models.Attention``: ``begin`` takes the spans of a step, ``attend`` serves its layers."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._spans: Sequence[Span] = ()
        self._kv_rows: Tensor | None = None

    def begin(self, spans: Sequence[Span], kv_rows: Tensor, num_prompt_rows: int | None = None) -> None:
        """Start a step.

        ``spans``: its requests in row order; none: a dummy, which writes nothing. ``kv_rows``: cache row written by
        each of the T rows, int64 ``[T]`` on the device. ``num_prompt_rows``: unused here, each span tells a prompt by
        its length.
        """
        self._spans = spans
        self._kv_rows = kv_rows

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Store keys and values of T rows in the cache, and return the attention output ``[T, H, D]``.

        RuntimeError before the first ``begin``.
        """
        if self._kv_rows is None:
            raise RuntimeError("attention has no step; call begin(spans, kv_rows) first")
        q, k, v = packed.rotated()
        if self._spans:
            self.cache.write(layer_index, self._kv_rows, k, v)
        tokens, heads, size = q.shape
        kv_heads = k.shape[1]
        output = q.new_empty(q.shape)
        # queries that share a kv head are rows of one matrix: no repeated K and V
        grouped = (tokens, 1, kv_heads, heads // kv_heads, size)
        q_rows, output_rows = q.view(grouped).unbind(0), output.view(grouped).unbind(0)
        for span in self._spans:
            if span.length == span.kv_length:
                rows = slice(span.start, span.start + span.length)
                output[rows] = attend_prompt(q[rows], k[rows], v[rows])
            else:
                keys, values = self.cache.read(layer_index, span.block_table, span.kv_length)
                attended = F.scaled_dot_product_attention(q_rows[span.start], keys, values)
                output_rows[span.start].copy_(attended)
        return output


def attend_prompt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally within a whole prompt: ``[n, H, D]``, ``[n, Hkv, D]`` to ``[n, H, D]``."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    return attended.squeeze(0).transpose(0, 1)
