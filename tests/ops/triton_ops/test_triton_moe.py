"""Fused MoE LoRA kernels: all forms agree with a float64 reference, and nobody reads what is not his."""

from itertools import product

import pytest
import torch
from punica.ops.triton_ops.fused_moe_lora import (
    _run_fused_moe_lora_one_shot,
    _run_fused_moe_lora_small_batch,
    fused_moe_lora,
)

from punica.ops import collectives, moe_torch
from punica.ops.collectives import Collectives
from punica.ops.experts import ExpertForm
from punica.ops.triton_ops import moe_align, moe_rules
from punica.ops.triton_ops.launch import block_at_least
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from punica.ops.triton_ops.schedules import Schedule
from punica.parallel.group import _concatenate
from tests.ops.moe_cases import CASES, Case, World

NUMBERS = (16, 32, 32, 1, 4, 2, 1)
FORMS = {
    "rows": (Schedule(0, 8, 32), Schedule(0, 32, 16)),
    "rows, split": (Schedule(0, 16, 16, split_k=3), Schedule(0, 64, 16)),
    "tiles": (Schedule(16, 16, 32, num_stages=2), Schedule(16, 32, 16, num_stages=2)),
    "tiles, split, walk": (
        Schedule(16, 32, 16, num_stages=2, split_k=3), Schedule(16, 16, 64, num_stages=2, tiles_n=2)
    ),
}  # fmt: skip


def run(world: World, how: How) -> torch.Tensor:
    given = world.given(moe_align.moe_lora_align_block_size)
    fused(given, world.case.rank, world.case.top_k, world.switches, how)
    return given.output


@pytest.fixture
def use_form(use_expert_schedules):
    return lambda form: use_expert_schedules(*FORMS[form])


QUICK = (
    "plain", "gate and up, naive", "down", "bfloat16", "rank 20 sorted", "disabled", "nobody", "no token", "true ranks",
    "true ranks, overwrite",
)  # fmt: skip
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
SPLIT = ("gate and up", "down", "ragged sizes", "wide rank", "rank 20 sorted", "true ranks", "wide true ranks")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name) if name in QUICK else pytest.param(form, name, marks=pytest.mark.slow)
        for form in FORMS
        for name in CASES
        if name in SPLIT or "split" not in form
    ],
)
def test_two_stages(name: str, form: str, device: str, use_form):
    use_form(form)
    world = World(CASES[name], device)
    world.check(run(world, How(active=3)))


@pytest.mark.parametrize("name", EVERY)
def test_as_the_rules_choose(name: str, device: str):
    world = World(CASES[name], device)
    world.check(run(world, How()))


@pytest.mark.parametrize("rank", [2, 64])
@pytest.mark.parametrize("form", ["rows", "tiles"])
def test_ranks_that_cancel_keep_what_bfloat16_would_lose_between_the_products(
    form: str, rank: int, device: str, use_form
):
    """h = (1 + 2**-10, 1, 0, ...) and B = (1, -1, 0, ...): 2**-10, and 0 if h were rounded to 8 bits."""
    use_form(form)
    world = World(Case(tokens=3, hidden=64, rank=rank, dtype=torch.bfloat16, add_inputs=False, naive=True), device)
    world.x.fill_(1.0)
    for weights in (*world.a, *world.b):
        weights.zero_()
    world.a[0][:, :, :2] = 2.0**-6
    world.a[0][:, :, 0, 0] += 2.0**-10
    world.b[0][..., 0], world.b[0][..., 1] = 1.0, -1.0
    output = run(world, How(active=3))
    computed = [output[t, j, world.case.offset :][: world.case.width] for t, j, _, _ in world.used()]
    assert computed
    assert {value for row in computed for value in row.tolist()} == {2.0**-10}


@pytest.mark.parametrize("name", ["plain", "naive", "gate and up", "down", "no token", "wide rank"])
def test_flat_op(name: str, device: str):
    world = World(CASES[name], device)
    given = world.given(moe_align.moe_lora_align_block_size)
    fused_moe_lora(
        *given[:9], world.case.rank, world.case.top_k, given.lora_ids, world.case.slots, given.enabled,
        *NUMBERS, *NUMBERS, *world.switches,
    )  # fmt: skip
    world.check(given.output)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["plain", "down", "disabled", "true ranks"])
def test_without_ids_of_adapters(name: str, form: str, device: str, use_form):
    """As the engine calls: every slot has a place in the table of slots, its own, whether anybody is there or not."""
    use_form(form)
    world = World(CASES[name], device)
    given = world.given(moe_align.moe_lora_align_block_size, listed=False)
    fused(given, world.case.rank, world.case.top_k, world.switches, How(active=3))
    world.check(given.output)


