"""Fused MoE LoRA and its alignment in torch: the reference's meaning, fast."""

import pytest
import torch

from punica.ops import moe_torch, reference
from tests.ops.moe_cases import CASES, FP8_CASES, Case, World


@pytest.mark.parametrize("name", [*CASES, *(f"FP8, {name}" for name in FP8_CASES)])
def test_fused_op(name):
    world = World((CASES | {f"FP8, {name}": case for name, case in FP8_CASES.items()})[name])
    given = world.given(moe_torch.moe_lora_align_block_size)
    moe_torch.fused_moe_lora(given, world.case.rank, world.case.top_k, world.switches)
    world.check(given.output)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.ranks])
def test_reference(name):
    world = World(CASES[name])
    output = world.y.clone()
    routing = reference.Routing(world.topk_ids, world.weights, world.mapping, world.enabled)
    switches = (world.case.down, world.case.offset, world.case.add_inputs)
    reference.fused_moe_lora(output, world.x, world.a, world.b, routing, *switches)
    world.check(output)


INT, LONG = torch.int32, torch.long


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("topk_ids", torch.zeros(3, dtype=LONG), ValueError, r"topk_ids .*\(3,\)"),
        ("topk_ids", torch.zeros(3, 2), TypeError, "topk_ids"),
        ("token_lora_mapping", torch.zeros(2, dtype=INT), ValueError, r"token_lora_mapping .*\(2,\).*rows 3"),
        ("block_size", 0, ValueError, "block_size.* 0"),
        ("adapter_enabled", torch.zeros(2, dtype=INT), ValueError, "adapter_enabled"),
        ("adapter_enabled", torch.zeros(3), ValueError, "adapter_enabled"),
        ("adapter_enabled", torch.ones(6, dtype=INT)[::2], ValueError, "adapter_enabled has strides"),
        ("sorted_token_ids", torch.zeros(3, dtype=INT), ValueError, "sorted_token_ids has 3"),
        ("expert_map", torch.zeros(4), TypeError, "expert_map"),
        ("expert_map", torch.zeros(3, dtype=INT), ValueError, "expert_map has 3 entries; 4 are needed"),
        ("expert_map", torch.zeros(8, dtype=INT)[::2], ValueError, "expert_map has strides"),
        ("lora_ids", torch.ones(4, dtype=INT)[::2], ValueError, "lora_ids has strides"),
        ("lora_ids", torch.ones(1, 2, dtype=INT), ValueError, r"lora_ids .*\(1, 2\)"),
        ("lora_ids", torch.ones(2, dtype=LONG), TypeError, "lora_ids"),
    ],
)
def test_alignment_refuses(name, value, error, message):
    good = {
        "topk_ids": torch.zeros(3, 2, dtype=LONG), "token_lora_mapping": torch.zeros(3, dtype=INT),
        "num_experts": 4, "block_size": 2, "max_loras": 2, "max_num_tokens_padded": 10, "max_num_m_blocks": 5,
        "sorted_token_ids": torch.zeros(20, dtype=INT), "expert_ids": torch.zeros(10, dtype=INT),
        "num_tokens_post_pad": torch.zeros(2, dtype=INT), "adapter_enabled": torch.ones(3, dtype=INT),
        "lora_ids": torch.tensor([0, 1, -1], dtype=INT),
    }  # fmt: skip
    moe_torch.moe_lora_align_block_size(**good)
    before = good["sorted_token_ids"].clone()
    with pytest.raises(error, match=message):
        moe_torch.moe_lora_align_block_size(**good | {name: value})
    assert torch.equal(good["sorted_token_ids"], before)


def gapped(tensor):
    """The same values in every second place of the memory."""
    return torch.stack((tensor, tensor), -1)[..., 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g: {"lora_ranks": torch.ones(2, 3, dtype=INT)}, ValueError, r"lora_ranks .*\(2, 3\).*slices 1"),
        (lambda g: {"x": g.x[:8]}, ValueError, r"qcurr_hidden.*\(8, 48\).*rows 9 as in topk_weights"),
        (lambda g: {"x": g.x[:, :47]}, ValueError, "hidden size 48 as in lora_a_stacked"),
        (lambda g: {"x": g.x.half()}, TypeError, "qcurr_hidden_states.*float16"),
        (lambda g: {"x": g.x.to(torch.float8_e4m3fn)}, TypeError, "fused_moe_lora_fp8"),
        (lambda g: {"mapping": torch.zeros(8, dtype=INT)}, ValueError, r"token_lora_mapping .*\(8,\)"),
        (lambda g: {"counts": None}, ValueError, "num_tokens_post_padded"),
        (lambda g: {"sorted_ids": None, "counts": None}, ValueError, "expert_ids"),
        (lambda g: {"sorted_ids": gapped(g.sorted_ids)}, ValueError, "sorted_token_ids has strides"),
        (lambda g: {"lora_ids": g.lora_ids.repeat(2)}, ValueError, "lora_ids has 8 entries; at most 4 fit"),
        (lambda g: {"lora_b": g.lora_b * 2}, ValueError, "slices"),
        (lambda g: {"lora_a": [g.lora_a[0].transpose(2, 3)]}, ValueError, "contiguous"),
        (lambda g: {"output": g.output[..., :30].contiguous()}, ValueError, "output with 30"),
        (lambda g: {"rank": 9}, ValueError, "max_lora_rank is 9"),
        (lambda g: {"top_k": 3}, ValueError, "top_k_num is 3"),
        (lambda g: {"switches": {"offset": -1}}, ValueError, "offset -1"),
        (lambda g: {"switches": {"offset": 99}}, ValueError, "offset 99"),
        (lambda g: {"switches": {"fully_sharded": True, "add_inputs": False}}, ValueError, "add_inputs=False"),
    ],
)
def test_operands_that_do_not_fit(change, error, message):
    world = World(Case())
    given = world.given(moe_torch.moe_lora_align_block_size)
    changes = change(given)
    rank, top_k = changes.pop("rank", 8), changes.pop("top_k", 2)
    switches = world.switches._replace(**changes.pop("switches", {}))
    with pytest.raises(error, match=message):
        moe_torch.fused_moe_lora(given._replace(**changes), rank, top_k, switches)
    assert torch.equal(given.output, world.y)
