"""One run of segments through the fastest matmul that torch has for its layout and dtype.

``out[s, N] = beta * out + alpha * x[s, K] @ w[N, K]^T`` for one segment, the same with a leading dimension for a run;
summed in float32 (float64 for float64) and rounded once into the dtype of ``out``. `choose` picks one of three forms:

* **direct**: all have the arithmetic dtype. One segment is one ``mm`` or ``addmm_``, several are one ``bmm`` or
  ``baddbmm_`` on views. oneDNN's linear is slower here, since it reorders the weight at every call.
* **convert**: 16-bit weights become float32 in a scratch buffer, several segments at a time. Most processors multiply
  16-bit numbers one by one, and short segments gain even where oneDNN has bfloat16 instructions. Every shrink into
  float32 converts, since torch has no bfloat16 product with a float32 result on a CPU.
* **native**: where oneDNN has bfloat16 matmuls (AVX512-bf16, AMX), expands into a large bfloat16 weight with more than
  a few rows multiply in place. A float32 intermediate is rounded to bfloat16 first, as in the Triton expand.

Scratch buffers are kept per thread, since a fresh temporary of over 128 KiB costs more than the product. A stack keeps
its `Cut` for the step at hand, which costs as much as the products of a small batch. It holds views of the weights,
never values: a slot may be filled at any time.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.segment_plan import Run, SegmentPlan
from punica.ops.weights import weights_3d

Multiply = Callable[[Tensor, Tensor, Tensor, float, float], None]
"""``multiply(out, x, weight, alpha, beta)``; ``weight`` is the operand that `choose` gave with it."""

# Elements of the converted weights of one tile plus its product: 6 MiB in float32. Smaller groups start more products,
# larger ones leave the caches.
_TILE = 3 << 19
# Rows converted together: enough to use a weight tile well, few enough that their product fits beside it.
_TILE_ROWS = 64
# A native 16-bit matmul beats converting from this many weight elements on, for segments of more rows than these.
_NATIVE_WEIGHT = 1 << 16
_CONVERT_ROWS, _CONVERT_RUN_ROWS = 2, 4
# Tiles whose scratch is kept cut per thread; beyond it all are cut anew.
_KEPT_TILES = 256


class Tile(NamedTuple):
    """Shapes and dtypes of a product that converts operands to ``dtype``: ``x [*batch, length, K]``,
    ``w [*batch, N, K]``. A w that is not ``row_major`` is converted in its order: to turn it takes twice as long."""

    batch: tuple[int, ...]
    length: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    device: torch.device
    row_major: bool


Operands = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Scratch of a `Tile`: x, w, w transposed and the sum; None where the caller's tensor serves."""


