"""The ops as graph tracers see them: registered, one opaque node each, with a shape function."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from triton_batches import Batch

from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops import TritonOps, lora_linear, lora_shrink
from punica.ops.weights import LoRAWeights

OPS = ("lora_shrink", "lora_expand", "lora_linear", "lora_shrink_fp8", "lora_expand_fp8")


@pytest.fixture
def batch(device: str) -> Batch:
    return Batch([0, 1, -1], 64, (24,), 16, 2, torch.float16, device)


@pytest.mark.parametrize("name", OPS)
def test_registered_and_declares_what_it_writes(name):
    schema = getattr(torch.ops.punica, name).default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["output_tensor"]
    assert not schema.returns


def test_one_node_in_a_traced_function(batch):
    def shrink(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        lora_shrink(x, batch.a, out, *batch.args, 0.5, **batch.count)
        return out

    graph = make_fx(shrink, tracing_mode="fake", _allow_non_fake_inputs=True)(
        batch.x, torch.empty(1, 3, 16, device=batch.device)
    )
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and "punica" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["punica.lora_shrink.default"]


def test_compiled_function_equals_eager(batch):
    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = y * 2
        lora_linear(y, x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
        return y + 1

    eager = layer(batch.x, batch.y)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(batch.x, batch.y)
    assert torch.equal(eager, compiled)


def test_under_inference_mode(batch):
    with torch.inference_mode():
        y = batch.y.clone()
        lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
    assert not torch.equal(y, batch.y)


def test_sizes_may_be_symbols(batch):
    step, ops = LoRABatch(8, 2, batch.device), TritonOps()
    step.fill(RowGroups.of_rows(torch.tensor(batch.slots).numpy()))

    def layer(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ops.linear(y, x, LoRAWeights.of((a,), (b,)), step, 0.5)
        return y

    given = (*batch.a, *batch.b)
    expected = layer(batch.x, batch.y.clone(), *given)
    graph = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(batch.x, batch.y.clone(), *given)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and "punica" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["punica.lora_linear.default"]
    assert torch.equal(graph(batch.x, batch.y.clone(), *given), expected)


def test_a_traced_step_is_one_node(batch):
    step, weights, ops = LoRABatch(8, 2, batch.device), LoRAWeights.of(batch.a, batch.b), TritonOps()
    step.fill(RowGroups.of_rows(torch.tensor(batch.slots).numpy()))

    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ops.linear(y, x, weights, step, 0.5)
        return y

    expected = layer(batch.x, batch.y.clone())  # and the step's tensors are made
    graph = make_fx(layer)(batch.x, batch.y.clone())
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and "punica" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["punica.lora_linear.default"]
    torch.testing.assert_close(graph(batch.x, batch.y.clone()), expected, rtol=4e-3, atol=2e-3)