@pytest.mark.parametrize("name", ["gate and up", "naive", "down"])
def test_single_launch_names_of_the_contract(name: str, device: str):
    world = World(CASES[name], device)
    given = world.given(moe_align.moe_lora_align_block_size)
    case, (down, _, offset, add_inputs) = world.case, world.switches
    _run_fused_moe_lora_one_shot(
        *given[:9], case.rank, case.top_k, given.lora_ids, None, given.enabled, down, 16, add_inputs, offset
    )
    world.check(given.output)
    output = world.y.clone()
    _run_fused_moe_lora_small_batch(
        output, *given[1:5], world.topk_ids.reshape(-1), given.mapping, case.top_k, given.enabled, down, add_inputs,
        offset,
    )  # fmt: skip
    world.check(output)


def test_more_work_than_the_grid_expects(device: str, use_form):
    """A captured graph keeps its grid; its programs go on while there are tiles."""
    use_form("tiles")
    world = World(Case(tokens=30, experts=8, slots=3, hidden=16, width=16), device)
    world.check(run(world, How(active=1)))


TWO_RANKS = Case(tokens=4, slots=2, rank=32, ranks=(16, 30), slices=2, hidden=20)
NARROW = Case(tokens=3, slots=2, rank=2, slices=2, hidden=16, width=16)


@pytest.mark.parametrize(
    ("op", "case"),
    [("tiles", TWO_RANKS), ("rows", TWO_RANKS.but(fp8="channel")), ("tiles", NARROW), ("rows", NARROW.but(rank=4)),
     ("torch", Case(ranks=(8, 5, 3), slices=2))],
    ids=["tiles", "rows, FP8", "one rank of A each", "two ranks of A each", "torch"],
)  # fmt: skip
def test_a_rank_has_its_part_of_the_true_ranks(op: str, case: Case, device: str, use_form, monkeypatch):
    """A cut along the rank over two processes, gathered between the products as a group leaves it, perhaps a view: each
    looks at its own part of the table, and nothing beyond an adapter's rank leaks.
    """
    use_form("rows" if op == "torch" else op)
    world, width = World(case, "cpu" if op == "torch" else device), case.rank // 2
    align = (moe_torch if op == "torch" else moe_align).moe_lora_align_block_size
    parts: dict[int, torch.Tensor] = {}
    for process in (0, 1, 0, 1):  # the second time with what either found

        def gather(part: torch.Tensor, process: int = process) -> torch.Tensor:
            parts[process] = part.clone()
            return _concatenate(torch.stack([parts.get(other, part) for other in (0, 1)]), -1)

        known, place = len(parts) == 2, (lambda: 2, lambda process=process: process, lambda t: t)
        monkeypatch.setattr(collectives, "_installed", Collectives(*place, gather))
        given, own = world.given(align), slice(width * process, width * (process + 1))
        given = given._replace(lora_a=[a[:, :, own].contiguous() for a in given.lora_a])
        if given.fp8 is not None:
            cut = [scale[:, :, own].contiguous() for scale in given.fp8.a_scale]
            given = given._replace(fp8=given.fp8._replace(a_scale=cut))
        run_op = moe_torch.fused_moe_lora if op == "torch" else fused
        run_op(given, width, case.top_k, world.switches._replace(fully_sharded=True))
        if known:
            world.check(given.output)
    assert op != "torch" or not any(bool(part.isnan().any()) for part in parts.values()), "A beyond its true rank"


def test_the_second_slice_may_have_the_higher_ranks(device: str, use_form):
    """Tiles of both slices share a read of x; each is written as far as its own rank."""
    use_form("tiles")
    world = World(Case(tokens=6, rank=32, ranks=(8, 20, 32), slices=2), device)
    given, start, width = world.given(moe_align.moe_lora_align_block_size), world.case.offset, world.case.width
    order = torch.arange(given.output.shape[2], device=device)
    order[start : start + 2 * width] = order[start : start + 2 * width].roll(width)
    given = given._replace(
        lora_a=given.lora_a[::-1], lora_b=given.lora_b[::-1], lora_ranks=given.lora_ranks.flip(0),
        output=given.output[..., order].contiguous(),
    )  # fmt: skip
    fused(given, world.case.rank, world.case.top_k, world.switches, How(active=3))
    world.check(given.output[..., order])


def test_experts_beyond_32_bits_are_ignored(device: str):
    world = World(Case(tokens=3, naive=True, mapping=(0, 1, 2), hidden=16, width=16), device)
    given = world.given(moe_align.moe_lora_align_block_size)
    given.expert_ids[0] += 2**32
    given.expert_ids[3] -= 2**32
    for pair in (0, 3):
        world.expected.view(6, -1)[pair] = world.y.view(6, -1)[pair].double()
    fused(given, world.case.rank, world.case.top_k, world.switches)
    world.check(given.output)


def test_fewer_slots_may_be_listed(device: str):
    world = World(Case(tokens=4, mapping=(2, -1, 2, 2), hidden=16, width=16), device)
    given = world.given(moe_align.moe_lora_align_block_size)
    for listed in ([2], [2, -1]):
        given.output.copy_(world.y)
        slots = torch.tensor(listed, dtype=torch.int32, device=device)
        fused(given._replace(lora_ids=slots), world.case.rank, world.case.top_k, world.switches)
        world.check(given.output)


