"""Expand: rank to output size, for every adapter and every slice of the batch in one launch.

    y[t, o_i : o_i + N_i] (+)= h[i, t] @ B_i[slot(t)]^T     h [n, T, r] or fp32 partials [splits, n, T, r]
                                                            B_i [L, N_i, r]

The partials of a split shrink are summed as h is read; ``y + delta`` is formed in fp32 and rounded once. The modes are
those of `lora_shrink`.

With PDL the kernel starts while its predecessor still runs: B is loaded first, and the old y too unless it is ``late``
(the predecessor may write it), then it waits. Unless ``late``, whatever wrote y has ended: the predecessor is the
shrink, which launches this kernel only after its own wait.
"""

from collections.abc import Callable
from itertools import accumulate
from math import gcd, prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.device import INDEX_POINTERS, find_tile, pdl_wait, read_record
from punica.ops.triton_ops.expand import expand_row, expand_tile
from punica.ops.triton_ops.fp8_device import Quant, quant_of
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, shared_memory, stages_that_fit
from punica.ops.triton_ops.plan import Batch, KernelPlan, plan_tiles
from punica.ops.triton_ops.schedules import WIDE_RANKS, Schedule
from punica.ops.weights import Form


class ExpandShape(NamedTuple):
    """Shape and storage of B, h and y, and options of the call: a constexpr of the kernels.

    widths, columns: columns of each slice, and the first of them in y. row_major: B_i is stored [width, rank], else
    rank after rank. vector: ranks that one load takes. partials: of h, added up. add: to y, else y is overwritten.
    """

    rank: int
    widths: tuple[int, ...]
    columns: tuple[int, ...]
    slices: int
    quant: Quant
    row_major: bool
    vector: int
    partials: int
    has_ranks: bool
    add: bool


class RowTile(NamedTuple):
    """Work of a GEMV program: block_n columns (``blocks`` of them in all slices), ``lanes`` ranks at once. lanes,
    steps: widths in ranks to choose from, and in how many steps each takes the columns.
    """

    lanes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    block_n: int = 0
    blocks: int = 1


class ExpandTile(NamedTuple):
    """Schedule of a launch: a constexpr. Fields as in `schedules.Schedule` and `ShrinkTile`, and: late: y is not read
    before the PDL wait. blocks: runs of block_n x tiles_n columns in all slices, which even_n: divide each. at_once:
    blocks go through registers.
    """

    mode: str
    late: bool
    pdl: bool
    row: RowTile = RowTile()
    blocks: int = 1
    even_n: bool = False
    block_m: int = 16
    block_n: int = 16
    block_r: int = 16
    tiles_n: int = 1
    at_once: bool = False
    words: bool = False
    stages: int = 1
    swap_ab: bool = False
    height: int = 0
    segments: int = 0


