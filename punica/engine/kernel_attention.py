"""Attention over the paged cache on a GPU: a Triton kernel for decode rows, the library's for prompts.

Rows of a step: whole prompts, then one row for each request that decodes. A prompt attends to itself, so it reads what
the projections made of it and not the cache; every other row reads its blocks in place (`decode_attention`). What the
kernels are told (where prompts begin, lengths, block tables) lies in buffers that every step refills in place, so that
a step can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.engine import varlen
from punica.engine.attention import PagedAttention, attend_prompt
from punica.engine.kv_cache import KVCache
from punica.metadata.staging import StagedBuffer, aligned_offsets
from punica.ops.checks import FLOATS
from punica.ops.heads import MAX_HEAD_SIZE, PackedHeads
from punica.scheduling import Span

INVARIANT_SPLITS = 4
"""Parts of a request's tokens where bits shall not depend on the batch: some for few requests, few for many."""


class KernelAttention:
    """Implements ``punica.models.Attention``, as :class:`~punica.engine.attention.PagedAttention` does.

    Args:
        cache: keys and values; of a dtype and a head size that the kernels have.
        max_rows: most requests of a step, rows that pad a captured batch counted.
        max_blocks: most blocks of a request.
        splits: parts that a request's tokens are cut into; ``None``: as many as suit the number of rows. A number makes
            a row's bits independent of its batch.
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
        self._prompts: Sequence[Span] = ()
        self._num_prompt_rows = 0
        self._kv_rows: Tensor | None = None

    @property
    def takes_prompts_in_graphs(self) -> bool:
        """Whether steps with prompts can be captured: the library has a kernel that finds prompts on the device."""
        keys = self.cache.keys[0]
        return varlen.is_supported(keys.device, self.cache.model_dtype, keys.shape[-1])

    def begin(self, spans: Sequence[Span], kv_rows: Tensor, num_prompt_rows: int | None = None) -> None:
        """Start a step.

        Args:
            spans: its requests in row order, prompts first.
            kv_rows: row of the cache that each of the T rows writes, int64 ``[T]`` on the device; rows of no span write
                none (-1).
            num_prompt_rows: rows up to which spans are prompts; ``None``: up to the last span of several rows.
        """
        if num_prompt_rows is None:
            num_prompt_rows = max((span.start + span.length for span in spans if span.length > 1), default=0)
        self._kv_rows, self._num_prompt_rows = kv_rows, num_prompt_rows
        self._prompts = [span for span in spans if span.start < num_prompt_rows]
        self._stage(spans[len(self._prompts) :])

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Heads of T rows, which are rotated in place, to ``[T, H, D]``; stores keys and values in the cache first.

        RuntimeError before the first ``begin``.
        """
        from punica.ops.triton_ops.backbone import Pages, decode_attention, rotate_and_store

        if self._kv_rows is None:
            raise RuntimeError("attention has no step; call begin(spans, kv_rows) first")
        keys, values = self.cache.keys[layer_index], self.cache.values[layer_index]
        heads, kv_heads, cos, sin, norms = packed
        rotate_and_store(heads, cos, sin, self._kv_rows, keys, values, norms)
        q, k, v = heads.split((packed.num_heads, kv_heads, kv_heads), dim=1)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = self._num_prompt_rows
        if first:
            self._attend_prompts(output[:first], q[:first], k[:first], v[:first])
        decodes = q.shape[0] - first
        if decodes:
            rows = (self._tables[:decodes], self._lengths[:decodes], self._order[:decodes])
            pages = Pages(*rows, self.cache.block_size)
            decode_attention(output[first:], q[first:], keys, values, pages, self._splits)
        return output

    def _attend_prompts(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.takes_prompts_in_graphs:
            output.copy_(varlen.attend(q, k, v, self._prompt_starts))
            return
        for span in self._prompts:
            rows = slice(span.start, span.start + span.length)
            output[rows] = attend_prompt(q[rows], k[rows], v[rows])

    def _stage(self, spans: Sequence[Span]) -> None:
        """Send where prompts begin, and lengths, order and block tables of the decode rows, 0 tokens for all behind
        them.
        """
        host = self._staged.begin()
        prompts = len(self._prompts)
        host[:prompts] = [span.start for span in self._prompts]
        host[prompts : self._max_rows + 1] = sum(span.length for span in self._prompts)
        lengths, order = (host[at:][: self._max_rows] for at in (self._lengths_at, self._order_at))
        lengths[: len(spans)] = [span.kv_length for span in spans]
        lengths[len(spans) :] = 0
        order[:] = (-lengths).argsort(kind="stable")  # what pads the step stays behind its rows
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
    """The attention of the device that ``cache`` is on, plain torch for dtypes and heads (above 256) that no kernel
    takes; arguments as of :class:`KernelAttention`.
    """
    keys = cache.keys[0]
    if keys.is_cuda and cache.model_dtype in FLOATS and keys.shape[-1] <= MAX_HEAD_SIZE:
        return KernelAttention(cache, max_rows, max_blocks, splits)
    return PagedAttention(cache)
