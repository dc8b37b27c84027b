"""Schedules of shrink and expand: candidates, an estimate of their time, and the choice between them.

Of the ten to thirty candidates of a problem the one with the least estimated time is taken, unless a measurement for
this GPU says otherwise (`punica.ops.triton_ops.tuned`). The estimate adds the times of one multiprocessor's programs: a
start for each program and each round of them, and the longest of three: their bytes at the rate of the L2 cache, their
loop steps one after the other, and the launch's unique bytes at the rate of the memory.

`Gpu` holds what is read from the device; the nine fitted constants are an H200's everywhere. They were fitted on
2026-11-26 to the times of about 20 candidates per product of 188 operators in 16 bits and 53 in FP8 by
`experiments/commands/tune.py` of commit 195ae1f8 (``fit=true``). The choice is within 5 % of the best candidate on the
geometric mean, for each product and weight format (worst: 1.65 for a shrink, 1.41 for an expand). Candidates of more
than 64 ranks for long segments are of 2026-11-30 (`_is_tall`).
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from triton import cdiv

from punica.metadata import StepShape
from punica.ops.triton_ops.launch import block_at_least, shared_memory

WARPS = 4
"""Warps of a program whose tile fits their registers."""


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
    num_warps: int = WARPS
    num_stages: int = 1
    split_k: int = 1
    tiles_n: int = 1
    swap_ab: bool = False


class Problem(NamedTuple):
    """Step and weights of a LoRA product, as far as they decide its schedules.

    k: elements of x (0: an expand alone); widths: columns of every slice; rank: of the slots; element: bytes of
    a weight; by_rows: B is stored row by row (else rank after rank); invariant: a row has the same bits in every batch;
    direct: the result of a shrink is wanted, so that K is not split.
    """

    shape: StepShape
    rows: int
    k: int
    widths: tuple[int, ...]
    rank: int
    element: int = 2
    by_rows: bool = False
    invariant: bool = False
    direct: bool = False


class Gpu(NamedTuple):
    """Multiprocessors, bytes of shared memory that a program may use, and bytes per microsecond of the memory."""

    multiprocessors: int = 132
    shared_memory: int = 227 << 10
    memory: float = 4.25e6

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> "Gpu":
        """Describe the GPU ``device``; an H200 without one."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls()
        properties = torch.cuda.get_device_properties(device)
        clock, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        memory = REACHED * clock * bits / 4e3 if clock and bits else cls._field_defaults["memory"]  # kHz, two a clock
        return cls(properties.multi_processor_count, shared_memory(device), memory)


REACHED = 0.87
"""Part of the memory's peak rate that a copy reaches (H200: 4.25 of 4.9 TB/s)."""

# fitted, nine numbers
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
MOST_WARPS = 64
"""Warps of a multiprocessor, and twice its programs."""
PARTIAL, OUTPUT = 4, 2 * 2
"""Bytes of a partial sum, and of an output element, which is read and written."""


def _powers(first: int, last: int) -> tuple[int, ...]:
    return (first,) if first >= last else (first, *_powers(2 * first, last))


TILE_ROWS = _powers(16, 64)
"""Heights of tiles. From the last on there are instructions of 64 rows (a warp group)."""
K_STEP, GEMV_K = 128, 4096
"""Elements of K at once: of a GEMM step, and of a GEMV program (of which K is split into several)."""
GEMV_RANKS, SPLITS = _powers(2, 16), _powers(1, 16)
"""Ranks of a GEMV program of shrink, and parts of K."""
MOST_LANES = 64
"""Ranks at once, of a tile of shrink and of a GEMV step of expand."""
LEAST_K, INVARIANT_K = 448, 722
"""Elements of K for each split, at least, and with batch invariance."""
WARP_ELEMENTS, GEMV_BLOCK = 2048, 8192
"""Weights of a GEMV warp of shrink, and of a GEMV program of expand."""
GEMV_COLUMNS, COLUMNS, COLUMN_STEPS = _powers(64, 512), _powers(128, 256), (1, *_powers(4, 16))
"""Columns of a GEMV program of expand, of a tile, and column blocks of a tile."""
LOOPED = 1 << 22
"""Elements of a result from which tiles of more than `MOST_LANES` ranks take several column blocks each (H200)."""
WARP_COLUMNS = COLUMNS[0] // WARPS
"""Columns of a tile for each warp."""
WORD_ROWS, WORD_COLUMNS, WORD_LANES = 32, 8, 128
"""Rows, columns for each row and ranks of tiles that read FP8 in words: at most, at least, at most."""
STAGES, COLUMN_STAGES = 8, 3
"""Depth of a pipeline over K, in FP8 (half for elements twice as wide; one more for low tiles), and over columns."""
INVARIANT_ROWS, WARP_LANES = _powers(8, 32), 32
"""Heights of batch-invariant tiles, and ranks up to which the height of one of shrink is free."""
WIDE_RANKS = 256
"""Ranks of B that a tile of expand multiplies in one pass, at most."""


