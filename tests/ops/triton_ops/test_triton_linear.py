"""`lora_linear` and the linear of a step: every pair of forms, splits, true ranks, determinism, batch invariance."""

import itertools
from importlib import import_module

import numpy as np
import pytest
import torch
from triton_batches import EXPANDS, SHRINKS, Batch, linear, random_slots

from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops import Options
from tests.ops.helpers import by_ranks as rank_major
from tests.ops.helpers import step as step_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize(("shrink", "expand"), list(itertools.product(SHRINKS, EXPANDS)))
def test_every_pair_of_forms(shrink, expand, split_k, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(block_k=32, split_k=split_k), expand=EXPANDS[expand])
    batch = Batch(random_slots(19, 3), 200, (40, 33), 20, 3, FP16, device)
    batch.check(batch.linear())


@pytest.mark.parametrize(("dtype", "add"), [(FP16, False), (BF16, True), (FP32, True), (FP32, False)], ids=str)
def test_dtypes_with_default_configuration(dtype, add, device):
    batch = Batch(random_slots(9, 3), 130, (40, 24), 16, 3, dtype, device)
    batch.check(batch.linear(add_inputs=add), add)


@pytest.mark.parametrize(
    ("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles"), ("rows", "walk"), ("tiles", "deep")]
)
def test_true_ranks_and_poisoned_lanes(shrink, expand, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(split_k=2), expand=EXPANDS[expand])
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 300, (40, 70), 64, 4, FP16, device, ranks=ranks)
    batch.poison(ranks=True)
    batch.check(batch.linear(lora_ranks=batch.lora_ranks))


def test_true_ranks_share_programs(device, use_schedules, monkeypatch):
    """With enough rows one program takes several rank blocks, and wide adapters their columns in several steps."""
    shrink, expand = (import_module(f"punica.ops.triton_ops.{name}") for name in ("lora_shrink", "lora_expand"))
    monkeypatch.setattr(shrink, "_rank_programs", lambda blocks, block_r, others, rank: 2)
    monkeypatch.setattr(expand, "_lane_blocks", lambda rank, n, has_ranks, programs: ((16, 32, 64), (1, 2, 4), 64))
    use_schedules(shrink=SHRINKS["rows"]._replace(block_n=4, block_k=64), expand=EXPANDS["rows"])
    batch = Batch([0, 1, 2, 3, -1], 100, (150, 40), 64, 4, FP16, device, ranks=[[8, 20, 64, 0], [64, 33, 3, 20]])
    batch.check(batch.linear(lora_ranks=batch.lora_ranks))


@pytest.mark.parametrize(("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles"), ("tiles", "walk")])
def test_the_same_bits_every_run(shrink, expand, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(block_k=32, split_k=4), expand=EXPANDS[expand])
    batch = Batch(random_slots(40, 3), 256, (48,), 16, 3, FP16, device)
    first, *others = [batch.linear() for _ in range(10 if device == "cuda" else 3)]
    assert all(torch.equal(first, other) for other in others)


def test_unaligned_views(device):
    """Addresses that are no multiple of 16 bytes take another way to the kernel."""
    batch = Batch([0, 1, -1, 1], 128, (40,), 16, 2, FP16, device)
    for _ in range(2):
        x = torch.empty(4 * 128 + 1, dtype=FP16, device=device)[1:].view(4, 128).copy_(batch.x)
        y = torch.empty(4 * 40 + 1, dtype=FP16, device=device)[1:].view(4, 40).copy_(batch.y)
        batch.check(batch.linear(y, x))
        batch.check(batch.linear())

FORMS = {
    "rows": (SHRINKS["rows"], EXPANDS["rows"]),
    "tiles": (SHRINKS["tiles"], EXPANDS["tiles"]),
    "high": (SHRINKS["tiles"]._replace(block_m=64, split_k=2), EXPANDS["walk"]._replace(block_m=64)),
    "left": (SHRINKS["tiles"]._replace(swap_ab=True), EXPANDS["tiles"]._replace(swap_ab=True)),
    "wide": (SHRINKS["tiles"]._replace(block_n=64), EXPANDS["tiles"]._replace(block_k=256)),
}
PROMPT = [2] * 41 + [0, 5, -1, 1, 3, 1, 3]  # a prompt beside decode rows, not in the order of their slots
STEPS = {"prompt": PROMPT, "short": [0, 1, 1, -1, 4, 5], "long": [1] * 19 + [3] * 8, "one": [4], "none": [-1, -1]}


