"""Device functions of fused MoE LoRA: which slot, expert and pairs a program works on.

A *tile* is a block of the alignment, up to BLOCK_M pairs of one (slot, expert); naive, it is one pair. How many tiles
there are is known on the device alone: every slot has ``counts / BLOCK_M`` of them, and a running sum over the slots
tells which slot owns tile number ``tile``. So tiles are numbered without gaps, however far apart their slots lie in the
alignment, and a grid need not cover the worst case of every slot: programs go on while there are tiles.
"""

import triton
import triton.language as tl

INDEX_POINTERS = ["sorted_ptr", "experts_ptr", "counts_ptr", "mapping_ptr", "enabled_ptr", "ids_ptr", "ranks_ptr"]
"""Arguments whose address may be any multiple of 4."""


@triton.jit
def slot_table(
    counts_ptr, enabled_ptr, ids_ptr, pairs, padded, num_slots,
    BLOCK_M: tl.constexpr, BLOCK_SLOTS: tl.constexpr, NAIVE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Slots in the order of their tiles, the number of tiles up to and with each, and of all."""
    places = tl.arange(0, BLOCK_SLOTS)
    if HAS_IDS:
        slots = tl.load(ids_ptr + places, mask=places <= num_slots, other=-1)
    else:
        slots = places
    here = (slots >= 0) & (slots < num_slots)
    slots = tl.where(here, slots, 0)
    if NAIVE:
        until = tl.zeros([BLOCK_SLOTS], tl.int32)
        total = pairs
    else:
        enabled = tl.load(enabled_ptr + slots, mask=here, other=0) != 0
        counts = tl.load(counts_ptr + slots, mask=here, other=0)  # beside the other load, not behind it
        tiles = tl.where(enabled, tl.minimum(tl.maximum(counts, 0), padded) // BLOCK_M, 0)
        until = tl.cumsum(tiles, 0)
        total = tl.sum(tiles, 0)
    return slots, until, total


@triton.jit
def find_tile(
    tile, slots, until, sorted_ptr, experts_ptr, mapping_ptr, enabled_ptr,
    top_k, padded, blocks, num_slots, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_SLOTS: tl.constexpr, NAIVE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Slot (-1: nothing to do), expert, and where in the sorted pairs the tile begins (naive: the pair itself)."""
    if NAIVE:
        slot = tl.load(mapping_ptr + tile // top_k)
        expert = tl.load(experts_ptr + tile)
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)  # of 64 bits it may be
        here = (slot >= 0) & (slot < num_slots)
        here = here & (tl.load(enabled_ptr + tl.where(here, slot, 0)) != 0)
        first = tile.to(tl.int64)
    else:
        place = tl.sum((until <= tile).to(tl.int32), 0)
        block = tile - tl.max(tl.where(until <= tile, until, 0), 0)
        slot = place
        if HAS_IDS:
            slot = tl.sum(tl.where(tl.arange(0, BLOCK_SLOTS) == place, slots, 0), 0)
        expert = tl.load(experts_ptr + slot.to(tl.int64) * blocks + block)
        here = slot < num_slots
        first = slot.to(tl.int64) * padded + block * BLOCK_M
    here = here & (expert >= 0) & (expert < num_experts)
    return tl.where(here, slot, -1), expert, first


@triton.jit
def pairs_of(first, sorted_ptr, pairs, BLOCK_M: tl.constexpr, NAIVE: tl.constexpr):
    """Pairs of a tile and which lanes hold one, [BLOCK_M]."""
    lanes = tl.arange(0, BLOCK_M)
    if NAIVE:
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
def first_pair(first, sorted_ptr, pairs, BLOCK_M: tl.constexpr, NAIVE: tl.constexpr):
    """A tile's first pair, and how many pairs it has. Both are loaded at once."""
    pair = pair_at(first, 0, sorted_ptr, NAIVE)
    _, valid = pairs_of(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
    return pair, tl.sum(valid.to(tl.int32), 0)


@triton.jit
def program_place(pid, num_tiles, PER_TILE: tl.constexpr, GROUP_M: tl.constexpr):
    """First tile and part of a tile of program ``pid``: parts of a tile are neighbours, or GROUP_M tiles share one."""
    if GROUP_M == 1:
        tile, part = pid // PER_TILE, pid % PER_TILE
    else:
        group = pid // (GROUP_M * PER_TILE)
        inside = pid % (GROUP_M * PER_TILE)
        members = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
        tile, part = group * GROUP_M + inside % members, inside // members
    return tile, part
