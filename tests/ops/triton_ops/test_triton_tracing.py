"""The ops as graph tracers see them: flat ops and dense products are one opaque node each, experts break the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton_batches import Batch

from punica import ops
from punica.metadata import LoRAMapping
from punica.ops.quant import quantize_per_channel
from punica.ops.triton_ops import TritonOps, moe_align, quantized_rows
from punica.ops.weights import LoRAWeights
from punica.wrapper import PunicaWrapperGPU
from tests.ops.helpers import step as step_of
from tests.ops.moe_cases import Case, World, add_w13, narrow

WRITES = {
    "lora_shrink": "output_tensor", "lora_expand": "output_tensor", "lora_linear": "output_tensor",
    "lora_shrink_fp8": "output_tensor", "lora_expand_fp8": "output_tensor", "fused_moe_lora": "output",
    "fused_moe_lora_fp8": "output", "fused_moe_lora_shrink": "intermediate", "fused_moe_lora_expand": "output",
}  # fmt: skip
NUMBERS = (16, 32, 32, 1, 4, 2, 1)
EXPERTS = Case(tokens=5, slots=2, hidden=32, width=24, ranks=(3, 8), dtype=torch.float16)
Layer = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def batch(device: str) -> Batch:
    return Batch([0, 1, -1], 64, (24,), 16, 2, torch.float16, device)


def nodes(graph: Any) -> list[str]:
    found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.removeprefix("punica.").removesuffix(".default") for name in found if name.startswith("punica.")]


@pytest.mark.parametrize("name", WRITES)
def test_registered_and_declares_what_it_writes(name: str) -> None:
    schema = getattr(torch.ops.punica, name).default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == [WRITES[name]]
    assert not schema.returns
    assert callable(getattr(ops, name))


def flat_call(name: str, batch: Batch) -> tuple[Layer, Tensor, Tensor]:
    """The op between other operations, x and y."""
    if name.startswith("fused"):
        world = World(EXPERTS.but(fp8="channel" if name.endswith("fp8") else None), batch.device)
        given = world.given(moe_align.moe_lora_align_block_size)
        scales = (world.a_scale, world.b_scale, None, None) if world.case.fp8 else ()
        sizes = (world.case.rank, world.case.top_k, given.lora_ids, world.case.slots, given.enabled)
        options = {"lora_ranks": given.lora_ranks} | ({"per_channel_quant": True} if world.case.fp8 else {})
        rest = (*given[2:9], *sizes, *NUMBERS, *NUMBERS, *scales)
        return lambda x, y: getattr(ops, name)(y, x, *rest, **options), world.x, world.y
    (a, a_scale), (b, b_scale) = (quantize_per_channel(one) for one in (batch.a[0], batch.b[0]))
    count = batch.count["num_active_loras"]
    if name == "lora_shrink_fp8":
        low, rest = torch.zeros(1, 3, 16, device=batch.device), (*batch.args, count, 1.0, [a_scale])
        return lambda x, y: ops.lora_shrink_fp8(x, [a], y, *rest, per_channel_quant=True), batch.x, low
    if name == "lora_shrink":
        return lambda x, y: batch.shrink(y, x), batch.x, torch.zeros(1, 3, 16, device=batch.device)
    if name == "lora_linear":
        return lambda x, y: batch.linear(y, x), batch.x, batch.y
    scales = {"lora_a_scale": [a_scale], "lora_b_scale": [b_scale], "schemes": [0, 0, 0, 1] * 2, **batch.count}
    return lambda x, y: ops.lora_linear(y, x, [a], [b], *batch.args, 0.5, **scales), batch.x, batch.y


@pytest.mark.parametrize(
    "name",
    ["lora_shrink", "lora_shrink_fp8", "lora_linear", "lora_linear of FP8", "fused_moe_lora", "fused_moe_lora_fp8"],
)
def test_flat_ops_traced_and_compiled_equal_eager(name: str, batch: Batch) -> None:
    call, x, y = flat_call(name, batch)

    def layer(x: Tensor, y: Tensor) -> Tensor:
        y = y * 2
        call(x, y)
        return y + 1

    eager = layer(x, y)
    assert not torch.equal(eager, 2 * y + 1)
    graph = make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(x, y)
    assert nodes(graph) == [name.removesuffix(" of FP8")]
    assert torch.equal(graph(x, y), eager)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, y), eager)
    with torch.inference_mode():
        assert torch.equal(layer(x, y), eager)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_traced_step_is_one_node(mode: str, batch: Batch) -> None:
    """In symbolic mode sizes of the weights are symbols, too."""
    step = step_of(batch.slots, batch.device, 2)

    def layer(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        TritonOps().linear(y, x, LoRAWeights.of((a,), (b,)), step, 0.5)
        return y

    given = (*batch.a, *batch.b)
    expected = layer(batch.x, batch.y.clone(), *given)  # and the step's tensors are made
    graph = make_fx(layer, tracing_mode=mode, _allow_non_fake_inputs=True)(batch.x, batch.y.clone(), *given)
    assert nodes(graph) == ["lora_linear"]
    assert torch.equal(graph(batch.x, batch.y.clone(), *given), expected)


@pytest.mark.parametrize("fp8", [None, "channel"], ids=["16 bits", "w8a8"])
def test_experts_in_a_compiled_function_equal_eager(fp8: str | None, device: str) -> None:
    """Alignment, quantisation of x, LoRA, and the experts' own product."""
    world = World(EXPERTS.but(fp8=fp8), device)
    wrapper = PunicaWrapperGPU(8, 8, device, max_loras=2)
    ids = tuple(slot + 1 for slot in world.mapping.tolist())
    wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2], 3, 100)
    changes = {"quant_args": {"use_fp8_w8a8": True, "per_channel_quant": True}} if fp8 else {}
    w = torch.randn(4, 24, 32, device=device).half()

    def layer(x: Tensor, y: Tensor) -> Tensor:
        y = y * 2
        add_w13(wrapper, world, y, x=x, **changes)
        return y + moe_align.PairGroups(world.topk_ids, 4).multiply(x, w, 2) + quantized_rows(x)[1].sum()

    y = narrow(world)
    compiled = torch.compile(layer, backend="eager")
    for x in (world.x, 2 * world.x):
        assert torch.equal(compiled(x, y), layer(x, y))
