"""Device functions that shrink and expand share: slices, ranks, tiles, matrix products, and PDL.

A *tile* is up to ``BLOCK_M`` rows of one segment (rows of one slot, neighbours in the sorted order). A step lists its
tiles (`punica.metadata.rows`). Tensors from elsewhere come without a list: the grid then holds the worst case
(`max_tiles`, from T and the number of segments alone), and every program searches the segments for its tile.

PDL (programmatic dependent launch, compute capability 9.0 and newer): a kernel may start before its predecessor on the
stream has ended. ``launch_dependents`` lets the dependent kernel start; ``wait`` blocks until the predecessor has ended
and its writes are visible. Waits are outside of pipelined loops: on sm_100 the compiler fails on one inside.
"""

import triton
import triton.language as tl

from punica.ops.triton_ops import launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)
"""`launch.INTERPRETED` as kernels read it."""
INDEX_POINTERS = [
    "mapping_ptr", "sorted_ptr", "counts_ptr", "starts_ptr", "ids_ptr", "tiles_ptr", "totals_ptr", "ranks_ptr",
    "experts_ptr", "enabled_ptr", "map_ptr", "total_ptr",
]  # fmt: skip
"""Arguments whose address may be any multiple of 4: views into one buffer of metadata."""


def max_tiles(tokens: int, segments: int, block_m: int) -> int:
    """Return the most tiles of `tokens` rows in at most `segments` segments: one short tile each, the rest full."""
    segments = min(segments, tokens)
    return segments + (tokens - segments) // block_m


@triton.jit
def pick(values, index, COUNT: tl.constexpr, FIRST: tl.constexpr = 0):
    """Select entry FIRST + `index` (run time, below COUNT) of a tuple; what is known of every entry stays known."""
    chosen = values[FIRST]
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, values[FIRST + i], chosen)
    return chosen


@triton.jit
def column_block(pid_n, SHAPE: tl.constexpr, SPAN: tl.constexpr):
    """Return slice, first column in it, its width and its first column in y, of the pid_n-th run of SPAN columns."""
    # Triton 3.6 passes a field that is a tuple by value, unless it is a constexpr of its own
    WIDTHS: tl.constexpr = SHAPE.widths
    COLUMNS: tl.constexpr = SHAPE.columns
    slice_id = pid_n * 0
    blocks_before = slice_id
    blocks_until = 0
    for i in tl.static_range(SHAPE.slices - 1):
        blocks_until += (WIDTHS[i] + SPAN - 1) // SPAN
        slice_id = tl.where(pid_n >= blocks_until, i + 1, slice_id)
        blocks_before = tl.where(pid_n >= blocks_until, blocks_until, blocks_before)
    first_n = (pid_n - blocks_before) * SPAN
    return slice_id, first_n, pick(WIDTHS, slice_id, SHAPE.slices), pick(COLUMNS, slice_id, SHAPE.slices)


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Allow the dependent kernel to start, once all programs of this one have arrived here or ended.

    Before its own wait the dependent must read nothing that this kernel writes. The same holds for kernels further
    upstream, where this one has not waited itself before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_launch_then_wait(PDL: tl.constexpr):
    """Launch dependents, then wait: the dependent is resident, its weights requested, when a short kernel ends."""
    pdl_launch_dependents(PDL)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_wait_then_launch(PDL: tl.constexpr):
    """Wait, then launch dependents: these may read early what the predecessor of this kernel writes."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    pdl_launch_dependents(PDL)


@triton.jit
def pdl_wait(PDL: tl.constexpr, condition):
    """Wait for the predecessor, if ``condition`` holds.

    One that always holds, of kernel arguments, is opaque to the compiler. The branch keeps it from sinking address
    arithmetic of a whole tile below the wait, where nothing hides it. An idle program passes ``pdl_anchor``: one
    of them must wait, which keeps the chain of kernels transitive.
    """
    if PDL:  # noqa: SIM102 (PDL is decided at compile time)
        if condition:
            tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_wait_or_barrier(PDL: tl.constexpr):
    """Wait for the predecessor, or without PDL at a barrier: all loads above are issued before anything below."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    else:
        tl.debug_barrier()