@pytest.fixture
def use_forms(use_schedules):
    def use(shrink: str, expand: str) -> None:
        use_schedules(shrink=FORMS[shrink][0], expand=FORMS[expand][1])

    return use


def made(slots: list[int], device: str, rank: int = 16, k: int = 200, **options: object) -> Batch:
    torch.manual_seed(len(slots))
    return Batch(slots, k, (96, 40), rank, 6, FP16, device, **options)  # type: ignore[arg-type]


def on_step(batch: Batch, step: LoRABatch | None = None, b: tuple | None = None, **options: object) -> torch.Tensor:
    """y after a linear on the step of the batch's slots; ``step``: to use."""
    step, y = step or step_of(batch.slots, batch.device, batch.slot_count), batch.y.clone()
    linear(y, batch.x, batch.a, b or batch.b, step, 0.5, lora_ranks=batch.lora_ranks, **options)
    return y


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("shrink", "expand"), [*((form, form) for form in FORMS), ("rows", "high"), ("high", "rows")])
def test_every_form_on_a_step(shrink, expand, name, device, use_forms):
    use_forms(shrink, expand)
    batch = made(STEPS[name], device)
    batch.check(on_step(batch))


RANKS = [
    *itertools.product(("rows", "tiles", "left"), (8, 20, 64)),
    *(pytest.param(form, 160, marks=pytest.mark.slow) for form in ("rows", "tiles", "left")),
    *(("wide", 129), pytest.param("wide", 256, marks=pytest.mark.slow), ("wide", 300)),
]


@pytest.mark.parametrize("by_ranks", [False, True])
@pytest.mark.parametrize(("form", "rank"), RANKS)
def test_true_ranks_on_a_step(form, rank, by_ranks, device, use_forms):
    """In one pass of the tensor cores ("wide") up to 256 ranks, above in a loop."""
    use_forms(form, form)
    batch = made(PROMPT, device, rank, ranks=[[0, rank, 5, 8, min(rank, 16), 1], [rank, 0, rank, 3, 8, rank]])
    batch.poison(ranks=True)
    batch.check(on_step(batch, b=tuple(rank_major(one) if by_ranks else one for one in batch.b)))


def test_whole_blocks_of_weights_on_the_left(device, use_schedules):
    """The loop whose loads of x have no mask: tiles are short, and the row without adapter is NaN."""
    use_schedules(shrink=FORMS["left"][0]._replace(block_n=64, split_k=2), expand=EXPANDS["tiles"])
    batch = made(PROMPT, device, 40, 256, ranks=[[0, 40, 5, 8, 16, 1], [40, 0, 40, 3, 8, 40]])
    batch.poison(ranks=True)
    batch.x[PROMPT.index(-1)] = float("nan")
    batch.check(on_step(batch))


@pytest.mark.parametrize("form", ["tiles", "high"])
@pytest.mark.parametrize("captured", ["one", "short", "long", "prompt"])
def test_the_grid_of_one_step_serves_every_other(captured, form, device, use_forms):
    """As a replayed graph: programs of the captured step, lists of the one at hand."""
    use_forms(form, form)

    class Replayed(LoRABatch):
        def tiles(self, height: int):
            grid = RowGroups.of_rows(np.array(STEPS[captured])).tiles.totals
            return (*super().tiles(height)[:-1], grid[height])

    batch, step = made(PROMPT, device), Replayed(64, 6, device)
    step.fill(RowGroups.of_rows(np.array(PROMPT)))
    batch.check(on_step(batch, step))


@pytest.mark.parametrize("name", [name for name in STEPS if name != "none"])
def test_what_is_chosen(name, device):
    batch = made(STEPS[name], device, ranks=[[16, 16, 4, 16, 16, 8]] * 2)
    for options in (Options(), Options(batch_invariant=True)):
        batch.check(on_step(batch, options=options))
