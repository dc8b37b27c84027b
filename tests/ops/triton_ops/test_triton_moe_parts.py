"""Shrink and expand of fused MoE LoRA as ops of their own: one after the other they give the whole op's result."""

from typing import Any

import pytest
import torch

from punica.ops.triton_ops import fused_moe_lora, fused_moe_lora_expand, fused_moe_lora_shrink, moe_align
from tests.ops.moe_cases import CASES, Case, World

NUMBERS = (16, 32, 32, 1, 4, 2)
NAMES = ("plain", "naive", "gate and up", "down", "bfloat16", "rank 20 sorted", "disabled", "nobody", "no token",
         "true ranks", "true ranks, overwrite")  # fmt: skip


class Parts:
    """Both ops on one case."""

    def __init__(self, case: Case, device: str) -> None:
        self.world = World(case, device)
        self.given = given = self.world.given(moe_align.moe_lora_align_block_size)
        routing = (given.topk_weights, given.sorted_ids, given.expert_ids, given.counts, given.mapping)
        self.rest = (*routing, case.rank, case.top_k, given.lora_ids, case.slots, given.enabled)

    def intermediate(self, planes: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        case = self.world.case
        shape = (case.slices, case.tokens, case.top_k, case.rank)
        return torch.zeros(*(() if planes is None else (planes,)), *shape, dtype=dtype, device=self.world.x.device)

    def shrink(self, low: torch.Tensor, split_k: int = 1, **changes: Any) -> None:
        given = self.given
        numbers, ranks = (*NUMBERS, split_k), given.lora_ranks
        x = changes.get("x", given.x)
        fused_moe_lora_shrink(low, x, given.lora_a, *self.rest, *numbers, self.world.case.down, lora_ranks=ranks)

    def expand(self, low: torch.Tensor) -> torch.Tensor:
        given, (down, _, *columns) = self.given, self.world.switches
        numbers, ranks = (*NUMBERS, 1), given.lora_ranks
        fused_moe_lora_expand(given.output, low, given.lora_b, *self.rest, *numbers, down, *columns, lora_ranks=ranks)
        return given.output


@pytest.mark.parametrize(("name", "planes"), [(name, 3 if i % 2 else None) for i, name in enumerate(NAMES)])
def test_one_after_the_other(name: str, planes: int | None, device: str):
    parts = Parts(CASES[name], device)
    low = parts.intermediate(planes)
    parts.shrink(low, planes or 1)
    parts.world.check(parts.expand(low))


def test_the_bits_are_those_of_the_whole_op(device: str):
    parts = Parts(CASES["gate and up"], device)
    whole = parts.world.given(moe_align.moe_lora_align_block_size)
    numbers = (*NUMBERS, 1)
    fused_moe_lora(*whole[:4], *parts.rest, *numbers, *numbers, *parts.world.switches)
    low = parts.intermediate()
    parts.shrink(low)
    assert torch.equal(parts.expand(low), whole.output)


def test_shrink_writes_the_true_ranks_of_assigned_pairs_alone(device: str):
    """In the dtype of its output, which is the input's here."""
    parts = Parts(CASES["true ranks"].but(dtype=torch.float16), device)
    low = parts.intermediate(dtype=torch.float16).fill_(7)
    parts.shrink(low)
    world = parts.world
    wanted = torch.full_like(low, 7).double()
    for t, j, slot, expert in world.used():
        row = world.real_x[t * world.case.top_k + j if world.case.down else t]
        for s, a in enumerate(world.real_a):
            rank = int(world.ranks[s, slot])
            wanted[s, t, j, :rank] = (a[slot, expert, :rank].double() @ row.double()).to(wanted)
    torch.testing.assert_close(low.double(), wanted, rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"low": lambda parts: parts.intermediate()[..., :-1]}, ValueError, "intermediate"),
        ({"x": torch.zeros(1, 3)}, ValueError, "qcurr_hidden_states"),
        ({"split_k": 2}, ValueError, r"contiguous \(2, "),
        ({"split_k": 0}, ValueError, "split_k is 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="checked on the CPU")
def test_refusals(change: dict[str, Any], error: type, message: str):
    parts = Parts(CASES["plain"], "cpu")
    given = dict(change)
    low = given.pop("low", Parts.intermediate)(parts)
    before = low.clone()
    with pytest.raises(error, match=message):
        parts.shrink(low, **given)
    assert torch.equal(low, before)
