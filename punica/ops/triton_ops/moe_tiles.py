"""Device functions of fused MoE LoRA: slot, expert, pairs and true rank of a tile.

A *tile* is a block of the alignment, up to ``block_m`` pairs of one (slot, expert); naive, it is one pair. Their
number is known on the device only: every slot has ``counts / block_m``, and a running sum over the slots finds the slot
of tile number ``tile``, numbered without gaps. Programs loop while there are tiles: a grid may be below the worst case.
"""

from typing import NamedTuple

import triton
import triton.language as tl

COUNTS = ["pairs", "num_tiles", "padded", "blocks"]
"""Arguments that differ from step to step: kernels are not specialised on them."""


class Pairs(NamedTuple):
    """Assignment of pairs to slots and experts. naive: every pair is a tile. num_ids: length of the list of slots in
    use (-1: no list, all slots). block_slots: power of two >= that many slots.
    """

    top_k: int
    slots: int
    experts: int
    block_m: int
    block_slots: int
    naive: bool
    num_ids: int


@triton.jit
def slot_table(counts_ptr, enabled_ptr, ids_ptr, pairs, padded, PAIRS: tl.constexpr):
    """Slots in the order of their tiles, running sum of their tiles (both [block_slots]), and the number of tiles."""
    places = tl.arange(0, PAIRS.block_slots)
    if PAIRS.num_ids >= 0:
        slots = tl.load(ids_ptr + places, mask=places < PAIRS.num_ids, other=-1)
    else:
        slots = places
    here = (slots >= 0) & (slots < PAIRS.slots)
    slots = tl.where(here, slots, 0)
    if PAIRS.naive:
        until = tl.zeros_like(places)
        total = pairs
    else:
        enabled = tl.load(enabled_ptr + slots, mask=here, other=0) != 0
        counts = tl.load(counts_ptr + slots, mask=here, other=0)  # issued beside the other load
        tiles = tl.where(enabled, tl.minimum(tl.maximum(counts, 0), padded) // PAIRS.block_m, 0)
        until = tl.cumsum(tiles, 0)
        total = tl.sum(tiles, 0)
    return slots, until, total


@triton.jit
def find_tile(tile, table, where, padded, blocks, PAIRS: tl.constexpr):
    """Slot of a tile (-1: nothing to do), number of its expert's weights, place of its first
    pair in the sorted pairs (naive: the pair), and ``owner``, for `rank_of`: place of its slot in the table, and that.

    ``table``: of `slot_table`. ``where``: expert of every block (naive: pair), slot of every token, enabled slots.
    """
    experts_ptr, mapping_ptr, enabled_ptr = where
    slots, until, total = table
    found = tile < total
    if PAIRS.naive:
        slot = tl.load(mapping_ptr + tile // PAIRS.top_k, mask=found, other=-1)
        expert = tl.load(experts_ptr + tile, mask=found, other=-1)
        expert = tl.where((expert >= 0) & (expert < PAIRS.experts), expert, -1).to(tl.int32)  # of 64 bits it may be
        here = (slot >= 0) & (slot < PAIRS.slots)
        place = tl.where(here, slot, 0)
        here = here & (tl.load(enabled_ptr + place) != 0)
        first = tile.to(tl.int64)
    else:
        place = tl.sum((until <= tile).to(tl.int32), 0)
        block = tile - tl.max(tl.where(until <= tile, until, 0), 0)
        slot = place
        if PAIRS.num_ids >= 0:
            slot = tl.sum(tl.where(tl.arange(0, PAIRS.block_slots) == place, slots, 0), 0)
        expert = tl.load(experts_ptr + slot.to(tl.int64) * blocks + block, mask=found, other=-1)
        here = slot < PAIRS.slots
        first = slot.to(tl.int64) * padded + block * PAIRS.block_m
    here = here & (expert >= 0) & (expert < PAIRS.experts)
    slot = tl.where(here, slot, -1)
    return slot, slot.to(tl.int64) * PAIRS.experts + expert, first, (place, slots)


@triton.jit
def pairs_of(first, sorted_ptr, pairs, PAIRS: tl.constexpr):
    """Pairs of a tile and the lanes that hold one, [block_m]."""
    lanes = tl.arange(0, PAIRS.block_m)
    if PAIRS.naive:
        found = tl.where(lanes == 0, first, pairs).to(tl.int32)
    else:
        found = tl.load(sorted_ptr + first + lanes)
    valid = (found >= 0) & (found < pairs)
    return tl.where(valid, found, 0).to(tl.int64), valid


@triton.jit
def pair_at(first, lane, sorted_ptr, NAIVE: tl.constexpr):
    """The pair in one lane of a tile."""
    if NAIVE:
        pair = first + lane
    else:
        pair = tl.load(sorted_ptr + first + lane).to(tl.int64)
    return pair


@triton.jit
def first_pair(first, sorted_ptr, pairs, PAIRS: tl.constexpr):
    """A tile's first pair and its number of pairs. Both are loaded at once."""
    pair = pair_at(first, 0, sorted_ptr, PAIRS.naive)
    _, valid = pairs_of(first, sorted_ptr, pairs, PAIRS)
    return pair, tl.sum(valid.to(tl.int32), 0)


@triton.jit
def rank_of(ranks_ptr, slice_id, owner, SHAPE: tl.constexpr):
    """Number of the ranks from first_rank to first_rank + rank that a tile's adapter has; all without a table."""
    place, slots = owner
    PAIRS: tl.constexpr = SHAPE.pairs
    if SHAPE.has_ranks:
        if PAIRS.naive:
            rank = tl.load(ranks_ptr + slice_id * PAIRS.slots + place)
        else:
            ranks = tl.load(ranks_ptr + slice_id * PAIRS.slots + slots)
            rank = tl.sum(tl.where(tl.arange(0, PAIRS.block_slots) == place, ranks, 0), 0)
        rank = tl.minimum(tl.maximum(rank - SHAPE.first_rank, 0), SHAPE.rank)
    else:
        rank = tl.full([], SHAPE.rank, tl.int32)
    return rank


@triton.jit
def ranks_read(rank, SHAPE: tl.constexpr):
    """Number of ranks to load. Slots of up to 16 are read whole, without waiting for the table; of others ``rank``
    rounded up to a vector, visibly to the compiler. `live` drops the rest.
    """
    if SHAPE.rank <= 16:
        read = tl.full([], SHAPE.rank, tl.int32)
    else:
        read = (rank + (SHAPE.vector - 1)) // SHAPE.vector * SHAPE.vector
    return read


@triton.jit
def live(values, offs_r, rank, SHAPE: tl.constexpr):
    """``values`` with zeros beyond the rank."""
    if SHAPE.has_ranks:
        values = tl.where(offs_r < rank, values, 0.0)
    return values
