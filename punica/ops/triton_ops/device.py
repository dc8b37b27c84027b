"""Device functions that shrink and expand share: choosing a slice, and finding the rows a program works on.

A *tile* is up to ``BLOCK_M`` rows of one segment (rows of one slot, neighbours in the sorted order). How many tiles a
batch has depends on the segment lengths, which a captured graph must not depend on, so the grid holds the worst case
(``max_tiles`` rows it from T and the number of segments alone) and every program finds its own tile on the device:
``tiles of segment i = ceil(count_i / BLOCK_M)``, and a running sum over the segments says who owns tile ``pid``.
"""

import triton
import triton.language as tl

INDEX_POINTERS = ["mapping_ptr", "sorted_ptr", "counts_ptr", "starts_ptr", "ids_ptr", "ranks_ptr"]
"""Arguments whose address may be any multiple of 4: views into the one buffer of a step's metadata."""


def max_tiles(tokens: int, segments: int, block_m: int) -> int:
    """Most tiles that `tokens` rows in at most `segments` segments can make: one short tile each, the rest full."""
    segments = min(segments, tokens)
    return segments + (tokens - segments) // block_m


@triton.jit
def pick(values, index, COUNT: tl.constexpr):
    """Entry `index` (run time) of the tuple `values`: selects, so what is known about every entry stays known."""
    chosen = values[0]
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """With early launch: the kernel behind may start, once all programs of this one have come here or ended.

    Ahead of its own wait it must read nothing that this kernel writes; or any further in front, where this one has not
    waited itself before it comes here.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_launch_then_wait(PDL: tl.constexpr):
    """With early launch: let the kernel behind start, then wait for the one in front. In this order the one behind is
    there, and has asked for its weights, when a short kernel ends.
    """
    pdl_launch_dependents(PDL)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_wait(PDL: tl.constexpr, always):
    """With early launch: wait for the kernel in front, with everything above done. ``always``: a condition that holds,
    of arguments of the kernel, so that the compiler does not know that it does. Without a branch it moves what needs
    numbers that are still being loaded, the addresses of a whole tile, behind the wait, where nothing hides it.
    """
    if PDL:  # noqa: SIM102 (PDL is decided at compile time)
        if always:
            tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_wait_or_barrier(PDL: tl.constexpr):
    """Everything loaded above is under way before anything below: with PDL that waits for the kernel in front. Without
    a barrier, the compiler spares registers by loading one vector after the other.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    else:
        tl.debug_barrier()


_PREFETCH = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
)


@triton.jit
def prefetch_l2(ptrs, mask):
    """Let the lines of 128 bytes at ``ptrs`` move to the L2 cache; nothing waits for them, and what another kernel
    writes there afterwards is read as it then is. Fewer lines than threads are asked for several times. Not in the
    interpreter.
    """
    addresses, wanted = ptrs.to(tl.int64), mask.to(tl.int32)
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [addresses, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def rank_of(ranks_ptr, slice_id, slot, num_slots, R: tl.constexpr, HAS_RANKS: tl.constexpr):
    """True rank of the adapter in `slot` (R without a table), between 0 and R; 0 for slot -1."""
    if HAS_RANKS:
        rank = tl.minimum(tl.load(ranks_ptr + slice_id * num_slots + slot, mask=slot >= 0, other=0), R)
    else:
        rank = tl.where(slot >= 0, R, 0)
    return rank


@triton.jit
def find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr):
    """Slot (-1: no such tile), first sorted position and number of rows of tile number `tile`."""
    offs = tl.arange(0, BLOCK_SEGMENTS)
    mask = offs < num_segments
    ids = tl.load(ids_ptr + offs, mask=mask, other=-1)
    counts = tl.load(counts_ptr + offs, mask=mask, other=0)
    tiles = tl.where(ids >= 0, (counts + BLOCK_M - 1) // BLOCK_M, 0)
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
    """Slot, first sorted position and number of rows of a tile of `punica.metadata.work` (of a row: slot, row, 0)."""
    return ((record >> 32) & 0xFFFFFF).to(tl.int32), (record & 0xFFFFFFFF).to(tl.int32), (record >> 56).to(tl.int32)


@triton.jit
def accumulator(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP_AB: tl.constexpr):
    """Zeros for `dot`, [ROWS, COLUMNS], or the other way round with SWAP_AB."""
    if SWAP_AB:
        zeros = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    return zeros


@triton.jit
def result(acc, SWAP_AB: tl.constexpr):
    """What `dot` accumulated, [ROWS, COLUMNS]."""
    if SWAP_AB:
        acc = tl.trans(acc)
    return acc


@triton.jit
def dot(a, b, acc, SWAP_AB: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + a @ b in float32, a [ROWS, K], b [K, COLUMNS]; float32 operands take IEEE products. Every row's result
    depends on that row of `a` alone, also in the interpreter, whose own product depends on the row's position (and
    multiplies bfloat16 as integers).

    SWAP_AB: the tensor cores get the product transposed, so that rows are their right operand, which may be as
    narrow as 8, and the instruction is chosen by the block of weights alone.
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
def dot_of_shrunk(h, b, acc, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + h @ b for the float32 `h` that shrink left, [ROWS, R], and a block of B in `DTYPE`, in which they multiply.

    bfloat16's 8 bits would lose more of `h` than the sum of the ranks allows, so it goes in two parts, of 8 bits each.
    """
    high = h.to(DTYPE)
    acc = dot(high, b, acc, False, INTERPRETED)
    if DTYPE == tl.bfloat16:  # noqa: SIM300 (a type of Triton does not know a constexpr)
        wide = high.to(tl.float32)
        low = tl.where(tl.abs(wide) < float("inf"), h - wide, 0.0)  # of an infinite one nothing is left
        acc = dot(low.to(DTYPE), b, acc, False, INTERPRETED)
    return acc


@triton.jit
def read_shrunk(h_ptrs, mask, stride_hp, PARTIALS: tl.constexpr):
    """Sum of the partials that a split shrink left at `h_ptrs`, always in ascending order: the same bits every run."""
    total = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        total += tl.load(h_ptrs + partial * stride_hp, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def read_shrunk_rows(
    h_ptrs, mask, lanes, rank, stride_hp, PARTIALS: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, lanes] of what shrink left, in DTYPE. Unless WHOLE `mask` reaches beyond the rank, to the end of a vector,
    and what lies there is dropped.
    """
    h = read_shrunk(h_ptrs, mask, stride_hp, PARTIALS)
    if not WHOLE:
        h = tl.where((lanes < rank)[None, :], h, 0.0)
    return h.to(DTYPE)
