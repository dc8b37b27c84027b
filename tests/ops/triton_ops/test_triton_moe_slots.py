"""LoRA on experts: launches do not grow with the number of slots; shrink and expand as ops of their own."""

from typing import Any

import pytest
import torch

from punica.metadata import LoRAMapping
from punica.ops.experts import ExpertLoRAWeights, Experts
from punica.ops.triton_ops import fused_moe_lora_expand, fused_moe_lora_shrink, moe_align, moe_ops, moe_rules
from punica.ops.triton_ops.launch import Launch
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU
from tests.ops.moe_cases import CASES, Case, World

MAPPING = (7, -1, 3, 7, 0, 3, 7, 5, 0)
LIVE = 4


@pytest.fixture
def launches(monkeypatch) -> list[tuple[Launch, tuple]]:
    """Every launch and its counts; none is made."""
    seen: list[tuple[Launch, tuple]] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, tensors, counts, *rest: seen.append((launch, counts)))
    monkeypatch.setattr(moe_ops, "_PLANS", {})
    return seen


def added(backend: type, case: Case, step: tuple[int, ...], device: str) -> tuple[World, torch.Tensor]:
    """One product of a layer, y with it, of a call on the first ``case.tokens`` rows of a step."""
    world = World(case.but(mapping=step[: case.tokens]), device)
    wrapper = backend(64, 64, device, max_loras=case.slots)
    ids = tuple(slot + 1 for slot in step)
    wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, case.slots + 1)), case.slots + 1, 100)
    weights = ExpertLoRAWeights(tuple(world.a), tuple(world.b), world.enabled, world.ranks, None, world.switches)
    y = world.y.clone()
    wrapper.add_lora_experts(y, world.x, weights, wrapper.assign_pairs(world.topk_ids, world.weights, None, weights))
    return world, y


def case_of(slots: int, tokens: int) -> Case:
    ranks = tuple(1 + slot % 20 for slot in range(slots))
    return Case(tokens=tokens, slots=slots, rank=20, ranks=ranks, slices=2, hidden=16, width=16)


def of_launch(launch: Launch, counts: tuple) -> tuple[Any, ...]:
    """Grid, and of a product its pairs, its tiles, and the lanes in which a program looks for a tile's slot."""
    constants = dict(zip(launch.kernel.arg_names[-len(launch.tail) :], launch.tail, strict=True))
    pairs = getattr(constants["SHAPE"], "pairs", None)
    return (launch.grid, *(() if pairs is None else (counts[:2], pairs.block_slots)))


@pytest.mark.parametrize("naive", [False, True])
def test_launches_follow_the_adapters_in_use(naive, launches, monkeypatch, device):
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if naive else 0)
    of_slots = {}
    for slots in (16, 64, 256):
        added(PunicaWrapperGPU, case_of(slots, len(MAPPING)), MAPPING, device)
        of_slots[slots] = [of_launch(*one) for one in launches]
        launches.clear()
    assert of_slots[256] == of_slots[64] == of_slots[16]
    *alignment, shrink, expand = of_slots[256]
    assert [grid for (grid,) in alignment] == ([] if naive else [(1, 16, 1)]), "a place for each row, rounded up"
    pairs, tiles = len(MAPPING) * 2, LIVE * 4
    assert shrink[1] == expand[1] == (pairs, pairs if naive else tiles)
    assert shrink[2] == expand[2] == (2 if naive else 16)


@pytest.mark.parametrize("naive", [False, True])
def test_four_adapters_in_256_slots(naive, monkeypatch, device):
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if naive else 0)
    step = tuple(255 - slot if slot >= 0 else -1 for slot in MAPPING)
    world, y = added(PunicaWrapperGPU, case_of(256, 3), step, device)
    world.check(y)


@pytest.mark.parametrize("backend", [PunicaWrapperCPU, PunicaWrapperGPU])
@pytest.mark.parametrize(
    ("case", "step"), [((40, 2), range(39, 0, -1)), ((3, 4), (-1, 2, 0, 1))], ids=["first rows", "all slots"]
)
def test_a_call_finds_the_slots_of_its_rows(case, step, backend, monkeypatch, device):
    """The first rows of a step have the last slots of the list."""
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 0)
    world, y = added(backend, case_of(*case), tuple(step), device)
    world.check(y)


NUMBERS = (16, 32, 32, 1, 4, 2)
NAMES = ("plain", "naive", "gate and up", "down", "bfloat16", "rank 20 sorted", "disabled", "nobody", "no token",
         "true ranks", "true ranks, overwrite")  # fmt: skip


def intermediate(world: World, planes: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    case = world.case
    shape = (case.slices, case.tokens, case.top_k, case.rank)
    return torch.zeros(*(() if planes is None else (planes,)), *shape, dtype=dtype, device=world.x.device)


def rest_of(world: World, given: Experts, split_k: int) -> tuple:
    """What both ops take behind the weights."""
    routing = (given.topk_weights, given.sorted_ids, given.expert_ids, given.counts, given.mapping)
    sizes = (world.case.rank, world.case.top_k, given.lora_ids, world.case.slots, given.enabled)
    return *routing, *sizes, *NUMBERS, split_k, world.case.down


def shrink(world: World, low: torch.Tensor, split_k: int = 1, x: torch.Tensor | None = None) -> Experts:
    given = world.given(moe_align.moe_lora_align_block_size)
    x, rest = given.x if x is None else x, rest_of(world, given, split_k)
    fused_moe_lora_shrink(low, x, given.lora_a, *rest, lora_ranks=given.lora_ranks)
    return given


@pytest.mark.parametrize(("name", "planes"), [(name, 3 if i % 2 else None) for i, name in enumerate(NAMES)])
def test_one_after_the_other(name: str, planes: int | None, device: str):
    world = World(CASES[name], device)
    given = shrink(world, low := intermediate(world, planes), planes or 1)
    rest = (*rest_of(world, given, 1), world.case.offset, world.case.add_inputs)
    fused_moe_lora_expand(given.output, low, given.lora_b, *rest, lora_ranks=given.lora_ranks)
    world.check(given.output)


def test_shrink_writes_the_true_ranks_of_assigned_pairs_alone(device: str):
    """In the dtype of its output, which is the input's here."""
    world = World(CASES["true ranks"].but(dtype=torch.float16), device)
    shrink(world, low := intermediate(world, dtype=torch.float16).fill_(7))
    wanted = torch.full_like(low, 7).double()
    for t, j, slot, expert in world.used():
        for s, a in enumerate(world.real_a):
            rank = int(world.ranks[s, slot])
            wanted[s, t, j, :rank] = a[slot, expert, :rank] @ world.real_x[t]
    torch.testing.assert_close(low.double(), wanted, rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": -1}, "intermediate"),
        ({"x": torch.zeros(1, 3)}, "qcurr_hidden_states"),
        ({"split_k": 2}, r"contiguous \(2, "),
        ({"split_k": 0}, "split_k is 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="checked on the CPU")
def test_refusals(change: dict[str, Any], message: str):
    world, given = World(CASES["plain"]), dict(change)
    low = intermediate(world)[..., : given.pop("columns", None)]
    with pytest.raises(ValueError, match=message):
        shrink(world, low, **given)
    assert not low.any()