class _Scratch(threading.local):
    """The reused buffers of one thread by use and dtype (the largest of each is kept), and what was cut from them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.operands: dict[_Convert, Operands] = {}

    def cut(self, convert: _Convert) -> Operands:
        """Cut operands, for later calls of ``convert``, also outside of inference mode."""
        tile = convert.tile
        batch, dtype = tile.batch, tile.dtype
        with torch.inference_mode(False):
            x = w = total = None
            if tile.x_dtype != dtype:
                x = self._buffer("x", (*batch, tile.length, tile.k), dtype, tile.device)
            if tile.w_dtype != dtype:
                shape = (tile.n, tile.k) if tile.row_major else (tile.k, tile.n)
                w = self._buffer("w", (*batch, *shape), dtype, tile.device)
                w = w if tile.row_major else w.mT
            if tile.out_dtype != dtype:
                total = self._buffer("total", (*batch, tile.length, tile.n), dtype, tile.device)
            operands = x, w, None if w is None else w.mT, total
        if len(self.operands) >= _KEPT_TILES:
            self.operands.clear()
        self.operands[convert] = operands
        return operands

    def _buffer(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        kept = self.buffers.get((use, dtype, device))
        if kept is None or kept.numel() < size:
            kept = self.buffers[use, dtype, device] = torch.empty(size, dtype=dtype, device=device)
            self.operands.clear()
        return kept[:size].view(shape)


_scratch = _Scratch()


@functools.cache
def _onednn_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose(out_dtype: torch.dtype, x_dtype: torch.dtype, w: Tensor, length: int) -> tuple[Multiply, Tensor]:
    """Choose the form for a run of segments of ``length`` rows with weights ``w [count, N, K]``, and its operand.

    Calls take ``out [count, length, N]`` and ``x [count, length, K]``, without the count where that is 1; ``beta`` is 0
    (``out`` is not read) or 1.
    """
    count, n, k = w.shape
    if out_dtype == x_dtype == w.dtype and w.dtype in (torch.float32, torch.float64):
        return (_multiply_one, w[0].t()) if count == 1 else (_multiply_many, w.mT)
    batch = () if count == 1 else (count,)
    dtype = torch.float64 if torch.float64 in (out_dtype, x_dtype, w.dtype) else torch.float32
    tile = Tile(batch, length, n, k, dtype, out_dtype, x_dtype, w.dtype, w.device, _is_row_major(w))
    if length > (_CONVERT_ROWS if count == 1 else _CONVERT_RUN_ROWS) and _native_applies(out_dtype, w):
        return _convert(tile._replace(dtype=w.dtype)), w if batch else w[0]
    if count == 1:
        return _convert_segment(tile), w[0]
    group = _TILE // max(1, n * (k + length))
    if group >= count:
        return _convert(tile), w
    if group < 2:
        one = _convert_segment(tile._replace(batch=()))
        return _in_parts([(i, one) for i in range(count)]), w
    sizes = [(i, min(group, count - i)) for i in range(0, count, group)]
    return _in_parts([(slice(i, i + n), _convert(tile._replace(batch=(n,)))) for i, n in sizes]), w


def _is_row_major(w: Tensor) -> bool:
    return w.stride(-2) >= w.stride(-1)


def _native_applies(out_dtype: torch.dtype, w: Tensor) -> bool:
    return (
        w.dtype == out_dtype == torch.bfloat16
        and w.shape[1] * w.shape[2] >= _NATIVE_WEIGHT
        and w.is_cpu
        and _onednn_multiplies_bfloat16()
        and bool(torch.backends.mkldnn.enabled)
    )


def _multiplication(plain: Callable[..., Tensor], adding: Callable[..., Tensor]) -> Callable[..., None]:
    """Return ``out = beta * out + alpha * x @ wt`` in torch's cheapest form: ``plain`` overwrites, ``adding`` adds."""

    def multiply(out: Tensor, x: Tensor, wt: Tensor, alpha: float, beta: float) -> None:
        if beta == 0 and alpha == 1:
            plain(x, wt, out=out)
        elif beta == alpha == 1:
            adding(out, x, wt)
        else:
            adding(out, x, wt, beta=beta, alpha=alpha)

    return multiply


_multiply_one = _multiplication(torch.mm, Tensor.addmm_)  # wt [K, N]
_multiply_many = _multiplication(torch.bmm, Tensor.baddbmm_)  # wt [count, K, N]


class _Convert:
    """Convert the operands of one tile, form the sum, round it once. As a key an object is found faster than shapes."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self._multiply = tile, _multiply_many if tile.batch else _multiply_one

    def __call__(self, out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
        operands = _scratch.operands.get(self)
        converted_x, converted_w, wt, total = _scratch.cut(self) if operands is None else operands
        if converted_x is not None:
            x = converted_x.copy_(x)
        if converted_w is None or wt is None:
            wt = w.mT
        else:
            converted_w.copy_(w)
        sums = out if total is None else total
        if beta and total is not None:
            total.copy_(out)
        self._multiply(sums, x, wt, alpha, beta)
        if total is not None:
            out.copy_(total)


_convert = functools.lru_cache(maxsize=1024)(_Convert)  # all weights of one shape share their scratch


def _convert_segment(tile: Tile) -> Multiply:
    fits = tile.n * (tile.k + tile.length) <= _TILE and tile.length <= _TILE_ROWS
    return _convert(tile) if fits else _convert_blocks


def _in_parts(parts: list[tuple[int | slice, Multiply]]) -> Multiply:
    def multiply(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
        for part, one in parts:
            one(out[part], x[part], w[part], alpha, beta)

    return multiply


def _convert_blocks(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
    """Multiply one segment too large for a tile: blocks of columns, each converted once for all blocks of rows."""
    (length, width), inner = out.shape, w.shape[1]
    dtype = torch.float64 if torch.float64 in (out.dtype, x.dtype, w.dtype) else torch.float32
    rows = min(length, _TILE_ROWS)
    columns = max(1, _TILE // max(1, inner + rows))
    for column in range(0, width, columns):
        block = w[column : column + columns]
        tile = Tile((), rows, block.shape[0], inner, dtype, out.dtype, x.dtype, w.dtype, w.device, _is_row_major(w))
        whole = _convert(tile)
        _, converted, _, _ = _scratch.operands.get(whole) or _scratch.cut(whole)
        if converted is not None:
            block = converted.copy_(block)
        for row in range(0, length, rows):
            mine, target = x[row : row + rows], out[row : row + rows, column : column + columns]
            _convert(tile._replace(length=mine.shape[0], w_dtype=block.dtype))(target, mine, block, alpha, beta)


Ranks = list[list[int]]


class Product(NamedTuple):
    """One run with its weights; ``block``: number of its rows' block in the slice."""

    block: int
    segments: int
    length: int
    rank: int | None
    multiply: Multiply
    weight: Tensor


