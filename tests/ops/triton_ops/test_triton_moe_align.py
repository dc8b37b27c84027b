"""The alignment kernel writes what the torch one writes, bit for bit; and the experts' own product."""

import pytest
import torch

from punica.ops import moe_torch
from punica.ops.triton_ops import moe_align, moe_gemm
from punica.parallel import moe

SHAPES = [(3, 2, 2, 2), (37, 4, 20, 3), (300, 8, 128, 2), (1, 1, 1, 1), (0, 2, 4, 2), (9, 2, 40, 17)]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_alignment(shape, parallel, device):
    tokens, top_k, experts, slots = shape
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).to(device)
    mapping = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32).to(device)
    enabled = torch.ones(slots + 1, dtype=torch.int32, device=device)
    enabled[[0, -1]] = torch.tensor([int(slots < 3), 0], dtype=torch.int32, device=device)
    expert_map = None
    if parallel:
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_map[1::2] = torch.arange(experts // 2, dtype=torch.int32, device=device)
    blocks = -(-(tokens * top_k + experts * 15) // 16)
    sizes = (experts, 16, slots, blocks * 16, blocks)

    def run(op, listed: list[int], fill: tuple[int, int, int]) -> list[torch.Tensor]:
        lengths = (slots * blocks * 16, slots * blocks, slots)
        given = zip(lengths, fill, strict=True)
        outputs = [torch.full((n,), value, dtype=torch.int32, device=device) for n, value in given]
        lora_ids = torch.tensor(listed, dtype=torch.int32, device=device)
        op.moe_lora_align_block_size(ids, mapping, *sizes, *outputs, enabled, lora_ids, expert_map)
        return outputs

    for listed in ([*range(slots), -1], [-1, slots - 1, *[-1] * (slots - 1)]):
        wanted, found = (run(op, listed, (-7, -7, -7)) for op in (moe_torch, moe_align))
        assert all(map(torch.equal, wanted, found))
    everything = run(moe_torch, [*range(slots), -1], (tokens * top_k, -1, 0))
    found = moe_align.align_all(ids, mapping, *sizes, enabled, expert_map)
    assert all(map(torch.equal, everything, found))


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
    found = moe_gemm.PairGroups(ids.to(device), 5).multiply(x.to(device), weights.to(device), factor).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
