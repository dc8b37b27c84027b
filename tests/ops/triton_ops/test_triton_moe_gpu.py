"""Fused MoE LoRA in CUDA graphs whose mapping and routing change between replays, and with kernels that start early."""

import pytest
import torch
import triton
import triton.language as tl

from punica.metadata import LoRAMapping
from punica.ops.triton_ops import moe_align, moe_rules
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from punica.wrapper import PunicaWrapperGPU
from tests.ops.helpers import captured
from tests.ops.moe_cases import E4M3, E5M2, Case, World, add_w2, add_w13, narrow

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "fp8"),
    [(8, 64, 2, E4M3), (24, 8, 2, None), (24, 8, 2, E5M2), (64, 32, 8, None), (64, 32, 8, E4M3)],
)
def test_a_graph_replays_other_mappings_and_routings(tokens, experts, top_k, fp8, alone, monkeypatch):
    """w13, an activation and w2 through the wrapper."""
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if alone else 0)
    case = Case(tokens, top_k, experts, 4, 16, 256, 128, 2, torch.float16, ranks=(16, 8, 0, 5))
    case = case if fp8 is None else case.but(fp8="channel", fp8_dtype=fp8)
    up, down = World(case, "cuda", False), World(case.but(slices=1, down=True, hidden=128, width=256), "cuda", False)
    wrapper = PunicaWrapperGPU(tokens, tokens, "cuda", max_loras=4)

    def begin(mapping: list[int], seed: int) -> None:
        ids = [slot + 1 for slot in mapping]
        wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 5, 100)
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
        up.topk_ids.copy_(scores.topk(top_k, dim=1).indices)

    def run() -> torch.Tensor:
        y13, y2 = narrow(up), narrow(down)
        aligned = add_w13(wrapper, up, y13)
        gate, linear = y13.chunk(2, dim=-1)
        down.x = (torch.nn.functional.silu(gate) * linear).flatten(0, 1)
        add_w2(wrapper, down, y2, aligned)
        return y2

    begin([row % 3 for row in range(tokens)], 0)
    graph, output = captured(run)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        mapping = torch.randint(-1, 4, (tokens - seed % 3,), generator=generator).tolist()
        begin([-1] * tokens if seed == 7 else mapping, seed)
        graph.replay()
        # eager, the rules may choose another form for other numbers of adapters
        torch.testing.assert_close(output, run(), rtol=4e-3, atol=4e-3)


@triton.jit
def _late_writer(from_ptr, to_ptr, size, nanoseconds, BLOCK: tl.constexpr):
    """Lets the kernel behind it start, and copies only after a while."""
    tl.extra.cuda.gdc_launch_dependents()
    now = tl.extra.cuda.globaltimer()
    until = now + nanoseconds
    while now < until:
        now = tl.extra.cuda.globaltimer()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + offsets, tl.load(from_ptr + offsets, mask=offsets < size), mask=offsets < size)


def needs_early_starts() -> None:
    if not supports_pdl(torch.device("cuda")):
        pytest.skip("only GPUs of compute capability 9.0 and newer let kernels start early")


@pytest.mark.parametrize("pairs", [2, 16])
@pytest.mark.parametrize("written", ["output", "x"])
def test_kernels_that_start_early_wait_for_the_one_in_front(pairs, written):
    """The alignment is older than that kernel, as it is after an activation."""
    needs_early_starts()
    world = World(Case(16 * pairs, 2, 16, 2, 16, 512, 256, 1, torch.float16, down=True, seed=pairs), "cuda")
    given, results = world.given(moe_align.moe_lora_align_block_size), []
    for pdl in (False, True):
        one = given._replace(output=given.output.clone(), x=given.x.clone())
        how = How(early=True, options=Options(pdl=pdl))
        fused(one._replace(output=one.output.clone()), 16, 2, world.switches, how)  # compiled before it is watched
        target = getattr(one, written)
        source = target.clone()
        if pdl:
            target.fill_(float("nan"))
            torch.cuda.synchronize()
            block = 4096
            _late_writer[(triton.cdiv(target.numel(), block),)](source, target, target.numel(), 200_000, BLOCK=block)
        fused(one, 16, 2, world.switches, how)
        results.append(one.output)
    for result in results:
        world.check(result)
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
