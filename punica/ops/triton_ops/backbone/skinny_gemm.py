"""A dense projection of few rows: the GEMM of a decode step, whose time is that of reading the weight once.

    out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]          x [T, K], weight [N, K], T up to 64, sums in float32

Two kernels, one meaning:

* **rows**, for up to four: multiply and add. Weights go from memory to registers, one tile ahead of what is summed.
* **tiles**: the weight is the tensor cores' *left* operand, so that the instruction's 64 rows are rows of the weight,
  and the tokens its right one, which may be as narrow as 8. Weights stream through shared memory.

With PDL (compute capability 9.0) a program prefetches its first tile of weights before it waits for the predecessor,
which wrote x but no weight. Two or four tiles cost a step of 7B 0.05 and 0.1 ms (H200). K may be cut among programs:
each writes a partial of float32, and the last at a tile adds them in ascending order, so that the bits repeat.
A weight in float8_e4m3fn is upcast in registers, exactly; its scales, one per row, multiply the sums. It is read in
words of 4 (one row of x) or 2 values, where 16 bytes are aligned: single bytes cost more instructions than time allows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from punica.ops.triton_ops.backbone.checks import check_dense, check_row_scales, check_rows, check_same, check_shape
from punica.ops.triton_ops.backbone.gemm_forms import (
    GemmForm,
    RowsForm,
    TilesForm,
    WeightForm,
    choose_form,
    weight_form,
)
from punica.ops.triton_ops.device import accumulator, dot, pdl_launch_then_wait
from punica.ops.triton_ops.fp8_device import as_operand, reads_fp8, upcast
from punica.ops.triton_ops.fp8_words import upcast_pairs, upcast_words
from punica.ops.triton_ops.launch import Launch, all_aligned, on_device, stages_that_fit, supports_pdl
from punica.ops.triton_ops.op import check_runnable
from punica.ops.triton_ops.schedules import Gpu

MAX_TOKENS = 64
"""More rows are no longer a matter of reading the weight: that is what cuBLAS is for."""


class GemmTiles(NamedTuple):
    """Shape and schedule of the tiles kernel: its constexpr. ``ahead``: as in `TilesForm`, 0 without PDL. words: FP8 is
    read two values at a time; native: and converted by instructions.
    """

    n: int
    k: int
    block_t: int
    block_n: int
    block_k: int
    split_k: int
    stages: int
    ahead: int
    has_bias: bool
    pdl: bool
    format: int
    words: bool
    native: bool


class GemmRows(NamedTuple):
    """Shape and schedule of the rows kernel: its constexpr."""

    n: int
    k: int
    tokens: int
    block_n: int
    block_k: int
    vector: int
    has_bias: bool
    pdl: bool
    format: int
    native: bool


@triton.jit
def bring_near(ptrs, width):
    """Prefetch `width` elements at each of these pointers (multiples of 16 bytes, or none) into L2."""
    size = width * (ptrs.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptrs, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def is_last(arrived_ptr, tile, SPLIT_K: tl.constexpr):
    """Count the programs of this tile that have written their partials; the last one resets the count and gets True."""
    tl.debug_barrier()  # what all threads have written comes before the count
    last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        tl.store(arrived_ptr + tile, 0)
    return last


@triton.jit
def sum_planes(places, plane_size, SPLIT_K: tl.constexpr):
    """Sum partials in ascending order; four loads are under way at once, since more of them take too many registers."""
    total = tl.load(places, cache_modifier=".cg")
    for first in tl.range(1, SPLIT_K, 4, num_stages=1):
        for split in tl.static_range(4):
            there = first + split < SPLIT_K
            total += tl.load(places + (first + split) * plane_size, mask=there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _store(out_ptrs, total, base, offs_n, mask, GEMM: tl.constexpr):
    if GEMM.format > 0:
        total *= tl.load(base[3] + offs_n, mask=mask, other=0.0)
    if GEMM.has_bias:
        total += tl.load(base[1] + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _add_products(sums, w, x_ptrs, x_stride, left, offs_k, GEMM: tl.constexpr):
    """Add the products of one tile to every token's sums [PARTS, BLOCK_N], those of a vector added up first."""
    weights = w.to(tl.float32)
    mask = offs_k < (1 << 30 if GEMM.k % GEMM.block_k == 0 else left)
    added: tl.tuple = ()
    TOKENS: tl.constexpr = GEMM.tokens
    for t in tl.static_range(TOKENS):
        x = tl.load(x_ptrs + t * x_stride, mask=mask, other=0.0).to(tl.float32)
        added = added + (sums[t] + tl.sum(weights * x[:, None, :], 2),)  # noqa: RUF005 (Triton has no starred tuples)
    return added


