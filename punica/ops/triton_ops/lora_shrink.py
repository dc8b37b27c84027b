"""Shrink: hidden size to rank, for every adapter of the batch in one launch.

    out[i, t, :] = scaling * x[t] @ A_i[slot(t)]^T          x [T, K], A_i [L, r, K], out [n, T, r]  (n slices)

One kernel in three modes:

* **rows**: a GEMV per row (`shrink_gemv`). The grid is filled by splitting the *ranks*, which needs no second sum.
* **list**: a persistent loop over the tiles of a step's list (`shrink_gemm`), and a GEMV for rows of short segments.
* **search**: tiles of tensors that come without a list; every program searches the segments.

``SPLIT_K > 1`` cuts K among programs; each writes its fp32 partial sum ``out[split]`` into a workspace, and expand adds
them in ascending order. So there is no atomic add and no zero fill, and the bits repeat from run to run. The public op
writes its result directly (one split); `lora_linear` uses partials.

Ranks are true ranks: programs of ranks beyond the adapter's own leave at once, and lanes beyond it are not read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import HEIGHTS, LoRABatch
from punica.metadata.work import LONG, TOTALS
from punica.ops.checks import FLOATS, Names, Weights, check_input, check_low_rank, check_ranks, describe_stored
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.device import INDEX_POINTERS, find_tile, max_tiles, pdl_wait, read_record
from punica.ops.triton_ops.fp8_device import WIDE, Quant
from punica.ops.triton_ops.launch import INTERPRETED, IS_ROCM, Launch, block_at_least, on_device, stages_that_fit
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named
from punica.ops.triton_ops.plan import Batch, FixedPlan, KernelPlan, ListedPlan
from punica.ops.triton_ops.shrink_gemm import shrink_tile
from punica.ops.triton_ops.shrink_gemv import shrink_row
from punica.ops.triton_ops.tensor_batch import TensorBatch


class ShrinkShape(NamedTuple):
    """Shape and storage of A and of the output, and options of the call: a constexpr of the kernels.

    k, rank, slices: A_i is [slots, rank, k]; out_rank: ranks of an output row, with padding; stride_r, stride_k: of A.
    direct: the output is the result [n, T, r], not partials.
    """

    k: int
    rank: int
    out_rank: int
    stride_r: int
    stride_k: int
    slices: int
    quant: Quant
    has_ranks: bool
    direct: bool
    accumulate: bool


class RowTile(NamedTuple):
    """Work of a GEMV program: block_r ranks and block_k of K at once, ``programs`` per row and K split."""

    block_r: int = 0
    programs: int = 1
    block_k: int = 0


class ShrinkTile(NamedTuple):
    """Schedule of a launch: a constexpr of the kernels. Fields as in `configs`, and:

    mode: "rows", "list" or "search". row: of single rows. swap_ab: weights are the left operand. together: all slices'
    ranks side by side. tiles_at, rows_at: entries of a step's totals that count its tiles and rows. segments: power of
    two >= segments.
    """

    mode: str
    split_k: int
    pdl: bool
    row: RowTile
    block_m: int = 16
    block_r: int = 16
    block_k: int = 16
    stages: int = 1
    swap_ab: bool = False
    together: bool = False
    tiles_at: int = 0
    rows_at: int = 0
    segments: int = 0
    interpret: bool = INTERPRETED


@triton.jit
def _shrink_list(
    tensors, operands, sorted_ptr, work, counts, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A persistent loop over a step's list: programs for ``num_tiles`` tiles stride over all of them. With
    ``row.block_k`` the list holds long segments only, and programs for ``num_rows`` rows stride over the others.

    work: records of tiles and rows, and totals of the step.
    """
    tiles_ptr, rows_ptr, totals_ptr = work
    num_tiles, num_rows = counts
    ranks_ptr, num_tokens, num_slots, scaling, anchor = call
    LANES: tl.constexpr = SHAPE.rank * SHAPE.slices if TILE.together else SHAPE.rank
    R_BLOCKS: tl.constexpr = (LANES + TILE.block_r - 1) // TILE.block_r
    SLICES: tl.constexpr = SHAPE.slices if TILE.together else 1
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    tile_programs = num_tiles * (TILE.split_k * R_BLOCKS)
    if pid < tile_programs:
        tile, first_r = pid // (TILE.split_k * R_BLOCKS), (pid // TILE.split_k) % R_BLOCKS * TILE.block_r
        record = tl.load(tiles_ptr + tile)
        total = tl.load(totals_ptr + TILE.tiles_at)
        pdl_wait(TILE.pdl, anchor & (tile >= total))
        while tile < total:
            place = (pid % TILE.split_k, first_r, slice_id)
            shrink_tile(tensors, operands, sorted_ptr, read_record(record), place, call, strides, SHAPE, TILE)
            tile += num_tiles
            record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)
    elif TILE.row.block_k > 0:
        pid -= tile_programs
        block = (pid % TILE.split_k, pid // TILE.split_k % TILE.row.programs)
        item = pid // (TILE.split_k * TILE.row.programs * SLICES)
        slice_id += pid // (TILE.split_k * TILE.row.programs) % SLICES
        record = tl.load(rows_ptr + item)
        total = tl.load(totals_ptr + TILE.rows_at)
        call = (ranks_ptr, num_tokens, num_slots, scaling, False)
        while item < total:
            slot, row, _ = read_record(record)
            shrink_row(tensors, operands, (row.to(tl.int64), slot, slice_id), block, call, strides, SHAPE, TILE)
            item += num_rows
            record = tl.load(rows_ptr + item, mask=item < total, other=0)


@triton.jit
def _shrink_found(
    tensors, operands, pointers, segments, counts, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The tile that this program finds among the segments. With ``direct``, programs past the tiles zero-fill rows
    without adapter.

    pointers: of the slots of the rows, and of the sorted rows; segments: of ids, counts and starts.
    """
    _, out_ptr = tensors
    mapping_ptr, sorted_ptr = pointers
    ids_ptr, counts_ptr, starts_ptr = segments
    num_tiles, num_segments = counts
    _, num_tokens, _, _, _ = call
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    R_BLOCKS: tl.constexpr = (SHAPE.rank + BLOCK_R - 1) // BLOCK_R
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    first_r = (pid // TILE.split_k) % R_BLOCKS * BLOCK_R
    tile = pid // (TILE.split_k * R_BLOCKS)
    if tile < num_tiles:
        found = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, TILE.segments)
        place = (pid % TILE.split_k, first_r, slice_id)
        shrink_tile(tensors, operands, sorted_ptr, found, place, call, strides, SHAPE, TILE)
    else:
        rows = (tile - num_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_r = first_r + tl.arange(0, BLOCK_R)
        bare = (rows < num_tokens) & (tl.load(mapping_ptr + rows, mask=rows < num_tokens, other=0) < 0)
        out_ptrs = out_ptr + (slice_id * num_tokens.to(tl.int64) + rows)[:, None] * SHAPE.rank + offs_r[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=bare[:, None] & (offs_r < SHAPE.rank)[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_tiles", "num_items"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, num_items, scaling, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Entry of all modes. ``mode`` "search" has ids, counts and starts of the segments in place of the list (tiles,
    rows, totals), and their number as ``num_items``. Pointers that a mode does not read are None.

    tensors: x and the output; operands: `fp8_device.operands`; strides: of x.
    """
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    call = (ranks_ptr, num_tokens, num_slots, scaling, (pid == 0) & (slice_id == 0))
    work, counts = (tiles_ptr, rows_ptr, totals_ptr), (num_tiles, num_items)
    if TILE.mode == "rows":
        block = (pid % TILE.split_k, (pid // TILE.split_k) % TILE.row.programs)
        row = (pid // (TILE.split_k * TILE.row.programs)).to(tl.int64)
        slot = tl.load(mapping_ptr + row)
        shrink_row(tensors, operands, (row, slot, slice_id), block, call, strides, SHAPE, TILE)
    elif TILE.mode == "list":
        _shrink_list(tensors, operands, sorted_ptr, work, counts, call, strides, SHAPE, TILE)
    else:
        _shrink_found(tensors, operands, (mapping_ptr, sorted_ptr), work, counts, call, strides, SHAPE, TILE)


def plan_shrink(
    x: Tensor, weights: Weights, out_dtype: torch.dtype,
    batch: Batch,
    config: dict[str, Any],
    *,
    has_ranks: bool, direct: bool,
    accumulate: bool = False, overlap: bool = False, early: bool = False, quant: Quant = WIDE,
) -> KernelPlan:  # fmt: skip
    """The launch that `config` names, for x's shape and strides.

    ``direct``: the kernel writes the result [n, T, r]; else fp32 partials [split_k, n, T, `partial_rank`]. ``overlap``:
    its dependent starts early; ``early``: it itself starts early. ``quant``: storage of A and x; scales then follow
    the weights that the launch is given.
    """
    tokens, rank, slices = x.shape[0], weights.rank, len(weights.widths)
    split_k = 1 if direct else config["split_k"]
    shape = stored_shape(weights, rank if direct else partial_rank(rank), quant, has_ranks)
    shape = shape._replace(direct=direct, accumulate=accumulate)
    sizes = (tokens, weights.slots)

    def launch(tile: ShrinkTile, programs: int, axis: int = slices) -> Launch:
        return Launch(
            _lora_shrink_kernel, (programs, axis, 1), (x.dtype, weights.dtype, out_dtype), x.stride(),
            {"SHAPE": shape, "TILE": tile}, num_warps=config["num_warps"], pdl=early, device=weights.device,
        )  # fmt: skip

    if config["row_wise"]:
        row = _row_tile(config, shape, tokens * slices * split_k, config["block_k"])
        return FixedPlan(
            launch(ShrinkTile("rows", split_k, overlap, row), tokens * row.programs * split_k), (*sizes, 0, 0)
        )
    listed = batch.listed and config["block_m"] in HEIGHTS and (accumulate or not direct)
    tile = _gemm_tile(config, shape, x.element_size(), weights.device, listed)
    tile = tile._replace(split_k=split_k, pdl=overlap)
    axis = 1 if tile.together else slices
    per_tile = triton.cdiv(rank * slices if tile.together else rank, tile.block_r) * split_k
    if listed:
        height, short_k = HEIGHTS.index(tile.block_m), config["short_k"]
        row = _row_tile(config, shape, min(tokens, LONG * batch.shape.short) * slices * split_k, short_k)
        tile = tile._replace(row=row, tiles_at=2 * height + (short_k > 0), rows_at=TOTALS - 1)
        per_row = row.programs * split_k * (slices // axis) if short_k else 0
        return ListedPlan(launch(tile, 0, axis), height, per_tile, per_row, axis, sizes)
    segments = batch.max_segments
    tiles = max_tiles(tokens, segments, tile.block_m)
    bare_tiles = triton.cdiv(tokens, tile.block_m) if direct and not accumulate else 0
    tile = tile._replace(segments=block_at_least(batch.tensors[4].numel()))
    return FixedPlan(launch(tile, (tiles + bare_tiles) * per_tile), (*sizes, tiles, segments))


def _row_tile(config: dict[str, Any], shape: ShrinkShape, rows: int, block_k: int) -> RowTile:
    """Work of a program on one of ``rows`` rows, slices and K splits."""
    block_r = min(config["block_r"], block_at_least(shape.rank, 1))
    programs = triton.cdiv(shape.rank, block_r)
    if not (shape.direct or shape.quant.format) and shape.has_ranks:
        programs = _rank_programs(programs, block_r, rows, shape.rank)
    return RowTile(block_r, programs, min(block_k, block_at_least(shape.k)))


def _gemm_tile(
    config: dict[str, Any], shape: ShrinkShape, itemsize: int, device: torch.device, listed: bool
) -> ShrinkTile:
    """Tile of the tensor cores, with as many stages as fit into shared memory."""
    # AMD's compiler (Triton 3.7) fails on a select of pointer tensors, by which lanes of several slices find their A
    together = config["together"] and shape.slices > 1 and listed and not IS_ROCM
    lanes = shape.rank * shape.slices if together else shape.rank
    block_m, block_r = config["block_m"], min(config["block_n"], block_at_least(lanes))
    block_k, bytes_of = min(config["block_k"], block_at_least(shape.k)), (block_m + block_r) * max(2, itemsize)
    if shape.quant.group_k:
        block_k = min(block_k, shape.quant.group_k, 128)  # a product per block of scales, the same in every step
    while block_k > 32 and block_k * bytes_of > 64 << 10:  # wide elements
        block_k //= 2
    if config["swap_ab"] and not shape.quant.group_k:
        block_k = max(block_k, 64)  # 16 for each of four warps
    stages = stages_that_fit(config["num_stages"], block_k * bytes_of, device)
    mode = "list" if listed else "search"
    return ShrinkTile(mode, 1, False, RowTile(), block_m, block_r, block_k, stages, config["swap_ab"], together)


def stored_shape(weights: Weights, out_rank: int, quant: Quant, has_ranks: bool) -> ShrinkShape:
    """Shape of A, and of rows of partials with room for ``out_rank`` ranks."""
    rank, k = weights.rank, weights.widths[0]
    stride_r, stride_k = (k, 1) if weights.row_major else (1, rank)
    return ShrinkShape(k, rank, out_rank, stride_r, stride_k, len(weights.widths), quant, has_ranks, False, False)


def partial_rank(rank: int) -> int:
    """Ranks that a row of a partial has room for: rows of odd ranks would straddle the 32 bytes that memory moves."""
    return block_at_least(rank, 8)


def _rank_programs(blocks: int, block_r: int, others: int, rank: int) -> int:
    """Programs that share the rank blocks of one row when true ranks vary: as few as cover rank 16, or half a wider
    slot, at once, so that low ranks leave few idle programs behind, but enough to occupy the device."""
    programs, cover = blocks, max(16, rank // 2)
    while programs * block_r > cover and programs % 2 == 0 and programs // 2 * others >= 256:
        programs //= 2
    return programs


def _describe(names: Names, lora_a: Sequence[Tensor]) -> Weights:
    return describe_stored(names.a, lora_a, -2)


def _plan(call: Call, weights: Weights) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to multiply."""
    names, x, y, lora_ranks, batch, switches = call
    accumulate, options = switches
    check_input(names.input, x, weights, names.a)
    (tokens, k), segments = x.shape, batch.max_segments
    check_low_rank(names.output, y, weights, tokens, FLOATS)
    if not y.is_contiguous():
        raise ValueError(f"{names.output} must be contiguous, got shape {tuple(y.shape)} with strides {y.stride()}")
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, k, weights.rank, segments):
        return None
    sizes = tokens, k, weights.rank, len(weights.widths)
    config = choose("shrink", batch.shape, *sizes, options, listed=batch.listed and accumulate)
    return plan_shrink(
        x, weights, y.dtype, batch, config, has_ranks=lora_ranks is not None, direct=True, accumulate=accumulate
    )


_PLANS = Plans(_describe, _plan)


@named("lora_shrink")
def shrink(
    x: Tensor, lora_a_stacked: Sequence[Tensor], y: Tensor, batch: Batch,
    scale: float = 1.0, *, accumulate: bool = False, lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_shrink` on a step: ``y[i, t] (+)= scale * x[t] @ A_i[slot(t)]^T``, arguments as there."""
    if batch.no_lora:
        if isinstance(batch, LoRABatch) and not accumulate:
            y.zero_()  # with the flag of the flat form set, nothing is written
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {"scaling": scale, "accumulate": accumulate, "lora_ranks": lora_ranks, **chosen}
        call_flat(lora_shrink, (x, lora_a_stacked, y), batch, x.shape[0], **given)
        return
    switches = (accumulate, options)
    plan, aligned = _PLANS.find(x, y, (lora_a_stacked,), lora_ranks, batch, switches, scale)
    if plan is not None:
        with on_device(x.get_device()):
            plan.run(x, lora_a_stacked, y, batch, lora_ranks, aligned, float(scale))
    elif not accumulate:
        y.zero_()


@custom_op(mutates="output_tensor")
def lora_shrink(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    scaling: float,
    *, num_active_loras: int | Tensor | None = None, accumulate: bool = False, lora_ranks: Tensor | None = None,
    batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[i, t] (+)= scaling * inputs[t] @ A_i[slot(t)]^T`` for every slice i, in place.

    Args:
        inputs: [T, K], float16, bfloat16 or float32, any strides.
        lora_a_weights: n x [L, (1,) r, K], dtype of the inputs, contiguous (or with the last two dimensions swapped).
        output_tensor: [n, T, r] contiguous; float32 keeps the precision of the sums.
        token_lora_mapping, ..., no_lora_flag_cpu: the first six of `LoRAKernelMeta.meta_args`.
        scaling: finite factor.
        num_active_loras: the seventh, how many entries of ``lora_ids`` may be in use (None: all).
        accumulate: add to the output instead of overwriting it.
        lora_ranks: int32 [n, L], true rank per slice and slot (None: r).
        batch_invariant, tuned_dir: as in `punica.config.LoRAConfig`.

    Rows at slot -1: 0, or unchanged with ``accumulate``. With the no-adapter flag set nothing is written. TypeError for
    dtypes, ValueError for shapes, ranges and devices, before any write.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    options = Options(batch_invariant, tuned_dir=tuned_dir)
    shrink(
        inputs, lora_a_weights, output_tensor, batch, scaling,
        accumulate=accumulate, lora_ranks=lora_ranks, options=options,
    )  # fmt: skip