def test_batch_invariance_fixes_form_and_split():
    """Only what does not change a pair's sums may follow the batch."""
    found = set()
    for tokens, active, naive in ((1, 1, True), (8, 4, False), (128, 1, False), (4096, 16, False)):
        form = ExpertForm(tokens, 8, 2, 16, 128, 16, 16, 2048, 768, 8, 16)
        work = moe_rules.Work(form, naive, active, 2, invariant=True)
        shrink, expand = moe_rules.choose_shrink(work), moe_rules.choose_expand(work)
        found.add((shrink, expand._replace(tiles_n=1)))
        assert moe_rules.block_size(tokens * 8, active, 128, invariant=True) == 16
    assert len(found) == 1


@pytest.mark.parametrize(
    ("mean", "rows"), [(127, 16), (128, 32), (255, 32), (256, 64), (5000, 64)], ids=lambda number: str(number)
)
def test_blocks_of_many_pairs_are_high(mean: int, rows: int):
    assert moe_rules.block_size(mean * 4 * 8, 4, 8) == rows


@pytest.mark.parametrize(
    ("active", "experts", "pair_bytes", "most"),
    [(1, 128, 270_336, 259), (16, 128, 270_336, 831), (4, 8, 1_769_472, 47), (1, 8, 100, 18), (1, 1, 1, 2),
     (4, 4, 10**9, 1), (4, 4, 0, 36), (0, 8, 10, 2)],
)  # fmt: skip
def test_most_naive_pairs(active, experts, pair_bytes, most):
    """Up to 40 MB that are read again, as of 259 pairs that meet 111 of 128 experts, and 2.5 pairs per group."""
    assert moe_rules.most_naive(active, experts, pair_bytes) == most


def test_few_warps_are_for_small_tiles_of_16_bits():
    """One or two warps multiply 16 pairs by 16 ranks; more rows, more ranks and wider elements would spill there."""

    def warps(slices: int, hidden: int, rank: int = 16, block_m: int = 16, itemsize: int = 2) -> int:
        form = ExpertForm(128, 8, slices, 4, 128, rank, rank, hidden, 768, factor=8 // slices, block_m=block_m)
        return moe_rules.choose_shrink(moe_rules.Work(form, False, 4, itemsize)).num_warps

    for layer in ((2, 2048), (1, 14336)):
        assert warps(*layer) == 1
        for form in ({"rank": 64}, {"block_m": 64}, {"itemsize": 4}):
            assert warps(*layer, **form) == 4


@pytest.mark.parametrize("hidden", [16, 500, 2048, 14336])
def test_every_split_has_work(hidden: int):
    for slices, tokens, experts, adapters, rank in product((1, 2), (1, 32, 4096), (8, 128), (1, 4, 32), (4, 16, 64)):
        block_m = moe_rules.block_size(tokens * 2, adapters, experts)
        form = ExpertForm(tokens, 2, slices, adapters, experts, rank, rank, hidden, 512, factor=2, block_m=block_m)
        chosen = moe_rules.choose_shrink(moe_rules.Work(form, False, adapters, 2))
        assert (chosen.split_k - 1) * min(chosen.block_k, block_at_least(hidden)) < hidden


def test_x_may_have_any_strides(device: str):
    world = World(Case(), device)
    given = world.given(moe_align.moe_lora_align_block_size)
    given = given._replace(x=world.x.t().contiguous().t())
    fused(given, world.case.rank, world.case.top_k, world.switches)
    world.check(given.output)


@pytest.mark.parametrize(
    ("shrink", "expand", "message"),
    [
        ((24, *NUMBERS[1:]), NUMBERS, "shrink_block_size_m"),
        ((32, *NUMBERS[1:]), NUMBERS, "must be equal"),
        ((32, *NUMBERS[1:]), (32, *NUMBERS[1:]), "alignment"),
        ((*NUMBERS[:4], 3, *NUMBERS[5:]), NUMBERS, "shrink_num_warps is 3, must be a power of two"),
        (NUMBERS, (*NUMBERS[:5], 0, 1), "expand_num_stages is 0"),
    ],
)
def test_blocks_that_do_not_fit(shrink, expand, message, device):
    with pytest.raises(ValueError, match=message):
        run(World(Case(), device), How((shrink, expand)))


def test_active_adapters_are_none_or_more_and_the_small_batch_takes_low_ranks(device):
    with pytest.raises(ValueError, match="num_active_loras is -1"):
        run(World(Case(), device), How(active=-1))
    world = World(Case(naive=True, rank=72), device)
    given = world.given(moe_align.moe_lora_align_block_size)
    operands = (given.expert_ids, given.mapping, world.case.top_k, given.enabled, False)
    with pytest.raises(ValueError, match="small-batch"):
        _run_fused_moe_lora_small_batch(*given[:5], *operands)
