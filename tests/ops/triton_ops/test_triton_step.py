"""The ops on a step (`LoRABatch`): rows one by one, and tiles read from its lists."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from step_calls import linear
from triton_batches import EXPAND_ROWS, EXPAND_TILES, EXPAND_WALK, SHRINK_ROWS, SHRINK_TILES, Batch, assert_close

from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops import Options

SHRINKS = {
    "rows": SHRINK_ROWS,
    "tiles": SHRINK_TILES,
    "high": SHRINK_TILES._replace(block_m=64, split_k=2),
    "left": SHRINK_TILES._replace(swap_ab=True),
    "wide": SHRINK_TILES._replace(block_n=64),
}
EXPANDS = {
    "rows": EXPAND_ROWS,
    "tiles": EXPAND_TILES,
    "high": EXPAND_WALK._replace(block_m=64),
    "left": EXPAND_TILES._replace(swap_ab=True),
    "wide": EXPAND_TILES._replace(block_k=256),
}
PROMPT = [2] * 41 + [0, 5, -1, 1, 3, 1, 3]  # a prompt beside decode rows, not in the order of their slots
STEPS = {"prompt": PROMPT, "short": [0, 1, 1, -1, 4, 5], "long": [1] * 19 + [3] * 8, "one": [4], "none": [-1, -1]}


def started(slots: list[int], batch: Batch, rows: int = 64) -> LoRABatch:
    step = LoRABatch(rows, batch.slot_count, batch.device)
    step.fill(RowGroups.of_rows(np.array(slots)))
    return step


def made(slots: list[int], device: str, rank: int = 16, widths: tuple[int, ...] = (96, 40), **options: object) -> Batch:
    torch.manual_seed(len(slots))
    return Batch(slots, 200, widths, rank, 6, torch.float16, device, **options)  # type: ignore[arg-type]


def expected(batch: Batch) -> torch.Tensor:
    return batch.y.cpu().double() + batch.expanded(batch.shrunk())


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("shrink", "expand"), [*zip(SHRINKS, EXPANDS, strict=True), ("rows", "high"), ("high", "rows")]
)
def test_every_form(shrink, expand, name, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink], expand=EXPANDS[expand])
    batch = made(STEPS[name], device)
    y = batch.y.clone()
    linear(y, batch.x, batch.a, batch.b, started(batch.slots, batch), 0.5)
    assert_close(y, expected(batch), torch.float16)


RANKS = [
    *itertools.product(("rows", "tiles", "left"), (8, 20, 64)),
    *(pytest.param(form, 160, marks=pytest.mark.slow) for form in ("rows", "tiles", "left")),
    *(("wide", 129), pytest.param("wide", 256, marks=pytest.mark.slow), ("wide", 300)),
]


@pytest.mark.parametrize("by_ranks", [False, True])
@pytest.mark.parametrize(("form", "rank"), RANKS)
def test_true_ranks(form, rank, by_ranks, device, use_schedules):
    """In one pass of the tensor cores ("wide") up to 256 ranks, above in a loop."""
    use_schedules(shrink=SHRINKS[form], expand=EXPANDS[form])
    ranks = [[0, rank, 5, 8, min(rank, 16), 1], [rank, 0, rank, 3, 8, rank]]
    batch = made(PROMPT, device, rank, ranks=ranks)
    for (i, weights), slot in itertools.product(enumerate(zip(batch.a, batch.b, strict=True)), range(6)):
        weights[0][slot, 0, ranks[i][slot] :] = float("nan")  # beyond the rank
        weights[1][slot, 0, :, ranks[i][slot] :] = float("nan")
    y, b = batch.y.clone(), tuple(one.mT.contiguous().mT if by_ranks else one for one in batch.b)
    linear(y, batch.x, batch.a, b, started(PROMPT, batch), 0.5, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch), torch.float16)


def test_whole_blocks_of_weights_on_the_left(device, use_schedules):
    """The loop whose loads of x have no mask: tiles are short, and the row without adapter is NaN."""
    use_schedules(shrink=SHRINK_TILES._replace(swap_ab=True, block_n=64, split_k=2), expand=EXPAND_TILES)
    ranks = [[0, 40, 5, 8, 16, 1], [40, 0, 40, 3, 8, 40]]
    batch = Batch(PROMPT, 256, (96, 40), 40, 6, torch.float16, device, ranks=ranks)
    for (i, weights), slot in itertools.product(enumerate(batch.a), range(6)):
        weights[slot, 0, ranks[i][slot] :] = float("nan")
    want, y = expected(batch), batch.y.clone()
    batch.x[PROMPT.index(-1)] = float("nan")
    linear(y, batch.x, batch.a, batch.b, started(PROMPT, batch), 0.5, lora_ranks=batch.lora_ranks)
    assert_close(y, want, torch.float16)


@pytest.mark.parametrize("form", ["tiles", "high"])
@pytest.mark.parametrize("captured", ["one", "short", "long", "prompt"])
def test_the_grid_of_one_step_serves_every_other(captured, form, device, use_schedules):
    """As a replayed graph: programs of the captured step, lists of the one at hand."""
    use_schedules(shrink=SHRINKS[form], expand=EXPANDS[form])

    class Replayed(LoRABatch):
        def tiles(self, height: int):
            grid = RowGroups.of_rows(np.array(STEPS[captured])).tiles.totals
            return (*super().tiles(height)[:-1], grid[height])

    batch = made(PROMPT, device)
    step = Replayed(64, 6, device)
    step.fill(RowGroups.of_rows(np.array(PROMPT)))
    y = batch.y.clone()
    linear(y, batch.x, batch.a, batch.b, step, 0.5)
    assert_close(y, expected(batch), torch.float16)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "none"])
def test_what_is_chosen(name, device):
    batch = made(STEPS[name], device, ranks=[[16, 16, 4, 16, 16, 8]] * 2)
    for options in (Options(), Options(batch_invariant=True)):
        y = batch.y.clone()
        step = started(batch.slots, batch)
        linear(y, batch.x, batch.a, batch.b, step, 0.5, lora_ranks=batch.lora_ranks, options=options)
        assert_close(y, expected(batch), torch.float16)


@pytest.mark.parametrize("name", ["prompt", "short"])
def test_shrink_aside(name, device):
    """Shrink, and nothing else, is launched in the context that is given."""
    batch, seen = made(STEPS[name], device), []
    y = batch.y.clone()

    @contextmanager
    def aside():
        seen.append(y.clone())
        yield
        seen.append(y.clone())

    linear(y, batch.x, batch.a, batch.b, started(batch.slots, batch), 0.5, aside=aside)
    assert len(seen) == 2
    assert all(torch.equal(one, batch.y) for one in seen)
    assert_close(y, expected(batch), torch.float16)