class Slice(NamedTuple):
    """The products of one slice, and the rows of their blocks and those between: one call cuts the rows into all."""

    blocks: tuple[int, ...]
    products: tuple[Product, ...]


class Cut(NamedTuple):
    """A product whose operands were checked.

    ``ranks``: true ranks, which are values and so are compared at every call. ``rows``: of the `SegmentPlan`.
    ``covers``: the products write all rows and lanes of the output of a shrink. ``only``: one product takes all rows
    and columns of x and out, in a call of one slice.
    """

    ranks: Ranks | None
    rows: Tensor | None
    slices: list[Slice]
    covers: bool
    only: Product | None


def cut(
    plan: SegmentPlan, tensors: tuple[Tensor, ...], rank_dim: int, ranks: Ranks | None, x: Tensor, out: Tensor
) -> Cut:
    """Cut a checked call into products. ``rank_dim``: of the rank in ``tensors``, -2 in A and -1 in B. ``ranks``: true
    rank per slice and slot. ValueError: a slot in use is beyond the weights, or a rank is beyond their width.
    """
    if plan.max_slot >= tensors[0].shape[0]:
        raise ValueError(f"the step uses slot {plan.max_slot}; the weights have slots 0 to {tensors[0].shape[0] - 1}")
    rows, columns = out.shape[-2:]
    product_rows = rows if plan.rows is None else plan.rows.shape[0]
    stacks = [weights_3d(weight) for weight in tensors]
    slices = [
        _cut_slice(plan, stack, None if ranks is None else ranks[i], rank_dim, product_rows, out.dtype, x.dtype)
        for i, stack in enumerate(stacks)
    ]
    full_rank = all(product.rank is None for one in slices for product in one.products)
    only = None
    if len(slices) == len(slices[0].blocks) == len(slices[0].products) == 1 and full_rank and plan.rows is None:
        (product,) = slices[0].products
        only = product if product.segments == 1 and stacks[0].shape[1] == columns else None
    return Cut(ranks, plan.rows, slices, full_rank and plan.all_active and plan.num_tokens == rows, only)


def _cut_slice(
    plan: SegmentPlan, stack: Tensor, ranks: list[int] | None, rank_dim: int, rows: int, out_dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> Slice:  # fmt: skip
    """Cut one slice into products on ``rows`` rows; a run is also cut where the rank of its adapters changes."""
    blocks: list[int] = []
    products: list[Product] = []
    done = 0
    for slot, start, segments, length, rank in (
        plan.runs if ranks is None else _cut_by_rank(plan.runs, ranks, stack.shape[rank_dim])
    ):
        if start > done:
            blocks.append(start - done)
        w = stack.narrow(0, slot, segments)
        if rank is not None:
            w = w.narrow(rank_dim, 0, rank)
        multiply, operand = choose(out_dtype, x_dtype, w, length)
        products.append(Product(len(blocks), segments, length, rank, multiply, operand))
        blocks.append(segments * length)
        done = start + segments * length
    if rows > done:
        blocks.append(rows - done)
    return Slice(tuple(blocks), tuple(products))


def _cut_by_rank(runs: tuple[Run, ...], ranks: list[int], width: int) -> tuple[Run, ...]:
    pieces: list[Run] = []
    for run in runs:
        done = 0
        for rank, members in groupby(ranks[run.slot : run.slot + run.segments]):
            if not 0 <= rank <= width:
                raise ValueError(f"lora_ranks holds {rank} for slot {run.slot + done}; expected 0 to {width}")
            count = len(list(members))
            true_rank = rank if rank < width else None
            pieces.append(Run(run.slot + done, run.start + done * run.length, count, run.length, true_rank))
            done += count
    return tuple(pieces)


def multiply_products(out: Tensor, x: Tensor, part: Slice, alpha: float, beta: float, rank_of_out: bool) -> None:
    """Compute the products of a slice in place: ``out [T, N]``, ``x [T, K]``; the rank is N (``rank_of_out``) or K."""
    blocks, products = part
    out_blocks, x_blocks = out.split_with_sizes(blocks), x.split_with_sizes(blocks)
    for block, segments, length, rank, multiply, weight in products:
        out_rows, x_rows = out_blocks[block], x_blocks[block]
        if rank is not None:
            if rank_of_out:
                out_rows = out_rows.narrow(1, 0, rank)
            else:
                x_rows = x_rows.narrow(1, 0, rank)
        if segments != 1:
            out_rows = out_rows.view(segments, length, out_rows.shape[1])
            x_rows = x_rows.view(segments, length, x_rows.shape[1])
        multiply(out_rows, x_rows, weight, alpha, beta)
