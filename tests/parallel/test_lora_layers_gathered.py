"""LoRA layers whose base layer gathers or reduces its output equal the layer on one rank (L2, not fully sharded)."""

import pytest
import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import from_layer
from punica.parallel import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear, spawn_tensor_parallel
from punica.segments import LoRAMapping
from punica.wrapper import PunicaWrapperCPU

SLOTS = [0, -1, 1, 1, 2]
RANKS = {0: 8, 1: 5, 2: 1}


def lora_layer(build, packed, sizes, columns_of, tp):
    """Output of a wrapped layer on ``tp`` ranks, gathered into the order of one rank; same seed on all ranks."""
    torch.manual_seed(1)
    place = {} if tp else {"tp_rank": 0, "tp_size": 1}
    base = build(bias=True, return_bias=False, **place)
    base.weight_loader(base.weight, torch.randn(sum(sizes), 8))
    base.weight_loader(base.bias, torch.randn(sum(sizes)))
    config = LoRAConfig(max_lora_rank=8, max_loras=4, lora_dtype=torch.float32)
    layer = from_layer(base, 4, config, ["m"] * packed)
    wrapper = PunicaWrapperCPU(8, 8, "cpu", max_loras=4)
    ids = [slot + 1 for slot in SLOTS]
    wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 4, 32)
    layer.set_mapping(wrapper)
    for slot, rank in RANKS.items():
        a, b = [torch.randn(rank, 8) for _ in sizes], [torch.randn(size, rank) for size in sizes]
        layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    output = layer(torch.randn(len(SLOTS), 8))
    return output[:, columns_of] if tp else output


LAYERS = {
    "column": (lambda **kw: ColumnParallelLinear(8, 12, gather_output=True, **kw), 0, (12,), list(range(12))),
    "merged": (
        lambda **kw: MergedColumnParallelLinear(8, [4, 8], gather_output=True, **kw),
        2,
        (4, 8),
        [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11],
    ),
    "row": (lambda **kw: RowParallelLinear(8, 12, input_is_parallel=False, **kw), 0, (12,), list(range(12))),
}


def on_rank(rank: int) -> dict[str, Tensor]:
    return {name: lora_layer(*layer, tp=True) for name, layer in LAYERS.items()}


@pytest.mark.slow
def test_two_ranks_equal_one() -> None:
    alone = {name: lora_layer(*layer, tp=False) for name, layer in LAYERS.items()}
    for found in spawn_tensor_parallel(on_rank, 2, backend="gloo"):
        torch.testing.assert_close(found, alone, rtol=2e-4, atol=2e-4)
