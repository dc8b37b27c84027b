"""Mixtures of experts as graph tracers see them: the alignment and both LoRA products are one node each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from punica.metadata import LoRAMapping
from punica.ops.triton_ops import fused_moe_lora, fused_moe_lora_fp8, moe_align, moe_rules
from punica.wrapper import PunicaWrapperGPU
from tests.ops.moe_cases import Case, World

OPS = {
    "fused_moe_lora": ["output"],
    "fused_moe_lora_fp8": ["output"],
    "fused_moe_lora_step": ["output"],
    "moe_pair_gemm": ["output"],
    "moe_lora_align_block_size": ["sorted_token_ids", "expert_ids", "num_tokens_post_pad"],
}
NUMBERS = (16, 32, 32, 1, 4, 2, 1)
CASES = {
    "16 bits": Case(tokens=5, slots=2, hidden=32, width=24, ranks=(3, 8), dtype=torch.float16),
    "FP8": Case(tokens=5, slots=2, hidden=32, width=24, ranks=(3, 8), dtype=torch.float16, fp8="channel"),
    "naive": Case(tokens=2, experts=16, slots=2, hidden=32, width=24, dtype=torch.float16, fp8="blocks"),
}


def nodes(graph: Any) -> list[str]:
    found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.removeprefix("punica.").removesuffix(".default") for name in found if name.startswith("punica.")]


@pytest.mark.parametrize("name", OPS)
def test_registered_and_declares_what_it_writes(name):
    schema = getattr(torch.ops.punica, name).default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == OPS[name]
    assert not schema.returns


class Layer:
    """Both LoRA products of a layer through the wrapper."""

    def __init__(self, case: Case, device: str) -> None:
        self.up = World(case, device)
        self.down = World(case.but(down=True, hidden=case.width, width=case.hidden), device)
        self.wrapper = PunicaWrapperGPU(8, 8, device, max_loras=case.slots)
        ids = tuple(slot + 1 for slot in self.up.mapping.tolist())
        self.wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, case.slots + 1)), case.slots + 1, 100)

    def __call__(self, x: torch.Tensor, y13: torch.Tensor, y2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up, down, case, w = self.up, self.down, self.up.case, torch.empty(self.up.case.experts, 1, 1)
        aligned = self.wrapper.add_lora_w13(
            y13, x, tuple(up.a), tuple(up.b), up.topk_ids, up.weights, None, w, w, case.tokens, case.top_k, case.slots,
            up.enabled, case.experts, case.top_k, 1, False, False, **keywords(up),
        )  # fmt: skip
        self.wrapper.add_lora_w2(
            y2, down.x, tuple(down.a), tuple(down.b), up.weights, *aligned, case.tokens, w, w, case.top_k, case.slots,
            up.enabled, case.top_k, False, 0, False, **keywords(down),
        )  # fmt: skip
        return y13, y2

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.up.x, *(world.y[..., : world.case.width].contiguous() for world in (self.up, self.down))


def keywords(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"lora_ranks": world.ranks}
    if world.scheme is not None:
        found |= {"lora_a_scale": world.a_scale, "lora_b_scale": world.b_scale, "quant_args": world.scheme}
    return found


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", CASES)
def test_the_wrapper_in_a_trace(name: str, mode: str, device: str, monkeypatch):
    """The graph equals the calls, also on other activations."""
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if name == "naive" else 0)
    layer = Layer(CASES[name], device)
    graph = make_fx(layer, tracing_mode=mode, _allow_non_fake_inputs=True)(*layer.inputs)
    aligns = [] if name == "naive" else ["moe_lora_align_block_size"]
    assert nodes(graph) == [*aligns, "fused_moe_lora_step", "fused_moe_lora_step"]
    x, y13, y2 = layer.inputs
    wanted = layer(2 * x, y13.clone(), y2.clone())
    found = graph(2 * x, y13.clone(), y2.clone())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=2e-3)
    assert not torch.equal(found[0], y13)


def test_weights_of_symbolic_sizes(device: str):
    """Whether pairs go by themselves is decided on numbers, and asked of them in the trace."""
    layer = Layer(CASES["16 bits"], device)

    def call(a: torch.Tensor, b: torch.Tensor, *activations: torch.Tensor) -> Any:
        layer.up.a, layer.up.b = [a], [b]
        return layer(*activations)

    inputs = (layer.up.a[0], layer.up.b[0], *layer.inputs)
    graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    assert nodes(graph) == ["fused_moe_lora_step", "fused_moe_lora_step"]


def flat_call(fp8: bool, world: World) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The op by its own name, between other operations."""
    given, case = world.given(moe_align.moe_lora_align_block_size), world.case
    scales = (world.a_scale, world.b_scale, None, None) if fp8 else ()
    options = {"per_channel_quant": True} if fp8 else {}
    op = fused_moe_lora_fp8 if fp8 else fused_moe_lora

    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = y * 2
        op(
            y, x, *given[2:9], case.rank, case.top_k, given.lora_ids, case.slots, given.enabled, *NUMBERS, *NUMBERS,
            *scales, **options, lora_ranks=given.lora_ranks,
        )  # fmt: skip
        return y + 1

    return layer


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
def test_flat_ops_traced_and_compiled_equal_eager(fp8: bool, device: str):
    world = World(CASES["FP8" if fp8 else "16 bits"], device)
    call = flat_call(fp8, world)
    eager = call(world.x, world.y)
    graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(world.x, world.y)
    assert nodes(graph) == ["fused_moe_lora_fp8" if fp8 else "fused_moe_lora"]
    assert torch.equal(graph(world.x, world.y), eager)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(world.x, world.y), eager)


def test_the_experts_own_product_in_a_trace(device: str):
    ids = torch.tensor([[0, 2], [1, 2], [2, -1]], device=device)
    x, weights = torch.randn(3, 16, device=device), torch.randn(3, 20, 16, device=device)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return moe_align.PairGroups(ids, 3).multiply(x, weights, 2)

    graph = make_fx(multiply, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert nodes(graph) == ["moe_lora_align_block_size", "moe_pair_gemm"]
    torch.testing.assert_close(graph(x), multiply(x))
