"""Schedules of shrink and expand: candidates, an estimate of their time, and the choice between them.

A schedule is a frozen set of block sizes. For a problem there are ten to thirty candidates; the one with the least
estimated time is taken, unless a measurement for this GPU says otherwise (`punica.ops.triton_ops.tuned`).

The estimate adds what the programs of one multiprocessor need: a start for each program and each round of them, and
the longer of three times: its bytes at the rate at which a multiprocessor reads from the L2 cache, its loop steps one
after the other, and the unique bytes of the whole launch at the rate of the memory. `Gpu` holds what depends on the
device. The nine constants below were fitted together on an H200 (2026-11-26), to the times of about 20 candidates per
product of 188 operators in 16 bits and 53 in FP8. The choice is within 5 % of the best candidate on the geometric mean,
for each product and weight format (worst: 1.65 for a shrink, 1.41 for an expand). No constant depends on an operator.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from triton import cdiv

from punica.metadata import StepShape
from punica.ops.triton_ops.launch import block_at_least, shared_memory

# --- what is scheduled -----------------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """Block sizes of one launch.

    block_m: rows of a tile; 0 for GEMV, one row per program without tensor cores.
    block_n, block_k: shrink: ranks and elements of K at once; expand: columns and ranks at once.
    split_k: parts of K in programs of their own (shrink). tiles_n: column blocks of a program (expand).
    swap_ab: weights are the left operand of the tensor cores.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1
    split_k: int = 1
    tiles_n: int = 1
    swap_ab: bool = False


class Problem(NamedTuple):
    """What decides the schedules of a LoRA product: the step's shape, and shape and storage of the weights.

    k: elements of x (0: an expand alone); widths: columns of every slice; rank: of the slots; element: bytes of
    a weight; by_rows: B is stored row by row (else rank after rank); invariant: a row has the same bits in every batch.
    """

    shape: StepShape
    rows: int
    k: int
    widths: tuple[int, ...]
    rank: int
    element: int = 2
    by_rows: bool = False
    invariant: bool = False

    @property
    def has_segments(self) -> bool:
        """Whether some adapter has several rows, which a tile can share."""
        return self.rows > 1 and self.shape.longest > 1


class Gpu(NamedTuple):
    """Multiprocessors, bytes of shared memory that a program may use, and bytes per microsecond of the memory."""

    multiprocessors: int = 132
    shared_memory: int = 227 << 10
    memory: float = 4.25e6

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU ``device``; an H200 where there is none to ask."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls()
        properties = torch.cuda.get_device_properties(device)
        clock, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        memory = REACHED * 2 * clock * 1e3 * bits / 8 / 1e6 if clock and bits else cls._field_defaults["memory"]
        return cls(properties.multi_processor_count, shared_memory(device), memory)


REACHED = 0.87
"""Part of the memory's peak rate that a copy reaches (H200: 4.25 of 4.9 TB/s)."""
SM_RATE = 75.1e3
"""Bytes per microsecond that one multiprocessor reads from the L2 cache."""
ROUND, PROGRAM = 0.74, 0.0531
"""Microseconds to start a round of programs, and each program of a multiprocessor."""
REGISTERS = 79.1e3
"""Bytes of weights under way at once in the registers of a multiprocessor, in GEMV."""
SHRINK_STEP, EXPAND_STEP = 0.332, 0.459
"""Microseconds of a loop step whose loads are under way: 128 elements of K; one block of columns."""
SHRINK_MMA = 10.7e3
"""Rows x ranks per microsecond of one such step on the tensor cores, in tiles too low for instructions of 64 rows."""
EXPAND_MMA, EPILOGUE = 1.89e6, 250
"""Rows x columns x ranks per microsecond, and ranks that reading, adding and storing an output element is worth."""
TRUE_RANK = 16
"""Rank up to which slots are expected to be filled."""
WARPGROUP_ROWS = 64
READER_COLUMNS = 512
"""Columns of one expand program, about, which reads the partial sums of its rows once."""
MOST_WARPS, MOST_PROGRAMS = 64, 32
"""Of a multiprocessor."""

