"""How fused MoE LoRA runs where no tuned file says it: path, forms and blocks from what the host knows of a call.

From probes on an H200 (Qwen3-30B-A3B and Mixtral, T 8 to 128, 1 and 4 adapters, rank 16): two launches with
programmatic dependent launch beat every single-launch form but for tiny A; with one or two pairs per adapter's expert
multiply and sum beats a 16-row tensor-core tile; blocks of 16 pairs beat 32 and 64 even with 32 pairs per expert; K is
split so that a program walks 4 to 8 blocks of 128; expand walks up to 8 blocks of 256 columns.
"""

import math
from typing import Any, NamedTuple

from triton import cdiv

from punica.ops.moe_checks import ExpertForm
from punica.ops.triton_ops.launch import block_at_least

Config = dict[str, Any]

SMALL_BATCH_RANKS = 1024
"""Most pairs x rank of the small-batch path."""
SMALL_BATCH_RANK, ONE_SHOT_RANK = 64, 128
"""Widest ranks of the single-launch paths."""
CHEAP_A = 32 << 10
"""Bytes of one expert's A that programs of one launch may each read again."""
WANTED = 320
"""Programs that occupy the device, a few for each multiprocessor (an H200 has 132)."""


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
        """About how many (adapter, expert) pairs are met, with tokens routed at random."""
        most = max(1, self.active * self.form.experts)
        return most * -math.expm1(-self.form.pairs / most)

    @property
    def mean(self) -> float:
        """Pairs per group."""
        return self.form.pairs / max(1.0, self.groups)


def block_size(pairs: int, active: int, experts: int, invariant: bool = False) -> int:
    """Rows of a block of the alignment: more than 16 only where every expert has plenty."""
    if invariant:
        return 16
    mean = pairs / max(1, active * experts)
    return 16 if mean < 96 else 32 if mean < 256 else 64


def path(work: Work, fully_sharded: bool) -> str:
    """``small_batch``, ``one_shot`` or ``two_stage``."""
    form = work.form
    a_bytes = form.rank * form.hidden * work.itemsize
    if fully_sharded or work.invariant or form.rank > ONE_SHOT_RANK or a_bytes > CHEAP_A:
        return "two_stage"
    if work.naive and form.rank <= SMALL_BATCH_RANK and form.pairs * form.rank <= SMALL_BATCH_RANKS:
        return "small_batch"
    return "one_shot" if work.mean < 4 and form.pairs <= 128 else "two_stage"


def by_rows(work: Work) -> bool:
    """Whether pairs are multiplied one by one."""
    if work.invariant:
        return False
    return work.naive or work.mean < 1.6 or (work.form.pairs <= 64 and work.mean < 3)


def shrink_config(work: Work) -> Config:
    """Keys as in `configs`, and ``group_m``."""
    form, tiles = work.form, max(1.0, work.groups)
    lanes = min(block_at_least(form.rank), 64)
    if by_rows(work):
        block_k = min(block_at_least(form.hidden), 512 if form.factor > 1 or form.hidden > 4096 else 256)
        steps = max(1, _power_below(tiles * form.slices * cdiv(form.hidden, block_k) / (6 * WANTED), 8))
        split_k = min(16, cdiv(form.hidden, block_k * steps))
        return {
            "rows": True, "block_n": min(lanes, 16), "block_k": block_k, "split_k": split_k, "group_m": 1,
            "num_warps": 4, "num_stages": 1,
        }  # fmt: skip
    tiles = form.experts if work.invariant else tiles
    split_k = min(16, _power_near(WANTED / tiles, max(1, cdiv(form.hidden, 1024)), max(1, form.hidden // 512)))
    return {
        "rows": False, "block_n": lanes, "block_k": 128, "split_k": split_k, "group_m": 1, "num_warps": 4,
        "num_stages": 4,
    }  # fmt: skip


def expand_config(work: Work) -> Config:
    """Keys as in `configs`, and ``group_m``."""
    form, tiles, lanes = work.form, max(1.0, work.groups), block_at_least(work.form.rank)
    if by_rows(work) and lanes <= 256:
        block_n = max(32, min(block_at_least(form.width), 8192 // lanes))
        return {
            "rows": True, "block_n": block_n, "block_k": lanes, "tiles_n": 1, "group_m": 1, "num_warps": 4,
            "num_stages": 1,
        }  # fmt: skip
    block_n = min(block_at_least(form.width), 256 if lanes <= 32 else 128)
    columns = cdiv(form.width, block_n)
    tiles_n = min(columns, _power_below(tiles * form.slices * columns / WANTED, 8))
    return {
        "rows": False, "block_n": block_n, "block_k": min(lanes, 128), "tiles_n": tiles_n, "group_m": 1,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


def pick_small_batch_chunk(pair_slices: int, n_tiles: int, sm_count: int) -> int:
    """Column tiles of one work item: as many as leave two items for every multiprocessor."""
    target, total = max(1, 2 * sm_count), pair_slices * n_tiles
    return 1 if total <= target else min(cdiv(total, target), n_tiles)


def one_shot_parts(programs: int, hidden: int, width: int, sm_count: int) -> int:
    """Programs that share a tile's columns: enough to fill the device, but shrinking again is not free."""
    if programs >= 1.5 * sm_count:
        return 1
    wanted = cdiv(2 * sm_count, max(1, programs))
    return max(1, min(wanted, 16, int(1.5 * (hidden + width) / hidden) + 1, width // 128))


def _power_below(number: float, most: int) -> int:
    """The largest power of two up to `most` that is at most `number`, at least 1."""
    power = 1
    while power < most and 2 * power <= number:
        power *= 2
    return power


def _power_near(number: float, least: int, most: int) -> int:
    """`number` within `least` and `most`, as a whole number."""
    return max(1, min(max(least, round(number)), max(least, most)))
