"""Shrink and expand of fused MoE LoRA as ops of their own: one after the other they give the whole op's result."""

from typing import Any

import pytest
import torch

from punica.ops.experts import Experts
from punica.ops.triton_ops import fused_moe_lora_expand, fused_moe_lora_shrink, moe_align
from tests.ops.moe_cases import CASES, World

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
