"""Schedules of fused MoE LoRA where no tuned file has one: rules on a call's sizes, in the blocks of `schedules`.

From a search on an H200 (Qwen3-30B-A3B and Mixtral, T 1 to 128, 1 to 16 adapters, rank 16). Pairs are aligned only if
an (adapter, expert) group has several, or redundant weight reads would dominate: the alignment costs 3 to 9 us, and
each kernel two dependent loads before it knows its tile. With one or two pairs per group a GEMV beats a tile of 16
rows, which beats those of 32 and 64 even with 32 pairs per expert. Where tiles alone are more than the programs, small
blocks of few warps let all of them run at once.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from triton import cdiv

from punica.ops.experts import ExpertForm
from punica.ops.triton_ops import schedules as dense
from punica.ops.triton_ops.launch import block_at_least
from punica.ops.triton_ops.schedules import GEMV_K, K_STEP, SPLITS, WARPS, Schedule

HEIGHT = dense.TILE_ROWS[0]
"""Rows, and ranks, of the smallest product of tensor cores; also the most K splits."""
PROGRAMS = 320
"""Programs whose loads occupy the memory of an H200: 2.4 for each of its multiprocessors. K and columns are cut into so
many and no further, since each cut costs partial sums or another search for the tile.
"""
LEAST_SPAN, MOST_SPAN = 2 * K_STEP, GEMV_K // WARPS
"""Elements of K of one program: partial sums dominate below, a long chain of loads above."""
NAIVE_BYTES, NAIVE_MEAN = 40_000_000, 2.5
"""Limits of naive assignment: redundant weight reads in bytes (from the 50 MB of L2 cache), and pairs per group."""
ROWS_MEAN = 1.6
"""Pairs per group of one slice up to which multiply and sum, a row at a time, beats a block of 16 rows."""
NARROW_STAGES = 6
"""Depth of a pipeline over blocks of up to 16 ranks, a quarter of the bytes of others."""


class Work(NamedTuple):
    """Problem size of a fused MoE LoRA call. ``active``: adapters in use, as far as the host knows. ``invariant``: one
    kernel and split for all batches, so that a pair has the same bits in all of them.
    """

    form: ExpertForm
    naive: bool
    active: int
    itemsize: int
    invariant: bool = False

    @property
    def groups(self) -> float:
        return _groups(self.form.pairs, max(1, self.active * self.form.experts))

    @property
    def mean(self) -> float:
        return self.form.pairs / max(1.0, self.groups)

    @property
    def tiles(self) -> float:
        if self.naive:
            return self.form.pairs
        return max(1.0, self.groups, self.form.pairs / max(HEIGHT, self.form.block_m))

    @property
    def expands_rows(self) -> bool:
        """True where expand is a GEMV. A second slice has twice the programs; wide ranks do not fit the registers."""
        few = self.naive or self.mean < ROWS_MEAN * self.form.slices
        return few and not self.invariant and block_at_least(self.form.full_rank) <= dense.WIDE_RANKS

    def narrow(self, ranks: int) -> bool:
        """Tell whether two warps suffice for products of ``ranks``: small blocks of few bytes."""
        small = self.form.block_m <= HEIGHT and self.itemsize <= 2
        return small and not self.invariant and block_at_least(self.form.full_rank) <= ranks


@lru_cache
def most_naive(active: int, experts: int, pair_bytes: int) -> int:
    """Return the most pairs of naive assignment; ``pair_bytes``: weights that a pair reads, of both products."""
    most = max(1, active * experts)

    def too_many(pairs: int) -> bool:
        groups = _groups(pairs, most)
        return pairs > NAIVE_MEAN * groups or (pairs - groups) * pair_bytes > NAIVE_BYTES

    return bisect_right(range(1, int(NAIVE_MEAN * most) + 2), False, key=too_many)


def _groups(pairs: int, most: int) -> float:
    return most * (1 - (1 - 1 / most) ** pairs)


def block_size(pairs: int, active: int, experts: int, invariant: bool = False) -> int:
    """Return the rows of a block of the alignment: more than 16 only where every expert has plenty."""
    mean = pairs / max(1, active * experts)
    if invariant or mean < K_STEP:
        return HEIGHT
    return dense.TILE_ROWS[1 if mean < 2 * K_STEP else 2]


def choose_shrink(work: Work) -> Schedule:
    """Choose the schedule of a shrink: GEMV for naive pairs, and for few of a group where K is short."""
    form, quarter = work.form, work.form.hidden / WARPS
    if not work.invariant and (work.naive or (work.mean < ROWS_MEAN and form.hidden <= MOST_SPAN)):
        span, warps = max(LEAST_SPAN, _power_below(quarter, MOST_SPAN)), WARPS
        block_k = span if quarter > span else max(LEAST_SPAN, span // 2)
        if work.naive and form.pairs * form.slices * cdiv(form.hidden, span) >= 2 * PROGRAMS:
            block_k, span, warps = span, 2 * span, 2 if form.slices > 1 else WARPS
        return Schedule(0, HEIGHT, block_k, warps, 1, min(HEIGHT, cdiv(form.hidden, span)))
    narrow, few = work.narrow(HEIGHT), work.invariant or work.mean < HEIGHT
    tiles = form.experts if work.invariant else work.tiles
    splits = SPLITS[-1 if few and (work.invariant or tiles < HEIGHT) else -2]
    if work.expands_rows and tiles >= HEIGHT:
        splits = SPLITS[2]  # every row of a tile reads all partials
    splits = min(splits, max(1, form.hidden // LEAST_SPAN))
    least = min(splits, block_at_least(max(1, form.hidden // MOST_SPAN), 1)) if tiles < PROGRAMS else 1
    split_k, block_k, warps = max(_power_below(PROGRAMS / tiles, splits), least), K_STEP, WARPS
    if narrow and (tiles >= HEIGHT or form.slices == 1):
        warps = 2
    if narrow and few and tiles >= PROGRAMS // WARPS:  # the device is full of tiles
        split_k, block_k = max(split_k, min(2, form.hidden // LEAST_SPAN)), K_STEP // 2
        warps = 1 if tiles * split_k > 2 * PROGRAMS else 2
    stages = NARROW_STAGES if narrow else dense.STAGES // 2
    return Schedule(HEIGHT, min(block_at_least(form.rank), dense.MOST_LANES), block_k, warps, stages, split_k)


def choose_expand(work: Work) -> Schedule:
    form, lanes = work.form, block_at_least(work.form.full_rank)
    if work.expands_rows:
        wide = form.width >= MOST_SPAN
        columns = max(
            dense.WARP_COLUMNS, min(block_at_least(form.width), dense.GEMV_BLOCK // (lanes if wide else 2 * lanes))
        )
        spread = (wide and form.width < GEMV_K) or work.itemsize == 1  # FP8 is upcast in registers
        return Schedule(0, columns, lanes, WARPS if spread else 2)
    columns = min(block_at_least(form.width), dense.COLUMNS[0])
    blocks = work.tiles * form.slices * cdiv(form.width, columns)
    narrow = work.narrow(dense.WARP_LANES) and work.tiles >= HEIGHT and work.itemsize == 2
    two_warps = narrow and form.slices > 1
    steps = _power_below(blocks / (2 * PROGRAMS if two_warps else PROGRAMS), dense.COLUMN_STEPS[-1])
    if narrow and not two_warps and steps >= dense.COLUMN_STEPS[-2]:
        steps, two_warps = dense.COLUMN_STEPS[-2], True
    steps, warps = min(steps, cdiv(form.width, columns)), 2 if two_warps else WARPS
    return Schedule(HEIGHT, columns, min(lanes, K_STEP), warps, dense.COLUMN_STAGES, tiles_n=steps)


def _power_below(number: float, most: int) -> int:
    """Return the largest power of two up to ``number``, at least 1, that no power below ``most`` exceeds."""
    power = 1
    while power < most and 2 * power <= number:
        power *= 2
    return power
