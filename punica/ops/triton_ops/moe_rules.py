"""Schedules of fused MoE LoRA where no tuned file has one: forms and blocks from a call's sizes.

From a search on an H200 (Qwen3-30B-A3B and Mixtral, T 1 to 128, 1 to 16 adapters, rank 16; times in
results/h200/operator_tables.md):

* Pairs are aligned only if an (adapter, expert) group has several, or redundant weight reads would dominate. The
  alignment costs 3 to 9 us, and each kernel two dependent loads before it knows its tile.
* With one or two pairs per group multiply and sum beats a 16-row tensor-core tile; blocks of 16 pairs beat 32 and 64
  even with 32 pairs per expert.
* K and columns are cut into `PROGRAMS` programs, and no further: each cut costs partial sums, or another search for the
  tile. Where tiles alone are more, small blocks of few warps let all of them run at once.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Any, NamedTuple

from triton import cdiv

from punica.ops.experts import ExpertForm
from punica.ops.triton_ops.launch import block_at_least

Config = dict[str, Any]

HEIGHT = 16
"""Rows, and ranks, of the smallest tensor-core product; also the most K splits."""
BLOCK = 128
"""Columns of an expand's block, and elements of K of a shrink's: 256 bytes of a row, eight lines of the L2 cache."""
PROGRAMS = 320
"""Programs whose loads occupy the memory of an H200: 2.4 for each of its 132 multiprocessors."""
LEAST_SPAN, MOST_SPAN = 2 * BLOCK, 1024
"""Elements of K of one program: partial sums dominate below, a long chain of loads above."""
ROW_WEIGHTS = 4096
"""Weights of B of a program by rows, in registers: 64 for each thread of two warps. Of wide outputs twice as many."""
NAIVE_BYTES, NAIVE_MEAN = 40_000_000, 2.5
"""Limits of naive assignment: redundant weight reads in bytes (from the 50 MB of L2 cache), and pairs per group."""
ROWS_MEAN = 1.6
"""Pairs per group of one slice up to which multiply and sum, a row at a time, beats a block of 16 rows."""
STAGES, NARROW_STAGES = 4, 6
"""Blocks in flight of a pipelined loop: of narrow ones, a quarter of the bytes, more."""
WARPS = 4
"""Warps whose registers hold a block of a product of more than 16 ranks; of narrow ones two or one are enough."""
MOST_SUMMED = 4
"""Partials that an expand by rows sums: every row of a tile reads them all."""


class Work(NamedTuple):
    """Problem size of a fused MoE LoRA call. ``active``: adapters in use, as far as the host knows. ``invariant``: one
    form and split for all batches, so that a pair has the same bits in all of them.
    """

    form: ExpertForm
    naive: bool
    active: int
    itemsize: int
    invariant: bool = False

    @property
    def groups(self) -> float:
        """Expected number of (adapter, expert) groups."""
        return _groups(self.form.pairs, max(1, self.active * self.form.experts))

    @property
    def mean(self) -> float:
        """Pairs per group."""
        return self.form.pairs / max(1.0, self.groups)

    @property
    def tiles(self) -> float:
        """Expected number of tiles."""
        if self.naive:
            return self.form.pairs
        return max(1.0, self.groups, self.form.pairs / max(HEIGHT, self.form.block_m))

    def narrow(self, ranks: int) -> bool:
        """Tell whether two warps suffice for products of ``ranks``: small blocks of few bytes."""
        small = self.form.block_m <= HEIGHT and self.itemsize <= 2
        return small and not self.invariant and block_at_least(self.form.full_rank) <= ranks


@lru_cache
def most_naive(active: int, experts: int, pair_bytes: int) -> int:
    """Most pairs of naive assignment; ``pair_bytes``: weights that a pair reads, of both products."""
    most = max(1, active * experts)

    def too_many(pairs: int) -> bool:
        groups = _groups(pairs, most)
        return pairs > NAIVE_MEAN * groups or (pairs - groups) * pair_bytes > NAIVE_BYTES

    return bisect_right(range(1, int(NAIVE_MEAN * most) + 2), False, key=too_many)


def _groups(pairs: int, most: int) -> float:
    """Expected number of ``most`` (adapter, expert) groups that have a pair, with tokens routed at random."""
    return most * (1 - (1 - 1 / most) ** pairs)


def block_size(pairs: int, active: int, experts: int, invariant: bool = False) -> int:
    """Rows of a block of the alignment: more than 16 only where every expert has plenty."""
    mean = pairs / max(1, active * experts)
    if invariant or mean < BLOCK:
        return HEIGHT
    return 2 * HEIGHT if mean < 2 * BLOCK else BLOCK // 2


def shrinks_by_rows(work: Work) -> bool:
    """Tell whether shrink multiplies pairs one by one; with several pairs of a tile, only where K is short."""
    return not work.invariant and (work.naive or (work.mean < ROWS_MEAN and work.form.hidden <= MOST_SPAN))


def expands_by_rows(work: Work) -> bool:
    """Tell whether expand multiplies pairs one by one; wide ranks do not fit the registers then."""
    few = work.naive or work.mean < ROWS_MEAN * work.form.slices  # a second slice: twice the programs
    return few and not work.invariant and block_at_least(work.form.full_rank) <= 2 * BLOCK


def shrink_config(work: Work) -> Config:
    """Keys as in `configs`."""
    return _shrink_of_rows(work) if shrinks_by_rows(work) else _shrink_of_tiles(work)


def _shrink_of_rows(work: Work) -> Config:
    """A quarter of K per program, in one or two steps; half of it where programs are too many."""
    form = work.form
    span = max(LEAST_SPAN, _power_below(form.hidden / 2 / 2, MOST_SPAN))
    many = work.naive and form.pairs * form.slices * cdiv(form.hidden, span) >= 2 * PROGRAMS
    block_k = span if form.hidden > 2 * 2 * span else max(LEAST_SPAN, span // 2)
    if many:
        span, block_k = 2 * span, min(2 * block_k, span)
    return {
        "rows": True, "block_n": min(block_at_least(form.rank), HEIGHT), "block_k": block_k,
        "split_k": min(HEIGHT, cdiv(form.hidden, span)),
        "num_warps": 2 if many and form.slices > 1 else WARPS, "num_stages": 1,
    }  # fmt: skip


def _shrink_of_tiles(work: Work) -> Config:
    """K splits that fill the device, of `LEAST_SPAN` to `MOST_SPAN` elements where tiles are few."""
    form, narrow = work.form, work.narrow(HEIGHT)
    tiles = form.experts if work.invariant else work.tiles
    few = work.invariant or work.mean < HEIGHT
    deep = work.invariant or (few and tiles < HEIGHT)
    most = min(HEIGHT if deep else HEIGHT // 2, max(1, form.hidden // LEAST_SPAN))
    if expands_by_rows(work) and tiles >= HEIGHT:
        most = min(most, MOST_SUMMED)
    least = min(most, block_at_least(max(1, form.hidden // MOST_SPAN), 1)) if tiles < PROGRAMS else 1
    split_k = max(_power_below(PROGRAMS / tiles, most), least)
    many = narrow and few and tiles >= PROGRAMS // 2 // 2
    if many:  # the device is full of tiles: small blocks, so that all run at once
        split_k = max(split_k, min(2, form.hidden // LEAST_SPAN))
    two = narrow and (tiles >= HEIGHT or form.slices == 1)
    warps = WARPS if not two else 1 if many and tiles * split_k > 2 * PROGRAMS else 2
    return {
        "rows": False, "block_n": min(block_at_least(form.rank), BLOCK // 2),
        "block_k": BLOCK // 2 if many else BLOCK, "split_k": split_k, "num_warps": warps,
        "num_stages": NARROW_STAGES if narrow else STAGES,
    }  # fmt: skip


def expand_config(work: Work) -> Config:
    """Keys as in `configs`."""
    form, lanes = work.form, block_at_least(work.form.full_rank)
    if expands_by_rows(work):
        wide = form.width >= MOST_SPAN
        block_n = max(2 * HEIGHT, min(block_at_least(form.width), (2 if wide else 1) * ROW_WEIGHTS // lanes))
        spread = (wide and form.width < ROW_WEIGHTS) or work.itemsize == 1  # FP8 is upcast in registers
        return {
            "rows": True, "block_n": block_n, "block_k": lanes, "tiles_n": 1,
            "num_warps": WARPS if spread else 2, "num_stages": 1,
        }  # fmt: skip
    block_n = min(block_at_least(form.width), BLOCK)
    blocks = work.tiles * form.slices * cdiv(form.width, block_n)
    narrow = work.narrow(2 * HEIGHT) and work.tiles >= HEIGHT and work.itemsize == 2
    two_warps = narrow and form.slices > 1
    tiles_n = _power_below(blocks / (2 * PROGRAMS if two_warps else PROGRAMS), HEIGHT)
    if narrow and not two_warps and tiles_n >= HEIGHT // 2:
        tiles_n, two_warps = HEIGHT // 2, True
    return {
        "rows": False, "block_n": block_n, "block_k": min(lanes, BLOCK),
        "tiles_n": min(tiles_n, cdiv(form.width, block_n)), "num_warps": 2 if two_warps else WARPS,
        "num_stages": STAGES - 1,
    }  # fmt: skip


def _power_below(number: float, most: int) -> int:
    """The largest power of two up to `most` that is at most `number`, at least 1."""
    power = 1
    while power < most and 2 * power <= number:
        power *= 2
    return power
