"""Shrink and expand of fused MoE LoRA as ops of their own: one after the other they give the whole op's result."""

from importlib import import_module
from typing import Any

import pytest
import torch

from punica import ops
from punica.ops.quant import quantize_per_token
from punica.ops.triton_ops import (
    fused_moe_lora,
    fused_moe_lora_expand,
    fused_moe_lora_expand_fp8,
    fused_moe_lora_shrink,
    fused_moe_lora_shrink_fp8,
    moe_align,
)
from tests.ops.moe_cases import CASES, FP8_CASES, SCHEMES, Case, World

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
        scheme = SCHEMES[case.fp8] if case.fp8 else {}
        self.options: dict[str, Any] = {"lora_ranks": given.lora_ranks}
        self.fp8: dict[str, Any] = self.options | {"per_channel_quant": scheme.get("per_channel_quant", False)}
        if "group_n" in scheme:
            self.fp8["block_shape"] = [scheme["group_n"], scheme["group_k"]]

    def intermediate(self, planes: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        case = self.world.case
        shape = (case.slices, case.tokens, case.top_k, case.rank)
        lead = () if planes is None else (planes,)
        return torch.zeros(*lead, *shape, dtype=dtype, device=self.world.x.device)

    def shrink(self, low: torch.Tensor, split_k: int = 1, **changes: Any) -> None:
        given, case = self.given, self.world.case
        head = (low, changes.get("x", given.x), given.lora_a, *self.rest, *NUMBERS, split_k)
        if case.fp8:
            scales = (self.world.a_scale, self.world.x_scale)
            fused_moe_lora_shrink_fp8(*head, *scales, case.down, use_fp8_w8a8=case.w8a8, **self.fp8)
        else:
            fused_moe_lora_shrink(*head, case.down, **self.options)

    def expand(self, low: torch.Tensor, act_scale: torch.Tensor | None = None) -> torch.Tensor:
        given, (down, _, offset, add_inputs) = self.given, self.world.switches
        head = (given.output, low, given.lora_b, *self.rest, *NUMBERS, 1)
        if self.world.case.fp8:
            more = {"offset": offset, "add_inputs": add_inputs}
            fused_moe_lora_expand_fp8(*head, self.world.b_scale, act_scale, down, **more, **self.fp8)
        else:
            fused_moe_lora_expand(*head, down, offset, add_inputs, **self.options)
        return given.output


@pytest.mark.parametrize(("name", "planes"), [(name, 3 if i % 2 else None) for i, name in enumerate(NAMES)])
def test_one_after_the_other(name: str, planes: int | None, device: str):
    parts = Parts(CASES[name], device)
    low = parts.intermediate(planes)
    parts.shrink(low, planes or 1)
    parts.world.check(parts.expand(low))


@pytest.mark.parametrize("name", ["per tensor", "per channel, naive", "e5m2", "blocks", "true ranks", "w8a8, blocks"])
def test_weights_in_fp8(name: str, device: str):
    parts = Parts(FP8_CASES[name], device)
    low = parts.intermediate(2)
    parts.shrink(low, 2)
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


def test_the_intermediate_may_be_rounded_to_fp8(device: str):
    parts = Parts(FP8_CASES["per channel"], device)
    low = parts.intermediate()
    parts.shrink(low)
    _, scale = quantize_per_token(low.flatten(1, 2), 0)
    size = float(parts.world.expected.abs().max())
    found = parts.expand(low, scale[0] if scale.ndim == 3 else scale)
    torch.testing.assert_close(found.double() / size, parts.world.expected / size, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"low": lambda parts: parts.intermediate()[..., :-1]}, ValueError, "intermediate"),
        ({"low": lambda parts: parts.intermediate().double()}, TypeError, "intermediate"),
        ({"low": lambda parts: parts.intermediate(2)}, ValueError, r"contiguous \(1, "),
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


def test_names_and_schemas():
    for name in ("fused_moe_lora_shrink", "fused_moe_lora_expand"):
        assert getattr(ops, name) is globals()[name]
        assert getattr(import_module("punica.ops.triton_ops.fused_moe_lora"), name) is globals()[name]
        for op in (name, f"{name}_fp8"):
            schema = getattr(torch.ops.punica, op).default._schema
            written = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
            assert written == ["intermediate" if "shrink" in op else "output"]
