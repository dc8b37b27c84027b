"""Fused MoE LoRA and its alignment in torch: the reference's meaning, fast."""

import pytest
import torch

from punica.ops import collectives, moe_torch, reference
from punica.ops.collectives import Collectives
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


def routing(tokens: int, top_k: int, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some experts out of range, some tokens without adapter."""
    generator = torch.Generator().manual_seed(tokens + experts)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)
    return ids, torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "slots"),
    [(4096, 8, 512, 32), (100, 2, 8, 3), (16, 1, 1, 1), (3, 8, 300, 2), (0, 2, 4, 2)],
)
@pytest.mark.parametrize("parallel", [False, True])
def test_alignment(tokens, top_k, experts, slots, parallel):
    """Every pair of an enabled slot is there once, in a block of its expert, in order."""
    ids, mapping = routing(tokens, top_k, experts, slots)
    ids[: 16 // top_k], mapping[: 16 // top_k] = 0, 0  # whole blocks have no padding
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
    to_local = list(range(experts)) if expert_map is None else expert_map.tolist()
    flat, owners, pairs = ids.reshape(-1).tolist(), mapping.tolist(), tokens * top_k
    wanted: dict[tuple[int, int], list[int]] = {}
    for pair, expert in enumerate(flat):
        if 0 <= expert < experts and to_local[expert] >= 0:
            wanted.setdefault((owners[pair // top_k], to_local[expert]), []).append(pair)
    for slot, (row, of_block) in enumerate(zip(outputs[0].view(slots, -1), outputs[1].view(slots, -1), strict=True)):
        if not enabled[slot]:
            assert set(row.tolist()) <= {-5}
            continue
        right, right_blocks = [], []
        for expert in sorted(expert for of, expert in wanted if of == slot):
            members = wanted[slot, expert]
            used = -(-len(members) // 16)
            right += members + [pairs] * (used * 16 - len(members))
            right_blocks += [expert] * used
        assert outputs[2][slot] == len(right)
        assert row.tolist() == right + [pairs] * (len(row) - len(right))
        assert of_block.tolist() == right_blocks + [-1] * (len(of_block) - len(right_blocks))


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
        ("max_num_tokens_padded", 9, ValueError, "is 9 .* can need 10 and 5"),
        ("max_num_m_blocks", 4, ValueError, "max_num_m_blocks 4; 6 pairs of 4 experts"),
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
    outputs = {"max_num_tokens_padded": ("sorted_token_ids", 18), "max_num_m_blocks": ("expert_ids", 8)}
    before, bad = good["sorted_token_ids"].clone(), good | {name: value}
    if name in outputs:
        bad[outputs[name][0]] = torch.zeros(outputs[name][1], dtype=INT)
    with pytest.raises(error, match=message):
        moe_torch.moe_lora_align_block_size(**bad)
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
    ],
)
def test_operands_that_do_not_fit(change, error, message):
    world = World(Case())
    given = world.given(moe_torch.moe_lora_align_block_size)
    before, wrong = given.output.clone(), given._replace(**change(given))
    with pytest.raises(error, match=message):
        moe_torch.fused_moe_lora(wrong, world.case.rank, world.case.top_k, world.switches)
    assert torch.equal(given.output, before)


@pytest.mark.parametrize(
    ("rank", "top_k", "switches", "message"),
    [
        (9, 2, {}, "max_lora_rank is 9"),
        (8, 3, {}, "top_k_num is 3"),
        (8, 2, {"offset": -1}, "offset -1"),
        (8, 2, {"offset": 99}, "offset 99"),
        (8, 2, {"fully_sharded": True, "add_inputs": False}, "add_inputs=False"),
    ],
)
def test_numbers_that_do_not_fit(rank, top_k, switches, message):
    world = World(Case())
    given = world.given(moe_torch.moe_lora_align_block_size)
    with pytest.raises(ValueError, match=message):
        moe_torch.fused_moe_lora(given, rank, top_k, world.switches._replace(**switches))
    assert torch.equal(given.output, world.y)


def test_ranks_that_share_the_lanes_of_a_gather_the_intermediate(monkeypatch):
    world, parts = World(Case(ranks=(8, 5, 3), slices=2)), []

    def gather(low):
        parts.append(low.clone())
        return torch.cat((parts * 2)[:2], -1)

    for rank in range(2):
        monkeypatch.setattr(collectives, "_installed", Collectives(lambda: 2, lambda rank=rank: rank, None, gather))
        given = world.given(moe_torch.moe_lora_align_block_size)
        given = given._replace(lora_a=[a[:, :, 4 * rank : 4 * rank + 4].contiguous() for a in world.a])
        moe_torch.fused_moe_lora(given, 4, world.case.top_k, world.switches._replace(fully_sharded=True))
    world.check(given.output)  # of the second rank, which has both parts
    assert not any(bool(part.isnan().any()) for part in parts), "A beyond its true rank"