@triton.jit
def _expand_list(tensors, operands, work, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Run a persistent loop over a step's list, as `lora_shrink._shrink_list`."""
    sorted_ptr, tiles_ptr, totals_ptr, num_tiles = work
    _, _, anchor = call
    pid = tl.program_id(0)
    tile = pid // TILE.blocks
    record = tl.load(tiles_ptr + tile)
    total = tl.load(totals_ptr + TILE.height)
    pdl_wait(TILE.pdl, anchor & (tile >= total))
    while tile < total:
        found = (sorted_ptr, read_record(record))
        expand_tile(tensors, operands, found, pid % TILE.blocks, call, strides, SHAPE, TILE)
        tile += num_tiles
        record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_tiles", "num_segments"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_expand_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, tiles_ptr, totals_ptr, starts_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, num_segments, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run one mode, as `lora_shrink._lora_shrink_kernel`. tensors: h and y; strides: of all of h, and of y's rows."""
    pid = tl.program_id(0)
    call = (ranks_ptr, num_slots, pid == 0)
    if TILE.mode == "rows":
        row = (pid // TILE.row.blocks).to(tl.int64)
        slot = tl.load(mapping_ptr + row)
        expand_row(tensors, operands, (row, slot), pid % TILE.row.blocks, call, strides, SHAPE, TILE)
    elif TILE.mode == "list":
        work = (sorted_ptr, tiles_ptr, totals_ptr, num_tiles)
        _expand_list(tensors, operands, work, call, strides, SHAPE, TILE)
    else:
        tile = pid // TILE.blocks
        found = find_tile(tile, tiles_ptr, totals_ptr, starts_ptr, num_segments, TILE.block_m, TILE.segments)
        expand_tile(tensors, operands, (sorted_ptr, found), pid % TILE.blocks, call, strides, SHAPE, TILE)


class LowRank(NamedTuple):
    """h ``[partials, n, T, r]``; rows may be wider than r, and partials are added up."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def result(cls, h: Tensor) -> "LowRank":
        """Return a result ``[n, T, r]``: one partial."""
        return cls((1, *h.shape), (0, *h.stride()), h.dtype)

    @classmethod
    def sums(cls, *shape: int) -> "LowRank":
        return cls(shape, tuple([prod(shape[i + 1 :]) for i in range(4)]), torch.float32)


class ExpandMode(NamedTuple):
    """Options of a launch.

    offset_start: first column written. add_inputs: y is added to, else overwritten. pdl: it starts early. late: y is
    not read before the PDL wait. words: B in FP8 begins where four columns may be read at once. x_strides: as in
    `lora_shrink.ShrinkMode`.
    """

    offset_start: int = 0
    add_inputs: bool = True
    pdl: bool = False
    late: bool = False
    words: bool = False
    x_strides: tuple[int, int] | None = None


def plan_expand(h: LowRank, y: Tensor, form: Form, batch: Batch, schedule: Schedule, mode: ExpandMode) -> KernelPlan:
    """Plan the launch of a schedule, for these strides and a B of this form."""
    weights, (_, _, tokens, _), pdl = form.stored, h.shape, mode.pdl
    if pdl and h.strides[0] <= 0:  # kernels branch on it where they wait (`pdl_wait`)
        raise ValueError(f"partials of h have a stride of {h.strides[0]}; give a positive one, or pdl=False")
    shape = expand_shape(h, form, mode)

    def launch(tile: ExpandTile, programs: int) -> Launch:
        return Launch(
            _lora_expand_kernel, (programs, 1, 1), (h.dtype, weights.dtype, y.dtype), (*h.strides, y.stride(0)),
            {"SHAPE": shape, "TILE": tile}, num_warps=schedule.num_warps, pdl=pdl, device=weights.device,
        )  # fmt: skip

    tile = ExpandTile("rows", mode.late and pdl, pdl)
    if not schedule.block_m:
        tile = tile._replace(row=_row_tile(shape, schedule, tokens))
        return KernelPlan(launch(tile, tokens * tile.row.blocks), (tokens, weights.slots, 0, 0))
    itemsizes = (h.dtype.itemsize, weights.dtype.itemsize, y.element_size())
    tile = _gemm_tile(tile, schedule, shape, itemsizes, weights.device)
    return plan_tiles(launch, tile, batch, (tokens, weights.slots), tile.blocks)


def expand_shape(h: LowRank, form: Form, mode: ExpandMode) -> ExpandShape:
    weights = form.stored
    quant = quant_of(form, h.dtype, weights.widths, weights.rank, mode.x_strides)
    whole = all([width % 4 == 0 for width in weights.widths])  # every rank of a slice ends with a word
    quant = quant._replace(words=mode.words and whole and quant.dense and not weights.row_major)
    columns = tuple(accumulate(weights.widths[:-1], initial=mode.offset_start))
    vector = gcd(weights.rank, 16 // weights.dtype.itemsize if weights.row_major else 4)
    return ExpandShape(
        weights.rank, weights.widths, columns, len(weights.widths), quant, weights.row_major, vector, h.shape[0],
        form.has_ranks, mode.add_inputs,
    )  # fmt: skip


def _blocks(shape: ExpandShape, block_n: int) -> int:
    return sum([triton.cdiv(width, block_n) for width in shape.widths])


def _row_tile(shape: ExpandShape, schedule: Schedule, rows: int) -> RowTile:
    block_n, lanes = schedule.block_n, schedule.block_k
    if not shape.row_major:
        lanes = min(lanes, shape.quant.group_k or lanes, block_at_least(shape.rank, 1))
        return RowTile((lanes,), (1,), block_n, _blocks(shape, block_n))
    widths, steps, block_n = _lane_blocks(
        shape.rank, block_n, shape.has_ranks, lambda columns: rows * _blocks(shape, columns)
    )
    return RowTile(widths, steps, block_n, _blocks(shape, block_n))


def _gemm_tile(
    tile: ExpandTile, schedule: Schedule, shape: ExpandShape, itemsizes: tuple[int, int, int], device: torch.device
) -> ExpandTile:
    """Return ``tile`` with the blocks of the tensor cores, and as many stages as fit into shared memory.

    All ranks go in one pass where that fits, since more would read h again for every block of columns. The operands of
    a float32 product are held in registers, whose number per program is the limit there.
    """
    rank, quant, (of_h, of_b, of_y) = shape.rank, shape.quant, itemsizes
    wide = 2 if quant.x_format else of_y if quant.format else of_b
    most_r = min(quant.group_k or WIDE_RANKS, WIDE_RANKS if wide == 2 else 16)
    if shared_memory(device) < 227 << 10:  # tensor cores that read operands from registers, unlike Hopper's
        most_r = min(most_r, 128)
    block_m, block_r = schedule.block_m, min(block_at_least(rank), schedule.block_k, most_r)
    block_n, tiles_n = schedule.block_n, schedule.tiles_n
    while block_r > 16 and 2 * (block_n * block_r + block_m * (block_n + block_r)) > shared_memory(device):
        block_r //= 2  # B, y and h of one block must fit
    while INTERPRETED and block_m * block_n * block_r > 1 << 20:
        block_r //= 2  # Triton's tensors have no more elements, and the interpreter holds all products
    row_bytes = block_n * of_y if rank <= block_r else block_r * shape.partials * of_h
    words = quant.words and not schedule.swap_ab and wide == 2 and rank <= block_r and block_n >= 64  # 16 words or more
    held_bytes = 1 if words else wide  # else they are upcast through shared memory
    stage_bytes = block_n * block_r * held_bytes + block_m * row_bytes  # B, and old y or the partials of h
    return tile._replace(
        blocks=_blocks(shape, block_n * tiles_n), block_m=block_m, block_n=block_n, block_r=block_r, tiles_n=tiles_n,
        even_n=all([width % (block_n * tiles_n) == 0 for width in shape.widths]),
        at_once=tiles_n == 1 or schedule.num_stages == 1, words=words,
        stages=stages_that_fit(schedule.num_stages, stage_bytes, device), swap_ab=schedule.swap_ab,
    )  # fmt: skip


def _lane_blocks(
    rank: int, block_n: int, has_ranks: bool, programs: Callable[[int], int]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the block widths in ranks among which the kernel chooses for B by rows, in how many steps each takes a
    program's columns, and how many columns that is.

    ``block_n`` suits the whole width. With true ranks a program gets up to as many times more columns as 16 ranks, the
    least that memory moves, are narrower, so that its blocks stay as large; ``programs(block_n)`` must still occupy the
    device.
    """
    whole, least = block_at_least(rank, 1), 16
    if not has_ranks or whole <= least:
        return (whole,), (1,), block_n
    factor = whole // least
    while factor > 1 and programs(block_n * factor) < 512:
        factor //= 2
    lanes = (*[width for width in (16, 32) if width < whole], whole)
    return lanes, tuple(max(1, factor * width // whole) for width in lanes), block_n * factor
