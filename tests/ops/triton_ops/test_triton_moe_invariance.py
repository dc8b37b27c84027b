"""Batch invariance of experts: with the switch on, a token has the same bits alone, in part of its batch, in all of it,
and whether its pairs were sorted or stand by themselves.
"""

import copy

import pytest
import torch

from punica.ops.triton_ops import Options, moe_align
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from tests.ops.moe_cases import Case, World

SMALL = {
    "gate and up": Case(tokens=8, slices=2, dtype=torch.float16),
    "down, true ranks": Case(tokens=8, down=True, rank=20, ranks=(3, 20, 0), dtype=torch.bfloat16),
    "FP8": Case(tokens=8, slices=2, fp8="channel", dtype=torch.float16),
    "FP8, blocks": Case(tokens=6, fp8="blocks", hidden=70, rank=20, dtype=torch.float16),
    "w8a8": Case(tokens=6, fp8="channel", w8a8=True, dtype=torch.float16),
}
FULL = {
    "model, bfloat16": Case(256, 4, 16, 8, 16, 2048, 768, 2, torch.bfloat16),
    "model, true ranks": Case(256, 4, 16, 4, 64, 1024, 768, 1, torch.float16, ranks=(64, 8, 33, 0), down=True),
    "model, FP8": Case(256, 4, 16, 8, 16, 2048, 768, 2, torch.bfloat16, fp8="channel"),
    "model, FP8, rank 64": Case(256, 4, 16, 4, 64, 1024, 768, 1, torch.float16, fp8="channel", down=True),
}


def added(world: World, rows: slice, naive: bool) -> torch.Tensor:
    """The rows of the output for these tokens of the world, as a batch of their own."""
    part, case = copy.copy(world), world.case
    tokens = len(range(*rows.indices(case.tokens)))
    part.case = case.but(tokens=tokens, naive=naive)
    own = slice(rows.start * case.top_k, rows.stop * case.top_k) if case.down else rows
    part.x, part.y = world.x[own], world.y[rows]
    part.mapping, part.topk_ids, part.weights = world.mapping[rows], world.topk_ids[rows], world.weights[rows]
    if world.x_scale is not None:
        part.x_scale = world.x_scale[own]
    given = part.given(moe_align.moe_lora_align_block_size)
    active = max(1, len(part.mapping.unique()))
    fused(given, case.rank, case.top_k, part.switches, How(active=active, options=Options(batch_invariant=True)))
    return given.output


def check(case: Case, device: str) -> None:
    world = World(case, device)
    world.weights = world.weights.to(device)
    whole = added(world, slice(0, case.tokens), False)
    world.check(whole)
    middle, last = case.tokens // 2, case.tokens - 1
    parts = [(0, middle), (middle // 2, case.tokens), (middle, middle + 1), (last, last + 1), (0, 1), (3, 5)]
    for start, stop in parts:
        for naive in (False, True):
            assert torch.equal(added(world, slice(start, stop), naive), whole[start:stop]), (start, stop, naive)


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.gpu) for name in FULL)])
def test_a_token_alone_and_in_company(name, device):
    check((SMALL | FULL)[name], device)