def shrink_schedules(problem: Problem, gpu: Gpu) -> Iterator[Schedule]:
    if problem.invariant:
        yield from _invariant_shrinks(problem)
        return
    k, lanes = min(GEMV_K, block_at_least(problem.k)), block_at_least(problem.rank)
    for ranks in GEMV_RANKS:
        if problem.direct and problem.k > k and ranks > 2 * WARPS:
            continue  # a loop over K carries the products, in float32
        if ranks <= block_at_least(problem.rank, 2) and (ranks < GEMV_RANKS[-1] or problem.rank <= ranks):
            warps = WARPS if ranks * k <= WARPS * WARP_ELEMENTS else 2 * WARPS
            yield Schedule(0, ranks, k, warps, split_k=1 if problem.direct else cdiv(problem.k, k))
    for rows, splits in product(_tile_rows(problem), SPLITS[:1] if problem.direct else SPLITS):
        if splits == 1 or problem.k >= LEAST_K * splits:
            stages = STAGES // problem.element + (rows < TILE_ROWS[-1])
            yield Schedule(rows, min(lanes, MOST_LANES), K_STEP, WARPS, stages, split_k=splits)
            if _is_tall(problem, gpu) and rows == TILE_ROWS[-1] and 2 * splits < SPLITS[-1]:  # x is read half as often
                yield Schedule(rows, 2 * MOST_LANES, K_STEP, WARPS, stages - 1, split_k=splits)


