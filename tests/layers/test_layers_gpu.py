"""LoRA layers on a GPU: the answers of the CPU tests, the second stream, a decoder block in a graph."""

from typing import Any

import pytest
import torch
from layer_cases import (
    ALONE,
    IN,
    LINEAR,
    MAX_LORAS,
    MAX_RANK,
    MIXED,
    TOLERANCE,
    assert_close,
    config_for,
    fill,
    linear_layer,
    random_pair,
    use,
    wrapper_for,
)
from torch import Tensor
from transformers import LlamaConfig

from punica.adapters import LoRAModelManager
from punica.config import LoRAConfig
from punica.layers import from_layer
from punica.models import LlamaForCausalLM
from punica.ops.backbone import PackedHeads
from punica.parallel import ColumnParallelLinear
from tests.ops.helpers import captured

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
T = len(MIXED)


def pair_of_layers(name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The same layer and adapters with one stream and with two."""
    layers = []
    for dual in (False, True):
        torch.manual_seed(5)
        config = config_for(dtype, dual_stream=dual, **options)
        layer, _ = linear_layer(LINEAR[name], config, DEVICE, ALONE)
        layers.append(layer)
        assert (layer._streams is not None) == dual
    return layers[0], layers[1]


@pytest.mark.parametrize(
    ("name", "dtype", "fp8"),
    [
        *((name, dtype, None) for name in LINEAR for dtype in TOLERANCE),
        *((name, torch.float16, fp8) for name in ("qkv", "row") for fp8 in ("float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_two_streams_equal_one(name: str, dtype: torch.dtype, fp8: str | None) -> None:
    one, two = pair_of_layers(name, dtype, fp8=fp8)
    use(wrapper := wrapper_for(config_for(dtype), DEVICE), MIXED)
    for layer in (one, two):
        layer.set_mapping(wrapper)
    x = torch.randn(T, IN, device=DEVICE).to(dtype)
    graph, result = captured(lambda: two(x))
    for slots in (MIXED, [-1] * T, [2] * T):
        use(wrapper, slots)
        x.normal_()
        graph.replay()
        assert torch.equal(result, two(x)), "not captured: the same kernels, all on one stream"
        if dtype == torch.float32:
            assert torch.equal(result, one(x)), "the same kernels"
        else:  # shrunk in the launch of the base product, whose programs cut the sums otherwise
            assert_close(result, one(x))


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_beside_the_base_product_no_memory_is_touched_that_is_still_in_use(rows: int, max_rank: int) -> None:
    """Many large layers in one graph, whose memory changes hands all the time: what a missing wait would corrupt."""
    config = LoRAConfig(max_lora_rank=max_rank, max_loras=MAX_LORAS, lora_dtype=torch.bfloat16)
    torch.manual_seed(6)
    with torch.device(DEVICE):
        base = ColumnParallelLinear(2048, 2048, bias=False, return_bias=False, params_dtype=torch.bfloat16)
    base.weight.data.normal_(std=2048**-0.5)
    layer = from_layer(base, MAX_LORAS, config, [])
    for slot, rank in ((0, max_rank), (1, max_rank // 4), (2, max_rank // 2 + 1)):
        layer.set_lora(slot, *random_pair(rank, 2048, 2048))
    use(wrapper := wrapper_for(config, DEVICE), ([0, 1, 2, -1] * rows)[:rows])
    layer.set_mapping(wrapper)

    def chain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(layer(x))  # the layer's x and result are freed as soon as it has been launched
        return x

    inputs = [torch.randn(rows, 2048, device=DEVICE).bfloat16() for _ in range(4)]
    expected = [chain(x) for x in inputs]  # not captured: the same kernels, all on one stream
    torch.cuda.synchronize()
    streams, layer._streams = layer._streams, None
    for x, one in zip(inputs, expected, strict=True):
        torch.testing.assert_close(one, chain(x), rtol=5e-2, atol=5e-2)
    layer._streams = streams
    x = torch.empty_like(inputs[0])
    graph, result = captured(lambda: chain(x))
    for i in range(100):
        x.copy_(inputs[i % 4])
        graph.replay()
        assert torch.equal(result, expected[i % 4])


IDS = 96


class RowByRow:
    """In place of attention: what a row gets depends on no other row."""

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        q, k, v = packed.rotated()
        return torch.tanh(q * k.repeat(1, 2, 1)) + v.repeat(1, 2, 1)


@pytest.mark.parametrize("dual", [False, True], ids=["one-stream", "two-streams"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decoder_block_in_a_graph_sees_new_adapters(dtype: torch.dtype, dual: bool) -> None:
    rows = [0, 1, 2, 3, -1] * 5
    shape = LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=IDS, initializer_range=1 / 16,
    )  # fmt: skip
    model = LlamaForCausalLM(shape, dtype, DEVICE)
    model.init_random_weights()
    manager = LoRAModelManager(model, len(rows), len(rows), IDS, config_for(dtype, dual_stream=dual), DEVICE)
    layers, wrapper = manager.modules.values(), manager.punica_wrapper
    ids, positions = torch.randint(0, IDS, (len(rows),), device=DEVICE), torch.arange(len(rows), device=DEVICE)

    def run() -> Tensor:
        return model.compute_logits(model(ids, positions, RowByRow()))

    def fill_all(slot: int, rank: int, *, everywhere: bool = True) -> None:
        for layer in layers:
            if everywhere or not layer.skips_when_empty:
                fill(layer, slot, [random_pair(rank, layer.full_input_size, size) for size in layer.full_output_sizes])

    use(wrapper, rows, IDS)
    for slot in range(MAX_LORAS):
        fill_all(slot, MAX_RANK)
    run()  # compiles every kernel
    for layer in (layer for layer in layers if layer.skips_when_empty):
        for slot in range(MAX_LORAS):
            layer.reset_lora(slot)
        assert not layer.filled_slots
    graph, output = captured(run)
    swaps = [{}, {0: 8}, {2: 1, 3: 5}, {0: 3, 1: 8, 2: 8, 3: 8}, {}]
    for step, swap in enumerate(swaps):
        before = output.clone()
        for slot, rank in swap.items():
            fill_all(slot, rank, everywhere=step != 1)
        slots = rows if step != 4 else [*rows[::-1][:20], *[-1] * 5]
        use(wrapper, slots, IDS)
        graph.replay()
        torch.testing.assert_close(output, run(), rtol=1.6e-2, atol=2e-2)
        if swap:
            touched = torch.tensor([slot in swap for slot in slots], device=DEVICE)
            assert (output != before)[touched].any(dim=-1).all(), "new weights take effect"
            assert torch.equal(output[~touched], before[~touched]), "and only for the rows that use them"
