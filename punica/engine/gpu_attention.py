"""Attention over the paged cache on a GPU: a Triton kernel for decode rows, torch's FlashAttention for prompts.

Rows of a step: whole prompts, then one row per decoding request. A prompt attends to its own projections, a decode row
to its blocks in place (`decode_attention`). Prompt starts, lengths and block tables are refilled in place, so that a
step can be captured in a CUDA graph.

:func:`torch.nn.attention.varlen.varlen_attn` (torch 2.11 and newer) takes 16-bit elements and heads of up to 256. It
reads the prompt starts on the device, so one graph serves prompts of all lengths that fit its rows.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from punica.engine.attention import PagedAttention, attend_prompt
from punica.engine.kv_cache import KVCache
from punica.metadata.staging import StagedBuffer, aligned_offsets
from punica.ops.checks import FLOATS
from punica.ops.heads import MAX_HEAD_SIZE, PackedHeads
from punica.scheduling import Span

_MAX_VARLEN_HEAD = 256
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
        self._prompts: Sequence[Span] = ()
        self._num_prompt_rows = 0
        self._kv_rows: Tensor | None = None

    @property
    def takes_prompts_in_graphs(self) -> bool:
        """Steps with prompts can be captured: torch has a kernel that reads prompt starts on the device."""
        keys = self.cache.keys[0]
        return has_varlen(keys.device, self.cache.model_dtype, keys.shape[-1])

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
        self._prompts = [span for span in spans if span.start < num_prompt_rows]
        self._stage(spans[len(self._prompts) :])

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Rotate the heads of T rows in place, store keys and values, and return the attention output ``[T, H, D]``.

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
            output.copy_(attend_prompts(q, k, v, self._prompt_starts))
            return
        for span in self._prompts:
            rows = slice(span.start, span.start + span.length)
            output[rows] = attend_prompt(q[rows], k[rows], v[rows])

    def _stage(self, spans: Sequence[Span]) -> None:
        """Send prompt starts, and lengths, order and block tables of the decode rows; padding rows have 0 tokens."""
        host = self._staged.begin()
        prompts = len(self._prompts)
        host[:prompts] = [span.start for span in self._prompts]
        host[prompts : self._max_rows + 1] = sum(span.length for span in self._prompts)
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


@functools.cache
def _parameters() -> frozenset[str]:
    """Return the parameters of torch's ``varlen_attn``; empty if torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def has_varlen(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Check that ``varlen_attn`` supports heads ``[T, H, size]`` of this dtype on this device."""
    half = dtype in (torch.float16, torch.bfloat16)
    fits = half and size <= _MAX_VARLEN_HEAD and size % 8 == 0
    return device.type == "cuda" and fits and "window_size" in _parameters()


def attend_prompts(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attend causally within each prompt: ``q [T, H, D]``, ``k`` and ``v`` ``[T, Hkv, D]`` to ``[T, H, D]``.

    ``starts``: int32 ``[N + 1]``, prompt i is rows ``[starts[i], starts[i + 1])``; other rows' outputs are undefined.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _parameters():
            options["enable_gqa"] = True
        else:
            k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
    rows = q.shape[0]
    return cast(Tensor, varlen_attn(q, k, v, starts, starts, rows, rows, window_size=(-1, 0), **options))