@triton.jit
def _gemm_rows_kernel(x_ptr, base, strides, GEMM: tl.constexpr):
    """Compute block_n rows of the weight, all tokens. ``vector``: neighbours along K that one thread loads, and adds up
    first. base: of `base_operands`; strides: of rows of x, weight and output.
    """
    BLOCK_K: tl.constexpr = GEMM.block_k
    w_ptr, out_ptr = base[0], base[2]
    x_stride, w_stride, out_stride = strides
    STEPS: tl.constexpr = (GEMM.k + BLOCK_K - 1) // BLOCK_K
    PARTS: tl.constexpr = BLOCK_K // GEMM.vector
    offs_n = tl.program_id(0) * GEMM.block_n + tl.arange(0, GEMM.block_n)
    offs_k = tl.arange(0, PARTS)[:, None] * GEMM.vector + tl.arange(0, GEMM.vector)[None, :]
    w_rows = w_ptr + tl.minimum(offs_n, GEMM.n - 1).to(tl.int64) * w_stride  # the last row stands for those behind it
    w_ptrs = w_rows[None, :, None] + offs_k[:, None, :]
    x_ptrs = x_ptr + offs_k
    TOKENS: tl.constexpr = GEMM.tokens
    sums: tl.tuple = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (accumulator(PARTS, GEMM.block_n),)  # noqa: RUF005 (Triton has no starred tuples)
    w = tl.load(w_ptrs, mask=(offs_k < GEMM.k)[:, None, :], other=0.0)
    pdl_launch_then_wait(GEMM.pdl)
    for step in tl.range(0, STEPS, num_stages=1):
        start = step * BLOCK_K
        left = tl.where(step + 1 < STEPS, GEMM.k - start - BLOCK_K, 0)
        w_next = tl.load(w_ptrs + start + BLOCK_K, mask=(offs_k < left)[:, None, :], other=0.0)
        sums = _add_products(sums, w, x_ptrs + start, x_stride, GEMM.k - start, offs_k, GEMM)
        w = w_next
    for t in tl.static_range(TOKENS):
        _store(out_ptr + t * out_stride + offs_n, tl.sum(sums[t], 0), base, offs_n, offs_n < GEMM.n, GEMM)


