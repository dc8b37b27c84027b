"""Alignment of both backends against its meaning, the experts' own product, and fused MoE LoRA in torch."""

from itertools import product

import pytest
import torch

from punica.ops import moe_torch, reference
from punica.ops.triton_ops import moe_align
from punica.parallel import moe
from tests.ops.moe_cases import CASES, FP8_CASES, Case, World

OPS = {"torch": moe_torch, "triton": moe_align}
SHAPES = [(3, 2, 2, 2), (37, 4, 20, 3), (300, 8, 128, 2), (1, 1, 1, 1), (0, 2, 4, 2), (9, 2, 40, 17), (16, 1, 1, 1)]
LARGE = (4096, 8, 512, 32)


def meaning(ids: list[list[int]], mapping: list[int], local: list[int], slots: int, blocks: int) -> list[list]:
    """Of each slot: its pairs in order, in blocks of 16 of one expert; the experts of its blocks; places in use."""
    top_k, found = len(ids[0]) if ids else 1, []
    pairs = len(ids) * top_k
    wanted: dict[tuple[int, int], list[int]] = {}
    for pair in range(pairs):
        expert = ids[pair // top_k][pair % top_k]
        if 0 <= expert < len(local) and local[expert] >= 0:
            wanted.setdefault((mapping[pair // top_k], local[expert]), []).append(pair)
    for slot in range(slots):
        row, of_block = [], []
        for _, expert in sorted(key for key in wanted if key[0] == slot):
            members = wanted[slot, expert]
            used = -(-len(members) // 16)
            row += members + [pairs] * (used * 16 - len(members))
            of_block += [expert] * used
        padding = [pairs] * (blocks * 16 - len(row)), [-1] * (blocks - len(of_block))
        found.append([row + padding[0], of_block + padding[1], [len(row)]])
    return found


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("op", "shape"), [*product(OPS, SHAPES), ("torch", LARGE), pytest.param("triton", LARGE, marks=pytest.mark.gpu)]
)
def test_alignment(op, shape, parallel, device):
    """Of slots that are listed and enabled; experts out of range, or of another rank, have no place."""
    tokens, top_k, experts, slots = shape
    generator = torch.Generator().manual_seed(tokens + experts)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)
    mapping = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)
    ids[: 16 // top_k], mapping[: 16 // top_k] = 0, 0  # whole blocks have no padding
    local = [expert // 2 if expert % 2 == 0 else -1 for expert in range(experts)] if parallel else [*range(experts)]
    blocks = -(-(tokens * top_k + experts * 15) // 16)
    sizes = (experts, 16, slots, blocks * 16, blocks)
    wanted = meaning(ids.tolist(), mapping.tolist(), local, slots, blocks)
    enabled = [int(slots == 1 or slot != slots // 2) for slot in range(slots)]

    def there(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to("cpu" if op == "torch" else device)

    on, local_ids = there([*enabled, 0]), there(local) if parallel else None
    ids, mapping = ids.to(on.device), mapping.to(on.device)
    for listed in ([*range(slots), -1], [-1, slots - 1, *[-1] * (slots - 1)]):
        outputs = [there([-7] * (slots * n)) for n in (blocks * 16, blocks, 1)]
        OPS[op].moe_lora_align_block_size(ids, mapping, *sizes, *outputs, on, there(listed), local_ids)
        for slot, of_slot in enumerate(wanted):
            found = [one.view(slots, -1)[slot].tolist() for one in outputs]
            is_there = enabled[slot] and slot in listed
            assert found == (of_slot if is_there else [[-7] * len(one) for one in found])
    if op == "triton":
        outputs = moe_align.align_all(ids, mapping, sizes, on, local_ids)
        nothing = [[tokens * top_k] * blocks * 16, [-1] * blocks, [0]]
        for slot, of_slot in enumerate(wanted):
            found = [one.view(slots, -1)[slot].tolist() for one in outputs]
            assert found == (of_slot if enabled[slot] else nothing)


def aligned(
    op, ids: list[list[int]], listed: list[int], expert_map: list[int] | None, device: str, experts: int = 4
) -> list[list[int]]:
    """One slot, or token t in slot t % 2, in blocks of 16: what stands in the outputs."""
    blocks = len(ids) * len(ids[0])
    outputs = [torch.full((n,), -7, dtype=torch.int32, device=device) for n in (2 * blocks * 16, 2 * blocks, 2)]
    mapping, enabled, listed_slots, local = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([t % 2 for t in range(len(ids))], [1, 1, 0], listed, expert_map)
    )
    op.moe_lora_align_block_size(
        torch.tensor(ids, device=device), mapping, experts, 16, 2, blocks * 16, blocks, *outputs, enabled, listed_slots,
        local,
    )  # fmt: skip
    return [one.tolist() for one in outputs]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
class TestBothOps:
    @pytest.mark.parametrize("listed", [[], [1], [0, 1], [2, 1, 0, -1], [-1] * 40 + [1, 0]], ids=len)
    def test_any_number_of_slots_may_be_listed(self, op, listed, device):
        everything = aligned(moe_torch, [[0, 1], [2, 3]], [0, 1, -1], None, device)
        found = aligned(op, [[0, 1], [2, 3]], listed, None, device)
        for whole, one in zip(everything, found, strict=True):
            for slot in (0, 1):
                of_slot = slice(slot * len(one) // 2, (slot + 1) * len(one) // 2)
                assert one[of_slot] == (whole[of_slot] if slot in listed else [-7] * (len(one) // 2))

    def test_no_pair_goes_to_an_expert_of_64_bits_or_one_that_the_map_makes_up(self, op, device):
        ids = [[0, 2**32 + 1], [-(2**32) + 2, 3]]
        sorted_ids, experts, counts = aligned(op, ids, [0, 1], None, device)
        assert [i for i in sorted_ids if i < 4] == [0, 3]
        assert [i for i in experts if i >= 0] == [0, 3]
        assert counts == [16, 16]
        sorted_ids, experts, counts = aligned(op, [[0, 1], [2, 3]], [0, 1], [4, -2, 99, 1], device)
        assert [i for i in sorted_ids if i < 4] == [3]
        assert [i for i in experts if i >= 0] == [1]
        assert counts == [0, 16]

    def test_outputs_that_could_be_too_small_are_refused(self, op, device):
        ids = torch.arange(8, device=device).view(4, 2)
        memory = torch.full((3, 200), -9, dtype=torch.int32, device=device)
        slots = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32, device=device)
        for padded, blocks in ((112, 8), (128, 7)):
            with pytest.raises(ValueError, match=r"8 pairs of 8 experts .* can need 128 and 8: pass at least these"):
                op.moe_lora_align_block_size(
                    ids, slots[:4], 8, 16, 1, padded, blocks, memory[0, :padded], memory[1, :blocks], memory[2, :1],
                    slots[4:], slots[:1],
                )  # fmt: skip
        assert bool((memory == -9).all())


def test_small_blocks_are_refused(device):
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    numbers = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="block_size must be a power of two >= 16, got 8"):
        moe_align.moe_lora_align_block_size(
            ids, numbers[:1], 1, 8, 1, 8, 1, numbers, numbers[:1], numbers[:1], numbers[:2], numbers[:2]
        )


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_experts(factor, dtype, device):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 5, (11, 2), generator=generator)
    x = torch.randn(22 // factor, 24, generator=generator).to(dtype)
    weights = (torch.randn(5, 20, 24, generator=generator) / 5).to(dtype)
    wanted = moe.PairGroups(ids).multiply(x, weights, factor)
    found = moe_align.PairGroups(ids.to(device), 5).multiply(x.to(device), weights.to(device), factor).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


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
        (lambda g: {"output": g.output[:1, :1].expand_as(g.output)}, ValueError, "rows share memory"),
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
