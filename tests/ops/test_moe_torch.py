"""Fused MoE LoRA and its alignment in torch: the reference's meaning, fast."""

import itertools

import pytest
import torch

from punica.ops import moe_torch, reference
from punica.ops.experts import Switches
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


@pytest.mark.parametrize(
    ("experts", "slots", "top_k", "slices"),
    [(128, 16, 8, 2), (128, 4, 1, 2), (64, 16, 2, 1), (8, 16, 2, 2), (128, 16, 2, 1)],
)
def test_many_experts_and_adapters(experts, slots, top_k, slices):
    world = World(Case(48, top_k, experts, slots, 4, 16, 12, slices))
    given = world.given(moe_torch.moe_lora_align_block_size)
    moe_torch.fused_moe_lora(given, 4, top_k, world.switches)
    world.check(given.output)


def routing(tokens: int, top_k: int, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some experts out of range, some tokens without adapter."""
    generator = torch.Generator().manual_seed(tokens + experts)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)
    return ids, torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "slots"),
    [(4096, 8, 512, 32), (100, 2, 8, 3), (1, 1, 1, 1), (3, 8, 300, 2), (0, 2, 4, 2)],
)
@pytest.mark.parametrize("parallel", [False, True])
def test_alignment(tokens, top_k, experts, slots, parallel):
    """Every pair of an enabled slot stands once, in a block of its expert, in order."""
    ids, mapping = routing(tokens, top_k, experts, slots)
    expert_map = None
    if parallel:
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[::2] = torch.arange(-(-experts // 2), dtype=torch.int32)
    enabled = torch.ones(slots + 1, dtype=torch.int32)
    enabled[-1] = 0
    enabled[slots // 2] = int(slots == 1)
    blocks = -(-(tokens * top_k + experts * 15) // 16)
    outputs = [torch.full((size,), -5, dtype=torch.int32) for size in (slots * blocks * 16, slots * blocks, slots)]
    lora_ids = torch.tensor([-1, *range(slots)], dtype=torch.int32)
    moe_torch.moe_lora_align_block_size(
        ids, mapping, experts, 16, slots, blocks * 16, blocks, *outputs, enabled, lora_ids, expert_map
    )
    sorted_ids, expert_ids, counts = outputs[0].view(slots, -1), outputs[1].view(slots, -1), outputs[2]
    flat, owners, pairs = ids.reshape(-1).tolist(), mapping.tolist(), tokens * top_k
    to_local = list(range(experts)) if expert_map is None else expert_map.tolist()
    wanted: dict[tuple[int, int], list[int]] = {}
    for pair, expert in enumerate(flat):
        slot = owners[pair // top_k]
        if slot >= 0 and enabled[slot] and 0 <= expert < experts and to_local[expert] >= 0:
            wanted.setdefault((slot, to_local[expert]), []).append(pair)
    for slot in range(slots):
        if not enabled[slot]:
            assert set(sorted_ids[slot].tolist()) <= {-5}
            continue
        row, of_block = sorted_ids[slot].tolist(), expert_ids[slot].tolist()
        used = int(counts[slot])
        assert used % 16 == 0
        assert set(row[used:]) <= {pairs}
        assert set(of_block[used // 16 :]) <= {-1}
        found: dict[int, list[int]] = {}
        for block, expert in enumerate(of_block[: used // 16]):
            found.setdefault(expert, []).extend(row[16 * block : 16 * block + 16])
        assert list(found) == sorted(found)
        mine = {expert: own for (of, expert), own in wanted.items() if of == slot}
        assert {expert: [i for i in members if i < pairs] for expert, members in found.items()} == mine
        for members in found.values():  # padding stands behind the pairs
            assert all(i == pairs for i in itertools.dropwhile(lambda i: i < pairs, members))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_ids": torch.zeros(3, dtype=torch.long)}, ValueError, "topk_ids"),
        ({"topk_ids": torch.zeros(3, 2)}, TypeError, "topk_ids"),
        ({"token_lora_mapping": torch.zeros(2, dtype=torch.int32)}, ValueError, "token_lora_mapping"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"adapter_enabled": torch.zeros(2, dtype=torch.int32)}, ValueError, "adapter_enabled"),
        ({"adapter_enabled": torch.zeros(3)}, ValueError, "adapter_enabled"),
        ({"sorted_token_ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "sorted_token_ids"),
        ({"expert_map": torch.zeros(4)}, TypeError, "expert_map"),
        ({"expert_map": torch.zeros(3, dtype=torch.int32)}, ValueError, "expert_map has 3 entries; 4 are needed"),
        ({"expert_map": torch.zeros(8, dtype=torch.int32)[::2]}, ValueError, "expert_map has strides"),
        ({"adapter_enabled": torch.ones(6, dtype=torch.int32)[::2]}, ValueError, "adapter_enabled has strides"),
        ({"lora_ids": torch.ones(4, dtype=torch.int32)[::2]}, ValueError, "lora_ids has strides"),
        ({"lora_ids": torch.ones(1, 2, dtype=torch.int32)}, ValueError, "lora_ids has shape"),
        ({"lora_ids": torch.ones(2, dtype=torch.long)}, TypeError, "lora_ids"),
        (
            {"max_num_tokens_padded": 9, "sorted_token_ids": torch.zeros(18, dtype=torch.int32)},
            ValueError,
            "max_num_tokens_padded is 9 .* can need 10 and 5",
        ),
        (
            {"max_num_m_blocks": 4, "expert_ids": torch.zeros(8, dtype=torch.int32)},
            ValueError,
            "max_num_m_blocks 4; 6 pairs of 4 experts",
        ),
    ],
)
def test_alignment_refuses(change, error, message):
    good = {
        "topk_ids": torch.zeros(3, 2, dtype=torch.long), "token_lora_mapping": torch.zeros(3, dtype=torch.int32),
        "num_experts": 4, "block_size": 2, "max_loras": 2, "max_num_tokens_padded": 10, "max_num_m_blocks": 5,
        "sorted_token_ids": torch.zeros(20, dtype=torch.int32), "expert_ids": torch.zeros(10, dtype=torch.int32),
        "num_tokens_post_pad": torch.zeros(2, dtype=torch.int32),
        "adapter_enabled": torch.ones(3, dtype=torch.int32), "lora_ids": torch.tensor([0, 1, -1], dtype=torch.int32),
    }  # fmt: skip
    moe_torch.moe_lora_align_block_size(**good)
    before = good["sorted_token_ids"].clone()
    with pytest.raises(error, match=message):
        moe_torch.moe_lora_align_block_size(**(good | change))
    assert torch.equal(good["sorted_token_ids"], before)


def test_nothing_is_written_before_all_is_checked():
    world = World(Case())
    given = world.given(moe_torch.moe_lora_align_block_size)
    with pytest.raises(ValueError, match="offset 99"):
        moe_torch.fused_moe_lora(given, world.case.rank, world.case.top_k, Switches(offset=99))
    assert torch.equal(given.output, world.y)