@triton.jit
def _gemm_word_row_kernel(x_ptr, base, w_stride, GEMM: tl.constexpr):
    """Compute block_n outputs of one row of x, aligned to 8 bytes, from a weight in FP8. A thread loads four words, and
    x for two: as much of both is one load of 16 bytes.
    """
    PARTS: tl.constexpr = GEMM.block_k // 16
    WORDS: tl.constexpr = GEMM.block_k // 4
    STEPS: tl.constexpr = (GEMM.k + GEMM.block_k - 1) // GEMM.block_k
    offs_n = tl.program_id(0) * GEMM.block_n + tl.arange(0, GEMM.block_n)
    offs_w = (tl.arange(0, PARTS) * 4)[:, None] + tl.arange(0, 4)[None, :]
    offs_k = (tl.arange(0, PARTS) * 16)[:, None] + (tl.arange(0, 2) * 4)[None, :]
    rows = tl.minimum(offs_n, GEMM.n - 1).to(tl.int64) * tl.multiple_of(w_stride // 4, 4)
    w_ptrs = base[0].to(tl.pointer_type(tl.int32)) + rows[None, :, None] + offs_w[:, None, :]
    sums = accumulator(PARTS, GEMM.block_n)
    words = tl.load(w_ptrs, mask=(offs_w < GEMM.k // 4)[:, None, :], other=0)
    pdl_launch_then_wait(GEMM.pdl)
    for step in tl.range(0, STEPS, num_stages=1):
        following = (step + 1) * WORDS
        more = (offs_w < GEMM.k // 4 - following)[:, None, :]
        words_next = tl.load(w_ptrs + following, mask=more, other=0)
        halves = tl.split(tl.permute(tl.reshape(words, [PARTS, GEMM.block_n, 2, 2]), [0, 1, 3, 2]))
        for half in tl.static_range(2):
            start = step * GEMM.block_k + 8 * half
            x_ptrs = (x_ptr + start + offs_k).to(tl.pointer_type(tl.int64), bitcast=True)
            x_words = tl.load(x_ptrs, mask=offs_k < GEMM.k - start, other=0)
            values = upcast_words(halves[half], GEMM.format, GEMM.native, tl.float32)
            products = tl.zeros(halves[half].shape, tl.float32)
            for i in tl.static_range(4):
                x = (x_words >> (16 * i)).to(tl.int16).to(x_ptr.dtype.element_ty, bitcast=True)
                products += values[i] * x.to(tl.float32)[:, None, :]
            sums += tl.sum(products, 2)
        words = words_next
    _store(base[2] + offs_n, tl.sum(sums, 0), base, offs_n, offs_n < GEMM.n, GEMM)


@triton.jit
def add_tiles(acc, x_ptrs, w_ptrs, first, end, offs_k, mask_t, GEMM: tl.constexpr):
    """Add to acc [block_n, block_t] the products of the tiles `first` to `end` of K. Two values of a word belong to two
    products, of x at even and at odd k.
    """
    EVEN_K: tl.constexpr = GEMM.k % GEMM.block_k == 0
    UNIT: tl.constexpr = 2 if GEMM.words else 1
    HALF: tl.constexpr = GEMM.block_k // UNIT
    for step in tl.range(first, end, num_stages=GEMM.stages):
        start = step * GEMM.block_k
        if EVEN_K:
            w = tl.load(w_ptrs + step * HALF)
            x = tl.load(x_ptrs + start, mask=mask_t[:, None], other=0.0)
        else:
            mask_w = tl.arange(0, HALF) < GEMM.k // UNIT - step * HALF
            w = tl.load(w_ptrs + step * HALF, mask=mask_w[:, None], other=0.0)
            x = tl.load(x_ptrs + start, mask=mask_t[:, None] & (offs_k < GEMM.k - start)[None, :], other=0.0)
        if GEMM.words:
            w_even, w_odd = upcast_pairs(w, GEMM.native)
            x_even, x_odd = tl.split(tl.reshape(x, [GEMM.block_t, HALF, 2]))
            acc = dot(x_even, w_even.to(x.dtype), acc, True)
            acc = dot(x_odd, w_odd.to(x.dtype), acc, True)
        else:
            acc = dot(x, upcast(w, GEMM.format, x.dtype), acc, True)
    return acc


@triton.jit
def finish_tile(acc, base, sums, place, offsets, mask_t, out_stride, GEMM: tl.constexpr):
    """Write a tile, or with split_k this program's partial sums, which the last to arrive adds up. place: tile and
    split; offsets: columns [block_n] and tokens [block_t].
    """
    planes_ptr, arrived_ptr = sums
    tile, split = place
    offs_n, offs_t = offsets
    out_ptrs = base[2] + offs_t[None, :] * out_stride + offs_n[:, None]
    mask = (offs_n < GEMM.n)[:, None] & mask_t[None, :]
    if GEMM.split_k == 1:
        _store(out_ptrs, acc, base, offs_n[:, None] + offs_t[None, :] * 0, mask, GEMM)
    else:
        PLANE: tl.constexpr = (GEMM.n + GEMM.block_n - 1) // GEMM.block_n * GEMM.block_n * GEMM.block_t
        places = planes_ptr + offs_n[:, None] * GEMM.block_t + offs_t[None, :]
        tl.store(places + split * PLANE, acc)
        if is_last(arrived_ptr, tile, GEMM.split_k):
            total = sum_planes(places, PLANE, GEMM.split_k)
            _store(out_ptrs, total, base, offs_n[:, None] + offs_t[None, :] * 0, mask, GEMM)


@triton.jit
def gemm_tile(x_ptr, base, sums, tile, split, tokens, strides, GEMM: tl.constexpr):
    """Compute block_n rows of the weight, all tokens (block_t or fewer). A token's bits follow neither from `tokens`
    nor from block_t. ``base``, ``strides``: as in the kernels; ``sums``: partials and counters of split K.
    """
    BLOCK_N: tl.constexpr = GEMM.block_n
    UNIT: tl.constexpr = 2 if GEMM.words else 1
    BLOCK_W: tl.constexpr = GEMM.block_k // UNIT
    x_stride, w_stride, out_stride = strides
    w_ptr = base[0]
    if GEMM.words:
        w_ptr = w_ptr.to(tl.pointer_type(tl.int16))
        w_stride = tl.multiple_of(w_stride // 2, 8)
    STEPS: tl.constexpr = (GEMM.k + GEMM.block_k - 1) // GEMM.block_k
    first, end = STEPS * split // GEMM.split_k, STEPS * (split + 1) // GEMM.split_k
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t, offs_k = tl.arange(0, GEMM.block_t), tl.arange(0, GEMM.block_k)
    mask_t = offs_t < tokens
    w_rows = w_ptr + tl.minimum(offs_n, GEMM.n - 1).to(tl.int64) * w_stride  # the last row stands for those behind it
    if GEMM.pdl and GEMM.ahead > 0:
        start = first * BLOCK_W
        bring_near(w_rows + start, tl.minimum(tl.minimum(end * BLOCK_W, GEMM.k // UNIT) - start, GEMM.ahead // UNIT))
    pdl_launch_then_wait(GEMM.pdl)
    x_ptrs = x_ptr + offs_t[:, None] * x_stride + offs_k[None, :]  # [GEMM.block_t, BLOCK_K]
    acc = accumulator(GEMM.block_n, GEMM.block_t)
    w_ptrs = w_rows[None, :] + tl.arange(0, BLOCK_W)[:, None]  # [BLOCK_W, BLOCK_N]
    acc = add_tiles(acc, x_ptrs, w_ptrs, first, end, offs_k, mask_t, GEMM)
    finish_tile(acc, base, sums, (tile, split), (offs_n, offs_t), mask_t, out_stride, GEMM)


@triton.jit(do_not_specialize=["tokens"])
def _gemm_tiles_kernel(x_ptr, base, sums, tokens, strides, GEMM: tl.constexpr):
    gemm_tile(x_ptr, base, sums, tl.program_id(0), tl.program_id(1), tokens, strides, GEMM)


_ARRIVED = WeakTensorKeyDictionary()
"""Per weight, the programs that have arrived at each of its tiles: zeros between launches."""


def arrivals(weight: Tensor) -> Tensor:
    known = _ARRIVED.get(weight)
    if known is None:
        known = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
        if weight.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else it is the graph's
            _ARRIVED[weight] = known
    return known


def skinny_gemm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None,
    *, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """Compute ``out = x @ weight^T + bias`` for few rows.

    Args:
        out: ``[T, N]`` in float16, bfloat16 or float32, overwritten; elements of a row side by side, here and
            in all of these.
        x: ``[T, K]``, T at most 64, of the same dtype.
        weight: ``[N, K]``, as `torch.nn.Linear` keeps it. Calls with one weight must not overlap on two streams
            (programs that share a tile count their arrivals beside it). Or float8_e4m3fn, with ``scale``.
        bias: ``[N]``, or None.
        scale: float32 ``[N]``, of the rows of a weight in FP8: the product is that of ``weight * scale[:, None]``.
        batch_invariant: a row's bits do not depend on T; few rows then pay for the form of many.

    float32 takes IEEE products.
    """
    _check(out, x, weight, bias, scale)
    tokens, stored = x.shape[0], weight_form(weight, bias)
    if tokens == 0 or stored.n == 0:
        return
    steady = batch_invariant or (stored.words and x.data_ptr() % 8 != 0)  # one row of x is read in words of 8 bytes
    form = choose_form(stored, tokens, x.dtype, Gpu.of(x.device).multiprocessors, steady)
    run_form(out, x, (weight, bias, scale), stored, form)


def base_operands(weight: Tensor, bias: Tensor | None, out: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    """Join the kernels' argument ``base``: weight, bias (or any tensor), output, scales of a weight in FP8."""
    if scale is None:
        return weight, weight if bias is None else bias, out
    return as_operand(weight), scale if bias is None else bias, out, scale


def run_form(
    out: Tensor, x: Tensor, product: tuple[Tensor, Tensor | None, Tensor | None], stored: WeightForm,
    form: GemmForm,
) -> None:  # fmt: skip
    """Run `skinny_gemm` in a given form, on operands known to be right: weight, bias and scale are of ``stored``."""
    (weight, bias, scale), tokens, pdl = product, x.shape[0], supports_pdl(x.device)
    tiles = triton.cdiv(stored.n, form.block_n)
    strides = x.stride(0), stored.stride, out.stride(0)
    base = base_operands(weight, bias, out, scale)
    shared: dict[str, Any] = {"num_warps": form.num_warps, "pdl": pdl, "device": x.device}
    operands: tuple[Any, ...] = (x, base)
    counts: tuple[int, ...] = ()
    if isinstance(form, RowsForm):
        shape = stored.n, stored.k, tokens, form.block_n, form.block_k, 16 // weight.element_size()
        rows = GemmRows(*shape, stored.has_bias, pdl, stored.format, reads_fp8(x.device))
        kernel, of = (_gemm_word_row_kernel, strides[1:2]) if stored.format else (_gemm_rows_kernel, strides)
        launch = Launch(kernel, (tiles, 1, 1), (x.dtype,), of, {"GEMM": rows}, **shared)
    else:
        constants = {"GEMM": gemm_tiles(form, x, stored, pdl)}
        grid = (tiles, form.split_k, 1)
        launch = Launch(_gemm_tiles_kernel, grid, (x.dtype, form.split_k > 1), strides, constants, **shared)
        operands, counts = (x, base, split_workspace(out, weight, form)), (tokens,)
    with on_device(x.get_device()):
        launch(operands, counts, all_aligned(x, *base))


def gemm_tiles(form: TilesForm, x: Tensor, weight: WeightForm, pdl: bool) -> GemmTiles:
    size = x.element_size()
    tile_bytes = form.block_k * (form.block_n * (1 if weight.format else size) + form.block_t * size)
    return GemmTiles(
        weight.n, weight.k, form.block_t, form.block_n, form.block_k, form.split_k,
        stages_that_fit(form.num_stages, tile_bytes, x.device), form.ahead if weight.whole else 0,
        weight.has_bias, pdl, weight.format, weight.in_pairs(x.dtype), reads_fp8(x.device),
    )  # fmt: skip


def split_workspace(out: Tensor, weight: Tensor, form: TilesForm) -> tuple[Tensor, Tensor]:
    """Return the workspace and arrival counters of split K; one split needs neither and gets `out`."""
    if form.split_k == 1:
        return out, out
    size = form.split_k * form.block_t * triton.cdiv(weight.shape[0], form.block_n) * form.block_n
    return torch.empty(size, dtype=torch.float32, device=out.device), arrivals(weight)


def _check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> None:
    check_runnable(x.device)
    tokens, k = check_shape("x", x, (None, None))
    n, _ = check_shape("weight", weight, (None, k))
    if tokens > MAX_TOKENS or k == 0:
        raise ValueError(f"skinny_gemm takes up to {MAX_TOKENS} rows, none empty, got {list(x.shape)}; use F.linear")
    check_rows("x", x)
    check_rows("weight", weight)
    if not check_row_scales("weight", weight, scale, x.device):
        check_same(x, weight=weight)
    check_dense(x, out=(out, (tokens, n)), **({} if bias is None else {"bias": (bias, (n,))}))
