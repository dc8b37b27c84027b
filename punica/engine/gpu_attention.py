"""Attention over the paged cache on a GPU: one Triton kernel for decode rows, one for prompts.

Rows of a step: whole prompts, then one row per decoding request. A prompt attends to its own projections
(`prompt_attention`), a decode row to its blocks in place (`decode_attention`). Prompt starts, lengths and block tables
are refilled in place, so that a step can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.engine.attention import PagedAttention
from punica.engine.kv_cache import KVCache
from punica.metadata.staging import StagedBuffer, aligned_offsets
from punica.ops.backbone import MAX_HEAD_SIZE, PackedHeads
from punica.ops.expect import FLOATS
from punica.scheduling import Span

INVARIANT_SPLITS = 4
"""KV splits under batch invariance: a fixed compromise between small and large batches."""


class KernelAttention:
    """Implements ``punica.models.Attention``, as :class:`~punica.engine.attention.PagedAttention` does.

    Args:
        cache: keys and values, of a dtype and head size that the kernels support.
        max_rows: most requests of a step, padding rows included.
        max_blocks: most blocks of a request.
        splits: KV splits per request; ``None`` chooses by the number of rows. A number makes a row's bits independent
            of its batch.
    """

    def __init__(self, cache: KVCache, max_rows: int, max_blocks: int, splits: int | None = None) -> None:
        self.cache = cache
        self._max_rows, self._max_blocks, self._splits = max_rows, max_blocks, splits
        (_, self._lengths_at, self._order_at, self._tables_at), places = aligned_offsets(
            [max_rows + 1, max_rows, max_rows, max_rows * max_blocks]
        )
        self._staged = StagedBuffer((places,), torch.int32, cache.keys[0].device)
        on_device = self._staged.tensor
        self._prompt_starts = on_device[: max_rows + 1]
        self._lengths, self._order = (on_device[at:][:max_rows] for at in (self._lengths_at, self._order_at))
        self._tables = on_device[self._tables_at :][: max_rows * max_blocks].view(max_rows, max_blocks)
        self._written: dict[int, list[tuple[int, ...]]] = {}  # per host array: the table in each of its rows
        self._num_prompt_rows = 0
        self._kv_rows: Tensor | None = None

    def begin(self, spans: Sequence[Span], kv_rows: Tensor, num_prompt_rows: int | None = None) -> None:
        """Start a step.

        Args:
            spans: its requests in row order, prompts first.
            kv_rows: cache row written by each of the T rows, int64 ``[T]`` on the device; -1: none (padding).
            num_prompt_rows: rows of prompts; ``None``: up to the last span of several rows.
        """
        if num_prompt_rows is None:
            num_prompt_rows = max((span.start + span.length for span in spans if span.length > 1), default=0)
        self._kv_rows, self._num_prompt_rows = kv_rows, num_prompt_rows
        prompts = [span for span in spans if span.start < num_prompt_rows]
        self._stage(prompts, spans[len(prompts) :])

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Rotate the heads of T rows in place, store keys and values, and return the attention output ``[T, H, D]``.

        RuntimeError before the first ``begin``.
        """
        from punica.ops.triton_ops.backbone import Pages, decode_attention, prompt_attention, rotate_and_store

        if self._kv_rows is None:
            raise RuntimeError("attention has no step; call begin(spans, kv_rows) first")
        keys, values = self.cache.keys[layer_index], self.cache.values[layer_index]
        heads, kv_heads, cos, sin, norms = packed
        rotate_and_store(heads, cos, sin, self._kv_rows, keys, values, norms)
        q, k, v = heads.split((packed.num_heads, kv_heads, kv_heads), dim=1)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = self._num_prompt_rows
        if first:
            prompt_attention(output[:first], q[:first], k[:first], v[:first], self._prompt_starts)
        decodes = q.shape[0] - first
        if decodes:
            rows = (self._tables[:decodes], self._lengths[:decodes], self._order[:decodes])
            pages = Pages(*rows, self.cache.block_size)
            decode_attention(output[first:], q[first:], keys, values, pages, self._splits)
        return output

    def _stage(self, prompts: Sequence[Span], spans: Sequence[Span]) -> None:
        """Send starts of the prompts, and lengths, order and block tables of the decode rows ``spans``.

        Padding rows have 0 tokens, padding prompts no rows.
        """
        host = self._staged.begin()
        host[: len(prompts)] = [span.start for span in prompts]
        host[len(prompts) : self._max_rows + 1] = sum(span.length for span in prompts)
        lengths, order = (host[at:][: self._max_rows] for at in (self._lengths_at, self._order_at))
        lengths[: len(spans)] = [span.kv_length for span in spans]
        lengths[len(spans) :] = 0
        order[:] = (-lengths).argsort(kind="stable")  # padding rows stay last
        tables = host[self._tables_at :]
        written = self._written.setdefault(host.ctypes.data, [()] * self._max_rows)
        for row, span in enumerate(spans):
            if written[row] != span.block_table:  # most requests keep their row and their blocks
                written[row] = span.block_table
                tables[row * self._max_blocks :][: len(span.block_table)] = span.block_table
        self._staged.commit(self._tables_at + len(spans) * self._max_blocks)


def attention_for(
    cache: KVCache, max_rows: int, max_blocks: int, splits: int | None = None
) -> PagedAttention | KernelAttention:
    """Return the attention for the device of ``cache``; arguments as of :class:`KernelAttention`.

    Plain torch for dtypes and head sizes (above 256) without a kernel.
    """
    keys = cache.keys[0]
    if keys.is_cuda and cache.model_dtype in FLOATS and keys.shape[-1] <= MAX_HEAD_SIZE:
        return KernelAttention(cache, max_rows, max_blocks, splits)
    return PagedAttention(cache)
