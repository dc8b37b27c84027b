"""Fused MoE LoRA kernels on FP8 weights: every form agrees with float64 on what the values stand for."""

from typing import Any

import pytest
import torch
from test_triton_moe import NUMBERS, run

from punica.ops import quant
from punica.ops.triton_ops import fused_moe_lora_fp8, moe_align
from punica.ops.triton_ops.moe_plan import How
from punica.ops.triton_ops.schedules import Schedule
from tests.ops.moe_cases import CASES, FP8_CASES, SCHEMES, World

QUICK = ("per channel, naive", "e5m2", "blocks", "true ranks", "w8a8, blocks")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FP8_CASES]
FORMS = {
    "rows": (Schedule(0, 16, 32, 4, 2, 2), Schedule(0, 32, 16, 4, 2)),
    "tiles": (Schedule(16, 16, 32, 4, 2, 2), Schedule(16, 32, 64, 4, 2, tiles_n=2)),
    "tiles, one block": (Schedule(16, 16, 32, 4, 2, 2), Schedule(16, 32, 64, 4, 2)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EVERY)
def test_two_stages(name: str, form: str, device: str, use_expert_schedules):
    use_expert_schedules(*FORMS[form])
    world = World(FP8_CASES[name], device)
    world.check(run(world, How(active=3)))


def flat(world: World, **changes: Any) -> torch.Tensor:
    """The op by its own name."""
    given = world.given(moe_align.moe_lora_align_block_size)
    scheme = SCHEMES[world.case.fp8] if world.case.fp8 else {}
    down, sharded, offset, add_inputs = world.switches
    blocks = [scheme["group_n"], scheme["group_k"]] if "group_n" in scheme else None
    options = {
        "lora_a_scale_stacked": world.a_scale, "lora_b_scale_stacked": world.b_scale, "shrink_act_scale": world.x_scale,
        "mul_routed_weight": down, "fully_sharded": sharded, "offset": offset, "add_inputs": add_inputs,
        "use_fp8_w8a8": world.case.w8a8, "per_channel_quant": scheme.get("per_channel_quant", False),
        "block_shape": blocks, "lora_ranks": given.lora_ranks,
    }  # fmt: skip
    count, split_k = world.case.slots, changes.pop("split_k", 1)
    try:
        fused_moe_lora_fp8(
            *given[:9], world.case.rank, world.case.top_k, given.lora_ids, count, given.enabled,
            *NUMBERS[:-1], split_k, *NUMBERS, **(options | changes),
        )  # fmt: skip
    except (TypeError, ValueError):
        assert torch.equal(given.output, world.y)
        raise
    return given.output


@pytest.mark.parametrize("name", ["per tensor", "per channel, naive", "odd blocks, naive", "w8a8", "no token"])
def test_flat_op(name: str, device: str):
    world = World(FP8_CASES[name], device)
    world.check(flat(world))


@pytest.mark.parametrize("name", ["plain", "gate and up, naive", "down", "true ranks"])
@pytest.mark.parametrize("nothing", [None, []], ids=["none", "empty"])
def test_without_scales_it_is_the_other_op(name: str, nothing: Any, device: str):
    world = World(CASES[name], device)
    world.check(flat(world, lora_a_scale_stacked=nothing, lora_b_scale_stacked=nothing))


@pytest.mark.parametrize("name", ["w8a8", "w8a8, naive", "blocks", "w8a8, down"])
def test_what_lies_between_may_be_rounded(name: str, device: str):
    """By given scales, one per pair, or with blocks one per pair and group of ranks; shared by the slices."""
    world = World(FP8_CASES[name], device)
    case, group = world.case, SCHEMES[FP8_CASES[name].fp8].get("group_k", 0)
    low = torch.zeros(case.slices, case.tokens * case.top_k, case.rank)
    for t, j, slot, expert in world.used():
        pair = t * case.top_k + j
        row = world.real_x[pair if case.down else t]
        for s, a in enumerate(world.real_a):
            rank = int(world.ranks[s, slot])
            low[s, pair, :rank] = (a[slot, expert, :rank] @ row).float()
    _, scale = quant.quantize_per_token(low, group)
    result = flat(world, expand_act_scale=scale.to(device), split_k=2)
    size = float(world.expected.abs().max())
    torch.testing.assert_close(result.double() / size, world.expected / size, rtol=5e-2, atol=5e-2)
    assert not torch.equal(result, flat(world))


def test_scales_may_have_any_strides(device: str):
    world = World(FP8_CASES["per channel"].but(slices=1), device)
    spread = [torch.stack((scale, scale), -1)[..., 0] for scale in world.a_scale]
    assert not spread[0].is_contiguous()
    world.check(flat(world, lora_a_scale_stacked=spread))
    world = World(FP8_CASES["per channel"].but(slices=1), device)
    world.check(flat(world, lora_b_scale_stacked=[scale[..., None] for scale in world.b_scale]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="checked on the CPU")
@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("per channel", {"lora_a_scale_stacked": None}, TypeError, "lora_a_scale is missing"),
        ("per channel", {"lora_b_scale_stacked": [torch.ones(3, 4, 40)]}, ValueError, "1 tensors.*2 slices"),
        ("per channel", {"block_shape": [16, 0]}, ValueError, "two ints"),
        ("per channel", {"block_shape": [16, 16]}, ValueError, "exclude each other"),
        ("per channel", {"expand_act_scale": torch.ones(5)}, ValueError, r"expand_act_scale.*\(5,\)"),
        ("per channel", {"use_fp8_w8a8": True}, TypeError, "needs float8"),
        ("w8a8", {"shrink_act_scale": None}, ValueError, "required for fp8 activations"),
        ("w8a8", {"use_fp8_w8a8": False}, TypeError, "use_fp8_w8a8"),
        ("per channel", {"lora_a_scale_stacked": [], "lora_b_scale_stacked": []}, TypeError, "is missing"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        flat(World(FP8_CASES[name]), **changes)