# --- candidates ------------------------------------------------------------------------------------------------------

TILE_ROWS = (16, 32, 64)
K_STEP, GEMV_K = 128, 4096
"""Elements of K at once: of a GEMM step, and of a GEMV program (of which K is split into several)."""
GEMV_RANKS, SPLITS = (2, 4, 8, 16), (1, 2, 4, 8, 16)
MOST_LANES, GEMV_LANES = 64, (16, 64)
"""Ranks of a tile of shrink, and of a GEMV step of expand: few for what adapters of low rank need, many at once."""
LEAST_K = 448
"""Elements of K for each split, at least."""
GEMV_COLUMNS, GEMV_BLOCK = (64, 128, 256, 512), 8192
"""Columns of a GEMV program of expand, and the elements of B that it holds at most."""
COLUMN_BLOCKS = ((128, 4), (256, 8))
"""Columns of a tile of expand, and its warps."""
WORD_BLOCKS = {16: (128, 256), 32: (256,)}
"""Rows and columns of tiles of expand that read FP8 in words."""
WORD_LANES = 128
COLUMN_STEPS = (1, 4, 8, 16)
STAGES, STAGES_HIGH, STAGES_FP8, STAGES_COLUMNS = 5, 4, 8, 3
"""Depth of a pipeline: tiles up to 32 rows, of 64 rows, in FP8 (whose stages are half as large), over columns."""
FLAT_ROWS, WARP_LANES = (8, 16), 32
"""Heights of batch-invariant tiles, and ranks up to which their heights are free."""
INVARIANT_K = 722
"""Elements of K for each split of batch-invariant shrinks."""
WARP_ELEMENTS = 2048
"""Weights of a GEMV warp of shrink."""
WIDE_RANKS = 256
"""Ranks of B that a tile of expand multiplies in one pass, at most."""


def shrink_schedules(problem: Problem) -> Iterator[Schedule]:
    """Candidates for the shrink of ``problem``."""
    if problem.invariant:
        yield from _invariant_shrinks(problem)
        return
    k, lanes = min(GEMV_K, block_at_least(problem.k)), block_at_least(problem.rank)
    for ranks in GEMV_RANKS:
        if ranks <= block_at_least(problem.rank, 2) and (ranks < GEMV_RANKS[-1] or problem.rank <= ranks):
            warps = 4 if ranks * k <= 4 * WARP_ELEMENTS else 8
            yield Schedule(0, ranks, k, warps, split_k=cdiv(problem.k, k))
    for rows, splits in product(_tile_rows(problem), SPLITS):
        if splits == 1 or problem.k >= LEAST_K * splits:
            stages = STAGES_FP8 if problem.element == 1 else STAGES_HIGH if rows == WARPGROUP_ROWS else STAGES
            yield Schedule(rows, min(lanes, MOST_LANES), K_STEP, 4, stages, split_k=splits)


