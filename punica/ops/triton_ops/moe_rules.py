"""Schedules of fused MoE LoRA where no tuned file has one: forms and blocks from what the host knows of a call.

From a search on an H200 (Qwen3-30B-A3B and Mixtral, T 1 to 128, 1 to 16 adapters, rank 16; what they take with this
rule is in results/h200/operator_tables.md):

* Pairs of one adapter's expert are grouped only where they are several, or each by itself would read much again: the
  alignment costs 3 to 9 us, and each kernel two loads behind one another before it knows its tile.
* With one or two pairs per adapter's expert multiply and sum beats a 16-row tensor-core tile; blocks of 16 pairs beat
  32 and 64 even with 32 pairs per expert.
* K is split so that a program walks about 4 blocks of 128, or where tiles are many, in two; expand walks so many column
  blocks that 400 programs are left, or, where tiles of gate and up are many, 700 of two warps.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Any, NamedTuple

from triton import cdiv

from punica.ops.moe_checks import ExpertForm
from punica.ops.triton_ops.launch import block_at_least

Config = dict[str, Any]

ALONE_BYTES, ALONE_MEAN = 40_000_000, 2.5
"""Most bytes of weights that pairs by themselves read again, from the L2 cache then, and most pairs per group."""
MANY_PROGRAMS = 700
"""Programs of a shrink by rows beyond which K is split in fewer parts."""
MANY_TILES = 64
"""Tiles of a shrink that occupy the device even if only one or two warps work on each."""
WANTED, WANTED_EXPAND, WANTED_TWO_WARPS = 320, 400, 700
"""Programs that occupy the device, a few for each multiprocessor (an H200 has 132): of a shrink, of an expand, and of
one of two warps.
"""


class Work(NamedTuple):
    """What of a call decides how it runs. ``active``: adapters in use, as far as the host knows. ``invariant``: one
    form and one split whatever the batch is, so that a pair has the same bits in all of them.
    """

    form: ExpertForm
    naive: bool
    active: int
    itemsize: int
    invariant: bool = False

    @property
    def groups(self) -> float:
        """About how many (adapter, expert) pairs are met."""
        return _groups(self.form.pairs, max(1, self.active * self.form.experts))

    @property
    def mean(self) -> float:
        """Pairs per group."""
        return self.form.pairs / max(1.0, self.groups)

    @property
    def tiles(self) -> float:
        """About how many tiles that makes."""
        if self.naive:
            return self.form.pairs
        return max(1.0, self.groups, self.form.pairs / max(16, self.form.block_m))

    @property
    def small_blocks(self) -> bool:
        """Whether tiles have at most 16 pairs and may take whatever form suits the batch."""
        return self.form.block_m <= 16 and not self.invariant


@lru_cache(maxsize=1024)
def most_alone(active: int, experts: int, pair_bytes: int) -> int:
    """The most pairs that go by themselves (naive) rather than grouped; ``pair_bytes``: weights that one reads, of both
    products.
    """
    most = max(1, active * experts)

    def too_many(pairs: int) -> bool:
        groups = _groups(pairs, most)
        return pairs > ALONE_MEAN * groups or (pairs - groups) * pair_bytes > ALONE_BYTES

    return bisect_right(range(1, 3 * most + 2), False, key=too_many)


def _groups(pairs: int, most: int) -> float:
    """Of ``most`` (adapter, expert) pairs how many are met on average, with tokens routed at random."""
    return most * (1 - (1 - 1 / most) ** pairs)


def block_size(pairs: int, active: int, experts: int, invariant: bool = False) -> int:
    """Rows of a block of the alignment: more than 16 only where every expert has plenty."""
    if invariant:
        return 16
    mean = pairs / max(1, active * experts)
    return 16 if mean < 96 else 32 if mean < 256 else 64


def shrinks_by_rows(work: Work) -> bool:
    """Whether shrink multiplies pairs one by one."""
    few = work.form.pairs <= 64 or work.form.hidden <= 1024
    return not work.invariant and (work.naive or (work.mean < 1.6 and few))


def expands_by_rows(work: Work) -> bool:
    """Whether expand multiplies pairs one by one; wide ranks do not fit the registers then."""
    few = work.mean < 3 and work.groups >= 24 and work.form.slices > 1
    alone = work.naive or work.mean < 1.6 or few
    return alone and not work.invariant and block_at_least(work.form.full_rank) <= 256


def shrink_config(work: Work) -> Config:
    """Keys as in `configs`, and ``group_m``."""
    if shrinks_by_rows(work):
        return _shrink_of_rows(work)
    lanes = min(block_at_least(work.form.rank), 64)
    narrow = lanes <= 16 and work.itemsize <= 2 and work.small_blocks
    if narrow and work.tiles >= MANY_TILES and work.mean < 12:
        return _shrink_of_many_tiles(work)
    return _shrink_of_tiles(work, lanes, narrow)


def _shrink_of_rows(work: Work) -> Config:
    form = work.form
    most_k = 256 if form.hidden <= 2048 else 512 if form.hidden <= 4096 and work.naive else 1024
    block_k, warps = min(block_at_least(form.hidden), most_k), 4
    steps = 2 if block_k <= 512 and form.hidden > 1024 else 1
    split_k = min(16, cdiv(form.hidden, block_k * steps))
    if work.naive and form.pairs * form.slices * split_k >= MANY_PROGRAMS:  # longer sums of each, and fewer partials
        split_k = 1 if form.hidden <= 1024 else cdiv(split_k, 2)
        if 1024 < form.hidden <= 2048:
            block_k, warps = 2 * block_k, 2
    return {
        "rows": True, "block_n": min(block_at_least(form.rank), 16), "block_k": block_k, "split_k": split_k,
        "group_m": 1, "num_warps": warps, "num_stages": 1,
    }  # fmt: skip


def _shrink_of_tiles(work: Work, lanes: int, narrow: bool) -> Config:
    """``lanes``: ranks of a block. ``narrow``: a product of 16 x 16 is no more than two warps' work."""
    form = work.form
    tiles = form.experts if work.invariant else work.tiles
    most = min(16 if work.invariant or work.mean < 12 else 8, max(1, form.hidden // 384))
    least = min(most, block_at_least(max(1, form.hidden // 1024), 1)) if tiles < 256 else 1
    split_k = max(_power_below(WANTED / tiles, most), least)
    block_k, stages, warps = (256, 3, 4) if form.hidden <= 1024 else (128, 4, 4)
    if expands_by_rows(work):
        split_k = min(split_k, 4)  # each row of a tile sums the partials
    elif narrow and work.itemsize == 2 and form.slices > 1 and tiles >= 16:
        warps = 2
    if narrow and form.slices == 1 and form.hidden > 1024:
        stages, warps = 6, 2
        split_k = split_k if tiles < 16 else min(split_k, 8)
    return {
        "rows": False, "block_n": lanes, "block_k": block_k, "split_k": split_k, "group_m": 1, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip


def _shrink_of_many_tiles(work: Work) -> Config:
    """Of up to 16 ranks, where tiles of few pairs alone occupy the device: a product of 16 columns is one or two warps'
    work, and small blocks let all programs be there at once.
    """
    joined, hidden = work.form.slices > 1, work.form.hidden
    block_k, stages = (64, 6) if joined else (128, 4)
    split_k = 2 if work.tiles >= 256 else min(16, block_at_least(max(2, hidden // 1024), 1))
    return {
        "rows": False, "block_n": 16, "block_k": block_k, "split_k": split_k if hidden > 4 * block_k else 1,
        "group_m": 1, "num_warps": 2 if joined and work.tiles < 192 else 1, "num_stages": stages,
    }  # fmt: skip


def expand_config(work: Work) -> Config:
    """Keys as in `configs`, and ``group_m``."""
    form, lanes = work.form, block_at_least(work.form.full_rank)
    if expands_by_rows(work):
        block_n = max(32, min(block_at_least(form.width), (8192 if form.width >= 1024 else 4096) // lanes))
        spread = 1024 <= form.width < 4096 or work.itemsize == 1  # FP8 is made wide in registers
        return {
            "rows": True, "block_n": block_n, "block_k": lanes, "tiles_n": 1, "group_m": 1,
            "num_warps": 4 if spread else 2, "num_stages": 1,
        }  # fmt: skip
    blocks = work.tiles * form.slices * cdiv(form.width, 128)
    small = lanes <= 32 and work.itemsize == 2 and work.small_blocks
    many = small and form.slices > 1 and work.tiles >= 16
    tiles_n, block_n = _power_below(blocks / (WANTED_TWO_WARPS if many else WANTED_EXPAND), 16), 128
    warps = 2 if many else 4
    if small and form.slices == 1 and tiles_n >= 8:
        tiles_n, warps = 8, 2
    if lanes <= 32 and not work.invariant and form.slices == 1 and tiles_n == 1 and blocks > 240:
        block_n = 256
    block_n = min(block_at_least(form.width), block_n)
    return {
        "rows": False, "block_n": block_n, "block_k": min(lanes, 128),
        "tiles_n": min(tiles_n, cdiv(form.width, block_n)), "group_m": 1, "num_warps": warps, "num_stages": 3,
    }  # fmt: skip


def _power_below(number: float, most: int) -> int:
    """The largest power of two up to `most` that is at most `number`, at least 1."""
    power = 1
    while power < most and 2 * power <= number:
        power *= 2
    return power