def expand_schedules(problem: Problem, gpu: Gpu) -> Iterator[Schedule]:
    if problem.invariant:
        yield from _invariant_expands(problem)
        return
    lanes, widest = block_at_least(problem.rank), max(problem.widths)
    if problem.by_rows:
        yield Schedule(0, max(WARP_COLUMNS, GEMV_BLOCK // lanes), lanes)
    else:
        # few ranks at once read no more than adapters of low rank need, many have shorter chains of loads
        at_once = sorted({min(step, lanes) for step in (TRUE_RANK, MOST_LANES)})
        for step, columns in product(at_once, GEMV_COLUMNS):
            if columns * step <= GEMV_BLOCK:
                yield Schedule(0, columns, step, max(1, columns * step * problem.element // GEMV_BLOCK))
    if _is_tall(problem, gpu):
        yield from _tall_expands(problem)
        return
    in_words = problem.element == 1 and not problem.by_rows and lanes <= WORD_LANES
    for rows, columns, steps in product(_tile_rows(problem), COLUMNS, COLUMN_STEPS):
        if in_words and (rows > WORD_ROWS or columns < WORD_COLUMNS * rows):
            continue
        if steps == 1 or columns * steps <= 2 * widest:
            warps = WARPS if in_words else columns // WARP_COLUMNS
            yield Schedule(rows, columns, min(lanes, WIDE_RANKS), warps, COLUMN_STAGES, tiles_n=steps)


def _is_looped(problem: Problem) -> bool:
    return problem.rows * sum(problem.widths) >= LOOPED and max(problem.widths) >= 2 * COLUMNS[0]


def _is_tall(problem: Problem, gpu: Gpu) -> bool:
    """Tell if tiles have many ranks in one pass and mostly full rows; up to 128 ranks, too, if a loop over columns
    leaves enough of them. Fewer tiles of 128 ranks are as fast with 256 columns.
    """
    many = _is_looped(problem) if problem.rank <= 2 * MOST_LANES else gpu.shared_memory >= Gpu().shared_memory
    full = problem.rows >= TILE_ROWS[-1] * problem.shape.adapters
    return MOST_LANES < problem.rank <= WIDE_RANKS and problem.element == 2 and full and many


def _tall_expands(problem: Problem) -> Iterator[Schedule]:
    """Yield tiles of many ranks for long segments: weights and sums of 256 columns would not fit the registers."""
    lanes, looped = block_at_least(problem.rank), _is_looped(problem)
    columns = COLUMNS[0] // (2 if looped and lanes == WIDE_RANKS else 1)
    for rows, steps in product(TILE_ROWS[-1:] if looped else TILE_ROWS, COLUMN_STEPS[looped:]):
        if steps == 1 or columns * steps <= 2 * max(problem.widths):
            yield Schedule(rows, columns, lanes, WARPS, COLUMN_STAGES, tiles_n=steps)


def _tile_rows(problem: Problem) -> Iterator[int]:
    """Yield heights of tiles: up to the one that holds the longest segment; none where every segment is a row."""
    if problem.rows > 1 and problem.shape.longest > 1:
        for rows in TILE_ROWS:
            if rows == TILE_ROWS[0] or rows < 2 * problem.shape.longest:
                yield rows


def _invariant_shrinks(problem: Problem) -> Iterator[Schedule]:
    """Yield candidates of batch invariance: one split and one instruction, whatever the step is.

    Weights are the left operand of the tensor cores: a row is a column of the right one, however many there are. Up to
    32 lanes every warp multiplies a quarter of the split, with the one instruction that a warp has, so that the height
    of a tile is free; above, four warps multiply together, and Hopper and Blackwell have instructions for each height.
    """
    lanes = min(block_at_least(problem.rank), MOST_LANES)
    splits = max(split for split in SPLITS[:-1] if split == 1 or problem.k > INVARIANT_K * split)
    if lanes > WARP_LANES:
        yield Schedule(TILE_ROWS[-1], lanes, K_STEP, WARPS, STAGES // 2, splits, swap_ab=True)
        return
    for rows in INVARIANT_ROWS[:2]:
        yield Schedule(rows, lanes, GEMV_K // rows, WARPS, COLUMN_STAGES, splits, swap_ab=True)


def _invariant_expands(problem: Problem) -> Iterator[Schedule]:
    """Yield the same for expand; with fewer than four warps the instruction is the same for every block of columns."""
    lanes = block_at_least(problem.rank)
    ranks = lanes if lanes <= COLUMNS[0] else WARP_LANES
    for rows, columns, steps in product(INVARIANT_ROWS, GEMV_COLUMNS[:2], COLUMN_STEPS):
        if steps == 1 or columns * steps <= 2 * max(problem.widths):
            yield Schedule(rows, columns, ranks, WARPS // 2, COLUMN_STAGES, tiles_n=steps, swap_ab=True)


def shrink_us(problem: Problem, schedule: Schedule, gpu: Gpu) -> float:
    """Estimate microseconds of a shrink, and of an expand's reading of its partials."""
    rows, slices, splits = problem.rows, len(problem.widths), schedule.split_k
    readers = slices + sum(cdiv(width, GEMV_COLUMNS[-1]) for width in problem.widths)
    partials = splits * rows * problem.rank * PARTIAL * readers / (gpu.multiprocessors * SM_RATE)
    unique = problem.element * problem.shape.adapters * problem.rank * problem.k * slices / gpu.memory
    blocks = cdiv(problem.rank, schedule.block_n) * slices * splits
    if not schedule.block_m:
        passes = cdiv(problem.k, schedule.block_k * splits)
        loaded = (schedule.block_n * problem.element + 2) * schedule.block_k * passes
        resident = _resident(schedule, schedule.block_n * schedule.block_k)
        return partials + _us(rows * blocks, resident, loaded, 0.0, unique, gpu, passes)
    tiles, steps = tiles_of(problem.shape, rows, schedule.block_m), cdiv(problem.k, schedule.block_k * splits)
    real_rows = min(schedule.block_m, rows / tiles)
    loaded = (real_rows * 2 + schedule.block_n * problem.element) * schedule.block_k * steps
    stage = (schedule.block_m * 2 + schedule.block_n * problem.element) * schedule.block_k
    step = SHRINK_STEP
    if schedule.block_m < TILE_ROWS[-1]:
        step += schedule.block_m * schedule.block_n / SHRINK_MMA
    resident = max(1, gpu.shared_memory // (stage * schedule.num_stages))
    return partials + _us(tiles * blocks, resident, loaded, steps * step, unique, gpu)


def expand_us(problem: Problem, schedule: Schedule, partials: int, gpu: Gpu) -> float:
    """Estimate microseconds of an expand that adds up ``partials`` sums for every rank."""
    rows, rank, columns = problem.rows, problem.rank, sum(problem.widths)
    unique = (problem.element * problem.shape.adapters * rank + OUTPUT * rows) * columns / gpu.memory
    blocks = sum(cdiv(width, schedule.block_n * schedule.tiles_n) for width in problem.widths)
    if not schedule.block_m:
        true_rank = max(min(rank, TRUE_RANK), rank // 4)  # of wide slots adapters fill a part
        lanes = cdiv(true_rank, schedule.block_k) * schedule.block_k
        each = schedule.block_n * (lanes * problem.element + OUTPUT) + partials * lanes * PARTIAL
        resident = _resident(schedule, schedule.block_n * schedule.block_k)
        passes = cdiv(rank, schedule.block_k)
        return _us(rows * blocks, resident, each, 0.0, unique, gpu, passes)
    tiles = tiles_of(problem.shape, rows, schedule.block_m)
    real_rows, lanes = min(schedule.block_m, rows / tiles), block_at_least(rank)
    loaded: float = schedule.tiles_n * schedule.block_n * (rank * problem.element + real_rows * OUTPUT)
    loaded += partials * real_rows * rank * PARTIAL
    stage = schedule.block_n * (lanes * problem.element + schedule.block_m * 2)
    stages = 1 if schedule.tiles_n == 1 else schedule.num_stages
    resident = max(1, min(MOST_WARPS // schedule.num_warps, gpu.shared_memory // (stage * stages)))
    step = EXPAND_STEP + schedule.block_m * schedule.block_n * (rank + EPILOGUE) / EXPAND_MMA
    return _us(tiles * blocks, resident, loaded, schedule.tiles_n * step, unique, gpu)


def _us(
    programs: int, resident: int, loaded: float, chain: float, unique: float, gpu: Gpu, passes: int = 1
) -> float:  # fmt: skip
    """Estimate microseconds of ``programs`` programs, ``resident`` on a multiprocessor: each loads ``loaded`` bytes and
    takes ``chain`` microseconds of dependent steps; ``unique``: those of the bytes that memory must move.
    """
    rounds = max(1, cdiv(programs, gpu.multiprocessors * resident))
    each = cdiv(programs, gpu.multiprocessors)
    return ROUND * rounds * passes + PROGRAM * each + max(each * loaded / SM_RATE, rounds * chain, unique)


def _resident(schedule: Schedule, elements: int) -> int:
    return int(max(1, min(REGISTERS / (2 * elements), MOST_WARPS // max(2, schedule.num_warps))))


def tiles_of(shape: StepShape, rows: int, block_m: int) -> int:
    """Estimate the tiles of `block_m` rows: some are not full, unless the shape tells that all segments are equal."""
    if rows <= block_m * shape.adapters:
        return max(1, shape.adapters)
    return cdiv(rows, block_m) + (0 if shape.adapters * shape.longest <= rows else shape.adapters // 4)


def choose_shrink(problem: Problem, gpu: Gpu) -> Schedule:
    return min(shrink_schedules(problem, gpu), key=lambda schedule: shrink_us(problem, schedule, gpu))


def choose_expand(problem: Problem, partials: int, gpu: Gpu) -> Schedule:
    return min(expand_schedules(problem, gpu), key=lambda schedule: expand_us(problem, schedule, partials, gpu))