def expand_schedules(problem: Problem) -> Iterator[Schedule]:
    """Candidates for the expand of ``problem``."""
    if problem.invariant:
        yield from _invariant_expands(problem)
        return
    lanes, widest = block_at_least(problem.rank), max(problem.widths)
    if problem.by_rows:
        yield Schedule(0, max(32, GEMV_BLOCK // lanes), lanes)
    else:
        at_once = sorted({min(step, lanes) for step in GEMV_LANES})
        for step, columns in product(at_once, GEMV_COLUMNS):
            if columns * step <= GEMV_BLOCK:
                yield Schedule(0, columns, step, max(1, columns * step * problem.element // GEMV_BLOCK))
    in_words = problem.element == 1 and not problem.by_rows and lanes <= WORD_LANES
    for rows in _tile_rows(problem):
        blocks = [(columns, 4) for columns in WORD_BLOCKS.get(rows, ())] if in_words else COLUMN_BLOCKS
        for (columns, warps), steps in product(blocks, COLUMN_STEPS):
            if steps == 1 or columns * steps <= 2 * widest:
                yield Schedule(rows, columns, min(lanes, WIDE_RANKS), warps, STAGES_COLUMNS, tiles_n=steps)


def _tile_rows(problem: Problem) -> Iterator[int]:
    """Heights of tiles: up to the one that holds the longest segment; none where every segment is a row."""
    if problem.has_segments:
        for rows in TILE_ROWS:
            if rows == TILE_ROWS[0] or rows < 2 * problem.shape.longest:
                yield rows


def _invariant_shrinks(problem: Problem) -> Iterator[Schedule]:
    """Candidates of batch invariance: one split and one instruction, whatever the step is.

    Weights are the left operand of the tensor cores: a row is a column of the right one, however many there are. Up to
    32 lanes every warp multiplies a quarter of the split by itself, with the one instruction that a warp has, so that
    the height of a tile is free; above, four warps multiply together, and the height is fixed because Hopper and
    Blackwell have instructions for several. All else that matters for the bits depends on the layer only.
    """
    lanes = min(block_at_least(problem.rank), MOST_LANES)
    splits = max(split for split in SPLITS[:-1] if split == 1 or problem.k > INVARIANT_K * split)
    if lanes > WARP_LANES:
        yield Schedule(WARPGROUP_ROWS, lanes, K_STEP, 4, STAGES_HIGH, splits, swap_ab=True)
        return
    for rows in FLAT_ROWS:
        yield Schedule(rows, lanes, 4096 // rows, 4, STAGES_COLUMNS, splits, swap_ab=True)


def _invariant_expands(problem: Problem) -> Iterator[Schedule]:
    """The same; with fewer than four warps the instruction is the same for every block of columns."""
    lanes = block_at_least(problem.rank)
    ranks = lanes if lanes <= WORD_LANES else 32
    for rows, steps in product((*FLAT_ROWS, 32), COLUMN_STEPS):
        for columns in (64, 128):
            if steps == 1 or columns * steps <= 2 * max(problem.widths):
                yield Schedule(rows, columns, ranks, 2, STAGES_COLUMNS, tiles_n=steps, swap_ab=True)


# --- the estimate ----------------------------------------------------------------------------------------------------


def shrink_us(problem: Problem, schedule: Schedule, gpu: Gpu) -> float:
    """Estimated microseconds of a shrink, and of an expand's reading what it leaves."""
    rows, slices, splits = problem.rows, len(problem.widths), schedule.split_k
    readers = slices + sum(cdiv(width, READER_COLUMNS) for width in problem.widths)
    partials = splits * rows * problem.rank * 4 * readers / (gpu.multiprocessors * SM_RATE)
    unique = problem.element * problem.shape.adapters * problem.rank * problem.k * slices / gpu.memory
    blocks = cdiv(problem.rank, schedule.block_n) * slices * splits
    if not schedule.block_m:
        loaded = (schedule.block_n * problem.element + 2) * schedule.block_k
        resident = _resident(schedule, schedule.block_n * schedule.block_k)
        return partials + _us(rows * blocks, resident, loaded, 0.0, unique, gpu)
    tiles, steps = tiles_of(problem.shape, rows, schedule.block_m), cdiv(problem.k, schedule.block_k * splits)
    real_rows = min(schedule.block_m, rows / tiles)
    loaded = (real_rows * 2 + schedule.block_n * problem.element) * schedule.block_k * steps
    stage = (schedule.block_m * 2 + schedule.block_n * problem.element) * schedule.block_k
    step = SHRINK_STEP
    if schedule.block_m < WARPGROUP_ROWS:
        step += schedule.block_m * schedule.block_n / SHRINK_MMA
    resident = max(1, min(8, gpu.shared_memory // (stage * schedule.num_stages)))
    return partials + _us(tiles * blocks, resident, loaded, steps * step, unique, gpu)


def expand_us(problem: Problem, schedule: Schedule, partials: int, gpu: Gpu) -> float:
    """Estimated microseconds of an expand that adds up ``partials`` sums for every rank."""
    rows, rank, columns = problem.rows, problem.rank, sum(problem.widths)
    unique = (problem.element * problem.shape.adapters * rank + 4 * rows) * columns / gpu.memory
    blocks = sum(cdiv(width, schedule.block_n * schedule.tiles_n) for width in problem.widths)
    if not schedule.block_m:
        lanes = cdiv(_true_rank(rank), schedule.block_k) * schedule.block_k
        each = schedule.block_n * (lanes * problem.element + 4) + partials * lanes * 4
        resident = min(MOST_PROGRAMS, _resident(schedule, schedule.block_n * schedule.block_k))
        passes = cdiv(rank, schedule.block_k)
        return _us(rows * blocks, resident, each, 0.0, unique, gpu, passes)
    tiles = tiles_of(problem.shape, rows, schedule.block_m)
    real_rows, lanes = min(schedule.block_m, rows / tiles), block_at_least(rank)
    loaded: float = schedule.tiles_n * schedule.block_n * (rank * problem.element + real_rows * 4)
    loaded += partials * real_rows * rank * 4
    stage = schedule.block_n * (lanes * problem.element + schedule.block_m * 2)
    stages = 1 if schedule.tiles_n == 1 else schedule.num_stages
    resident = max(1, min(MOST_WARPS // schedule.num_warps, gpu.shared_memory // (stage * stages)))
    step = EXPAND_STEP + schedule.block_m * schedule.block_n * (rank + EPILOGUE) / EXPAND_MMA
    return _us(tiles * blocks, resident, loaded, schedule.tiles_n * step, unique, gpu)


def _us(
    programs: int, resident: int, loaded: float, chain: float, unique: float, gpu: Gpu, passes: int = 1
) -> float:  # fmt: skip
    """Microseconds of ``programs`` programs, of which ``resident`` fit a multiprocessor: each loads ``loaded`` bytes
    and takes ``chain`` microseconds of dependent steps; ``unique``: microseconds of the bytes that memory must move.
    """
    rounds = max(1, cdiv(programs, gpu.multiprocessors * resident))
    each = cdiv(programs, gpu.multiprocessors)
    return ROUND * rounds * passes + PROGRAM * each + max(each * loaded / SM_RATE, rounds * chain, unique)


def _true_rank(rank: int) -> int:
    """Rank that adapters in slots of ``rank`` are expected to have: of wide slots they fill a part."""
    return max(min(rank, TRUE_RANK), rank // 4)


def _resident(schedule: Schedule, elements: int) -> int:
    """GEMV programs of a multiprocessor, each with so many weights in its registers."""
    return int(max(1, min(REGISTERS / (2 * elements), MOST_WARPS // schedule.num_warps)))


def tiles_of(shape: StepShape, rows: int, block_m: int) -> int:
    """About how many tiles of `block_m` rows the step makes: some are not full, unless all segments are equal (which
    their shape tells where number and length are powers of two).
    """
    if rows <= block_m * shape.adapters:
        return shape.adapters
    return cdiv(rows, block_m) + (0 if shape.adapters * shape.longest <= rows else shape.adapters // 4)


# --- the choice ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def choose_shrink(problem: Problem, gpu: Gpu) -> Schedule:
    """The candidate with the least estimated time; the first of several."""
    return min(shrink_schedules(problem), key=lambda schedule: shrink_us(problem, schedule, gpu))


@functools.lru_cache(maxsize=16384)
def choose_expand(problem: Problem, partials: int, gpu: Gpu) -> Schedule:
    """The candidate with the least estimated time; the first of several."""
    return min(expand_schedules(problem), key=lambda schedule: expand_us(problem, schedule, partials, gpu))
