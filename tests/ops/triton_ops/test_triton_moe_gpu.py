"""Fused MoE LoRA in CUDA graphs whose mapping and routing change between replays, and with kernels that start early."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from punica.capture import capture
from punica.metadata import LoRAMapping
from punica.ops.quant import quantize_per_channel
from punica.ops.triton_ops import moe_align, moe_rules
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from punica.wrapper import PunicaWrapperGPU
from tests.ops.moe_cases import E4M3, E5M2, Case, World

pytestmark = pytest.mark.gpu


class Layer:
    """w13, an activation and w2 through the wrapper, on buffers that stay where they are."""

    def __init__(self, tokens: int, slots: int, experts: int, top_k: int, fp8: torch.dtype | None) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.float16) * 0.2

        self.tokens, self.slots, self.experts, self.top_k = tokens, slots, experts, top_k
        rank, hidden, inner = 16, 256, 128
        self.wrapper: Any = PunicaWrapperGPU(tokens, tokens, "cuda", max_loras=slots)
        self.x = normal(tokens, hidden)
        self.a13 = tuple(normal(slots, experts, rank, hidden) for _ in range(2))
        self.b13 = tuple(normal(slots, experts, inner, rank) for _ in range(2))
        self.a2, self.b2 = (normal(slots, experts, rank, inner),), (normal(slots, experts, hidden, rank),)
        ranks = torch.tensor([[16, 8, 0, 5]] * 2, dtype=torch.int32, device="cuda")[:, :slots].contiguous()
        self.of13: dict[str, Any] = {"lora_ranks": ranks}
        self.of2: dict[str, Any] = {"lora_ranks": ranks[:1].contiguous()}
        if fp8 is not None:
            self.a13, self.b13, self.of13 = _in_fp8(self.a13, self.b13, fp8, self.of13)
            self.a2, self.b2, self.of2 = _in_fp8(self.a2, self.b2, fp8, self.of2)
        self.y13, self.y2 = normal(tokens, top_k, 2 * inner), normal(tokens, top_k, hidden)
        self.enabled = torch.ones(slots + 1, dtype=torch.int32, device="cuda")
        self.ids = torch.zeros(tokens, top_k, dtype=torch.long, device="cuda")
        self.weights = torch.rand(tokens, top_k, device="cuda")

    def begin(self, mapping: list[int], seed: int) -> None:
        ids = [slot + 1 for slot in mapping]
        self.wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, self.slots + 1)), self.slots + 1, 100)
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(self.tokens, self.experts, generator=generator)
        self.ids.copy_(scores.topk(self.top_k, dim=1).indices)

    def run(self) -> torch.Tensor:
        y13, y2, none = self.y13.clone(), self.y2.clone(), torch.empty(self.experts, 1, 1)
        aligned = self.wrapper.add_lora_w13(
            y13, self.x, self.a13, self.b13, self.ids, self.weights, None, none, none, self.tokens, self.top_k,
            self.slots, self.enabled, self.experts, self.top_k, 2, False, False, **self.of13,
        )  # fmt: skip
        gate, up = y13.chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).flatten(0, 1)
        self.wrapper.add_lora_w2(
            y2, inner, self.a2, self.b2, self.weights, *aligned, self.tokens, none, none, self.top_k, self.slots,
            self.enabled, self.top_k, False, 0, False, **self.of2,
        )  # fmt: skip
        return y2


def _in_fp8(a: Any, b: Any, fp8: torch.dtype, keywords: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    pairs_a, pairs_b = ([quantize_per_channel(w, fp8) for w in side] for side in (a, b))
    scales = {"lora_a_scale": [s for _, s in pairs_a], "lora_b_scale": [s for _, s in pairs_b]}
    more = {"quant_args": {"per_channel_quant": True}}
    return tuple(q for q, _ in pairs_a), tuple(q for q, _ in pairs_b), keywords | scales | more


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "fp8"),
    [(8, 64, 2, E4M3), (24, 8, 2, None), (24, 8, 2, E5M2), (64, 32, 8, None), (64, 32, 8, E4M3)],
)
def test_a_graph_replays_other_mappings_and_routings(tokens, experts, top_k, fp8, alone, monkeypatch):
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if alone else 0)
    torch.manual_seed(0)
    layer = Layer(tokens, 4, experts, top_k, fp8)
    layer.begin([row % 3 for row in range(tokens)], 0)
    layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        output = layer.run()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        mapping = torch.randint(-1, 4, (tokens - seed % 3,), generator=generator).tolist()
        layer.begin([-1] * tokens if seed == 7 else mapping, seed)
        graph.replay()
        eager = layer.run()
        # eager, the rules may choose another form for other numbers of adapters
        torch.testing.assert_close(output, eager, rtol=4e-3, atol=4e-3)


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
