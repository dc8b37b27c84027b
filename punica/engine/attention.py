"""Paged KV cache, and attention over it: in plain torch, and by GPU kernels.

The cache holds the blocks of :class:`~punica.scheduling.BlockManager`. Per layer, keys and values are ``[num_blocks *
block_size, Hkv, D]``: with B = ``block_size``, block ``b`` is rows ``[b * B, (b + 1) * B)``. A token is one contiguous
row, and consecutive blocks are one strided view, read in place. (In the paper all layers share a page.)

For a request with queries ``Q`` at positions up to ``n - 1`` and cached ``K, V`` of ``n`` tokens:
``softmax(Q K^T / sqrt(D)) V``, causal within a prompt. Rows of a step: those of prompts, then one per decoding request.
A prompt attends to the cached tokens before its rows, if any, and to its own projections; a decode row to its blocks in
place.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.metadata.staging import StagedBuffer, aligned_offsets
from punica.models import LlamaForCausalLM
from punica.ops.backbone import MAX_HEAD_SIZE, PackedHeads
from punica.ops.expect import FLOATS
from punica.ops.quant import E4M3, saturated
from punica.parallel import Need, check_free
from punica.scheduling import Span

INVARIANT_SPLITS = 4
"""KV splits under batch invariance: a fixed compromise between small and large batches."""


class KVCache:
    """Keys and values of all layers of ``model`` for ``num_blocks`` blocks, in its weights' dtype and on their device.

    ``fp8``: in float8_e4m3fn instead, half the bytes of 16 bits, without scales. Projected heads are well inside its
    range (448, saturating). The relative error is at most 1/16 from 2**-6 on; below, the spacing is 2**-9. The rows of
    a prompt in one step attend to each other before they are rounded. ValueError, before allocation, for more than is
    free.
    """

    def __init__(self, model: LlamaForCausalLM, num_blocks: int, block_size: int, *, fp8: bool = False) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        weight, shape = model.lm_head.weight, (num_blocks * block_size, model.num_kv_heads, model.head_size)
        self.dtype, self.model_dtype = (E4M3 if fp8 else weight.dtype), weight.dtype
        check_free([cache_need(model, num_blocks, block_size, fp8=fp8)], weight.device)
        self.keys = [weight.new_empty(shape, dtype=self.dtype) for _ in range(model.num_layers)]
        self.values = [weight.new_empty(shape, dtype=self.dtype) for _ in range(model.num_layers)]
        self._head_first = [
            tuple(rows.transpose(0, 1).unsqueeze(0) for rows in pair)
            for pair in zip(self.keys, self.values, strict=True)
        ]

    def write(self, layer_index: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[T, Hkv, D]`` at ``rows [T]`` (int64: ``block * block_size + offset``)."""
        for cached, new in ((self.keys[layer_index], keys), (self.values[layer_index], values)):
            if self.dtype == E4M3:  # torch copies rows of FP8 as bytes only
                cached.view(torch.uint8).index_copy_(0, rows, saturated(new, E4M3).view(torch.uint8))
            else:
                cached.index_copy_(0, rows, new)

    def read(self, layer_index: int, block_table: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first ``num_tokens`` tokens, each ``[1, Hkv, num_tokens, D]``.

        In the model's dtype: a view if the blocks are consecutive and of that dtype, else a copy.
        """
        keys, values = self._head_first[layer_index]
        first = block_table[0]
        if tuple(block_table) == tuple(range(first, first + len(block_table))):
            start = first * self.block_size
            keys, values = keys.narrow(2, start, num_tokens), values.narrow(2, start, num_tokens)
            return keys.to(self.model_dtype), values.to(self.model_dtype)
        rows = torch.tensor(block_table, device=keys.device).mul_(self.block_size).unsqueeze(1)
        rows = (rows + torch.arange(self.block_size, device=keys.device)).flatten()[:num_tokens]
        return keys.index_select(2, rows).to(self.model_dtype), values.index_select(2, rows).to(self.model_dtype)


def token_bytes(model: LlamaForCausalLM, *, fp8: bool = False) -> int:
    """Return the bytes of the keys and values of one token in all layers of this rank."""
    itemsize = 1 if fp8 else model.lm_head.weight.element_size()
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * itemsize


def cache_need(model: LlamaForCausalLM, num_blocks: int, block_size: int, *, fp8: bool = False) -> Need:
    """Return what a :class:`KVCache` of these arguments takes."""
    return Need(
        f"a KV cache of {num_blocks} blocks of {block_size} tokens",
        num_blocks * block_size * token_bytes(model, fp8=fp8),
        "lower EngineConfig.num_blocks, max_batch_size or max_model_len",
    )


class PagedAttention:
    """``punica.models.Attention`` in plain torch, by request: the CPU path, and the reference for the kernels."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._spans: Sequence[Span] = ()
        self._num_prompt_rows = 0
        self._kv_rows: Tensor | None = None

    def begin(
        self, spans: Sequence[Span], kv_rows: Tensor, num_prompt_rows: int | None = None, most_rows: int | None = None
    ) -> None:
        """Start a step; arguments as of :meth:`KernelAttention.begin`. Without spans, a dummy, it writes nothing."""
        self._spans, self._kv_rows = spans, kv_rows
        self._num_prompt_rows = _prompt_rows(spans) if num_prompt_rows is None else num_prompt_rows

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Store keys and values of T rows in the cache, and return the attention output ``[T, H, D]``."""
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
            if span.length == span.kv_length or span.start < self._num_prompt_rows:
                rows = slice(span.start, span.start + span.length)
                new_q, new_k, new_v = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[rows], v[rows]))
                gqa, causal = kv_heads != heads, None
                if (first := span.kv_length - span.length) > 0:
                    old = self.cache.read(layer_index, span.block_table[: -(-first // self.cache.block_size)], first)
                    new_k, new_v = (torch.cat(pair, 2) for pair in zip(old, (new_k, new_v), strict=True))
                    causal = torch.ones(span.length, span.kv_length, dtype=torch.bool, device=q.device).tril(first)
                attended = F.scaled_dot_product_attention(
                    new_q, new_k, new_v, causal, is_causal=causal is None, enable_gqa=gqa
                )
                output[rows] = attended.squeeze(0).transpose(0, 1)
            else:
                keys, values = self.cache.read(layer_index, span.block_table, span.kv_length)
                attended = F.scaled_dot_product_attention(q_rows[span.start], keys, values)
                output_rows[span.start].copy_(attended)
        return output


class KernelAttention:
    """``punica.models.Attention`` by a Triton kernel for decode rows, and one for prompts.

    Prompt starts, lengths and block tables are refilled in place, so that a step can be captured in a CUDA graph.

    ``cache``: of a dtype and head size that the kernels support. ``max_rows``: most requests of a step, padding
    included. ``max_blocks``: most blocks of a request. ``splits``: KV splits per request; ``None`` chooses by the
    number of rows, a number makes a row's bits independent of its batch. ``cached_prompts``: prompts may have cached
    tokens before their rows.
    """

    def __init__(
        self, cache: KVCache, max_rows: int, max_blocks: int, splits: int | None = None, *,
        cached_prompts: bool = False,
    ) -> None:  # fmt: skip
        self.cache = cache
        self._max_rows, self._max_blocks, self._splits = max_rows, max_blocks, splits
        prompts = max_rows if cached_prompts else 0  # their cached lengths, and tables behind those of decode rows
        (_, self._lengths_at, self._order_at, self._cached_at, self._tables_at), places = aligned_offsets(
            [max_rows + 1, max_rows, max_rows, prompts, (max_rows + prompts) * max_blocks]
        )
        self._staged = StagedBuffer((places,), torch.int32, cache.keys[0].device)
        on_device = self._staged.tensor
        self._prompt_starts = on_device[: max_rows + 1]
        self._lengths, self._order = (on_device[at:][:max_rows] for at in (self._lengths_at, self._order_at))
        tables = on_device[self._tables_at :][: (max_rows + prompts) * max_blocks].view(-1, max_blocks)
        self._tables, self._cached = tables[:max_rows], None
        if cached_prompts:
            self._cached = tables[max_rows:], on_device[self._cached_at :][:max_rows]
        self._written: dict[int, list[tuple[int, ...]]] = {}  # per host array: the table in each of its rows
        self._num_prompt_rows = 0
        self._most_rows: int | None = None
        self._kv_rows: Tensor | None = None

    def begin(
        self, spans: Sequence[Span], kv_rows: Tensor, num_prompt_rows: int | None = None, most_rows: int | None = None
    ) -> None:
        """Start a step.

        Args:
            spans: its requests in row order, prompts first.
            kv_rows: cache row written by each of the T rows, int64 ``[T]`` on the device; -1: none (padding).
            num_prompt_rows: rows of prompts; ``None``: up to the last span of several rows.
            most_rows: of one of these spans, where all are of drafts.
        """
        if num_prompt_rows is None:
            num_prompt_rows = _prompt_rows(spans)
        self._kv_rows, self._num_prompt_rows, self._most_rows = kv_rows, num_prompt_rows, most_rows
        prompts = [span for span in spans if span.start < num_prompt_rows]
        spans = spans[len(prompts) :]
        # padding rows have 0 tokens, padding prompts no rows
        host = self._staged.begin()
        host[: len(prompts)] = [span.start for span in prompts]
        host[len(prompts) : self._max_rows + 1] = sum(span.length for span in prompts)
        lengths, order = (host[at:][: self._max_rows] for at in (self._lengths_at, self._order_at))
        lengths[: len(spans)] = [span.kv_length for span in spans]
        lengths[len(spans) :] = 0
        order[:] = (-lengths).argsort(kind="stable")  # padding rows stay last
        tables = host[self._tables_at :]
        written = self._written.setdefault(host.ctypes.data, [()] * (2 * self._max_rows))
        rows: Iterable[tuple[int, Span]] = enumerate(spans)
        num_rows = len(spans)
        if self._cached is not None:
            cached = [span.kv_length - span.length for span in prompts]
            host[self._cached_at :][: len(prompts)] = cached
            host[self._cached_at + len(prompts) :][: self._max_rows - len(prompts)] = 0
            if any(cached):
                num_rows = self._max_rows + len(prompts)
                rows = chain(rows, enumerate(prompts, self._max_rows))
        for row, span in rows:
            if written[row] != span.block_table:  # most requests keep their row and their blocks
                written[row] = span.block_table
                tables[row * self._max_blocks :][: len(span.block_table)] = span.block_table
        self._staged.commit(self._tables_at + num_rows * self._max_blocks)

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Rotate the heads of T rows in place, store keys and values, and return the attention output ``[T, H, D]``."""
        from punica.ops.triton_ops.backbone import Cached, Pages, decode_attention, prompt_attention, rotate_and_store

        if self._kv_rows is None:
            raise RuntimeError("attention has no step; call begin(spans, kv_rows) first")
        keys, values = self.cache.keys[layer_index], self.cache.values[layer_index]
        heads, kv_heads, cos, sin, norms = packed
        rotate_and_store(heads, cos, sin, self._kv_rows, keys, values, norms)
        q, k, v = heads.split((packed.num_heads, kv_heads, kv_heads), dim=1)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = self._num_prompt_rows
        if first:
            cached = None if self._cached is None else Cached(keys, values, *self._cached, self.cache.block_size)
            splits = None if self._splits is None else 1  # 1: the bits of a prompt in one piece
            prompts = output[:first], q[:first], k[:first], v[:first]
            prompt_attention(*prompts, self._prompt_starts, cached, splits, self._most_rows)
        decodes = q.shape[0] - first
        if decodes:
            rows = (self._tables[:decodes], self._lengths[:decodes], self._order[:decodes])
            pages = Pages(*rows, self.cache.block_size)
            decode_attention(output[first:], q[first:], keys, values, pages, self._splits)
        return output


def _prompt_rows(spans: Sequence[Span]) -> int:
    return max((span.start + span.length for span in spans if span.length > 1), default=0)


def attention_for(
    cache: KVCache, max_rows: int, max_blocks: int, splits: int | None = None, *, cached_prompts: bool = False
) -> PagedAttention | KernelAttention:
    """Return the attention for device, dtype and head size of ``cache``; arguments as of :class:`KernelAttention`."""
    keys = cache.keys[0]
    if keys.is_cuda and cache.model_dtype in FLOATS and keys.shape[-1] <= MAX_HEAD_SIZE:
        return KernelAttention(cache, max_rows, max_blocks, splits, cached_prompts=cached_prompts)
    return PagedAttention(cache)