@triton.jit
def read_old_then_wait(y_ptrs, mask, DTYPE: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Read old y [COLUMNS] in DTYPE, if it is added to: before the PDL wait or, where it is ``late``, after it."""
    old = tl.zeros(mask.shape, DTYPE)
    if SHAPE.add and not TILE.late:
        old = tl.load(y_ptrs, mask=mask, other=0.0).to(DTYPE)
    pdl_launch_dependents(TILE.pdl)
    pdl_wait_or_barrier(TILE.pdl)
    if SHAPE.add and TILE.late:
        old = tl.load(y_ptrs, mask=mask, other=0.0).to(DTYPE)
    return old


@triton.jit
def rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE: tl.constexpr):
    """Return the true rank of the adapter in `slot`, without a table the slot's; 0 for slot -1."""
    if SHAPE.has_ranks:
        rank = tl.minimum(tl.load(ranks_ptr + slice_id * num_slots + slot, mask=slot >= 0, other=0), SHAPE.rank)
    else:
        rank = tl.where(slot >= 0, SHAPE.rank, 0)
    return rank


@triton.jit
def find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr):
    """Return the slot (-1: no such tile), first sorted position and number of rows of tile number `tile`."""
    offs = tl.arange(0, BLOCK_SEGMENTS)
    mask = offs < num_segments
    ids = tl.load(ids_ptr + offs, mask=mask, other=-1)
    counts = tl.load(counts_ptr + offs, mask=mask, other=0)
    tiles = tl.where(ids >= 0, (counts + BLOCK_M - 1) // BLOCK_M, 0)  # [BLOCK_SEGMENTS]
    tiles_until = tl.cumsum(tiles, 0)
    segment = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    tiles_before = tl.max(tl.where(tiles_until <= tile, tiles_until, 0), 0)
    exists = segment < num_segments
    segment = tl.where(exists, segment, 0)
    slot = tl.where(exists, tl.load(ids_ptr + segment), -1)
    done = (tile - tiles_before) * BLOCK_M
    rows = tl.minimum(tl.load(counts_ptr + segment) - done, BLOCK_M)
    return slot, tl.load(starts_ptr + segment) + done, rows


@triton.jit
def read_record(record):
    """Return slot, first sorted position and rows of a tile of `punica.metadata.rows` (of a row: slot, row, 0)."""
    return ((record >> 32) & 0xFFFFFF).to(tl.int32), (record & 0xFFFFFFFF).to(tl.int32), (record >> 56).to(tl.int32)


@triton.jit
def rows_of_tile(sorted_ptr, tile, BLOCK_M: tl.constexpr):
    """Return rows [BLOCK_M] of a tile and which of them exist; the others repeat its first."""
    _, start, num_rows = tile
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    return tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64), mask_m


@triton.jit
def accumulator(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP_AB: tl.constexpr = False):
    """Return zeros for `dot`: [ROWS, COLUMNS], transposed with SWAP_AB."""
    if SWAP_AB:
        zeros = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    return zeros


@triton.jit
def result(acc, SWAP_AB: tl.constexpr):
    """Return the accumulator of `dot` in [ROWS, COLUMNS] order."""
    if SWAP_AB:
        acc = tl.trans(acc)
    return acc


@triton.jit
def dot(a, b, acc, SWAP_AB: tl.constexpr = False):
    """Compute acc + a @ b in float32, a [ROWS, K], b [K, COLUMNS]; float32 operands take IEEE products.

    Every row's result depends on that row of `a` alone, also in the interpreter, whose own product depends on the
    row's position (and multiplies bfloat16 as integers). SWAP_AB: the tensor cores compute the transposed product.
    Rows are then the right operand, as narrow as 8, and the block of weights alone selects the instruction.
    """
    if INTERPRETED:
        products = tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
        if SWAP_AB:
            products = tl.trans(products)
        acc += products
    elif SWAP_AB:
        acc = tl.dot(tl.trans(b), tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def product(a, b, TILE: tl.constexpr):
    """Compute a [ROWS, K] @ b [K, COLUMNS] in float32, as `dot` computes it."""
    acc = accumulator(a.shape[0], b.shape[1], TILE.swap_ab)
    return result(dot(a, b, acc, TILE.swap_ab), TILE.swap_ab)


@triton.jit
def dot_of_shrunk(h, b, acc, DTYPE: tl.constexpr):
    """Compute acc + h @ b for the float32 result `h` of shrink, with products in `DTYPE`. bfloat16's 8 bits would lose
    more of `h` than the sum of the ranks allows: it goes in two parts.
    """
    high = h.to(DTYPE)
    acc = dot(high, b, acc)
    if DTYPE == tl.bfloat16:  # noqa: SIM300 (a type of Triton does not know a constexpr)
        wide = high.to(tl.float32)
        low = tl.where(tl.abs(wide) < float("inf"), h - wide, 0.0)  # of an infinite one nothing is left
        acc = dot(low.to(DTYPE), b, acc)
    return acc


@triton.jit
def read_shrunk(h_ptrs, mask, stride_hp, PARTIALS: tl.constexpr):
    """Sum of the split-K partials at `h_ptrs`, always in ascending order: the same bits every run."""
    total = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        total += tl.load(h_ptrs + partial * stride_hp, mask=mask, other=0.0).to(tl.float32)
    return total
