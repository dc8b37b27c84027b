"""Images of adapters: one fills a slot with the bits of `set_lora`, rank after rank, in A and in B."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from layer_cases import IN, LINEAR, MAX_LORAS, as_arguments, random_pair
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import from_layer, from_layer_logits_processor
from punica.ops import slot_image
from punica.ops.slot_image import pack_image
from punica.ops.triton_ops import slot_write
from punica.parallel import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding

SLOT, WIDTH, ORG, VOCAB, DIM = 2, 64, 15, 20, 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU Triton's kernels are interpreted, on the CPU
SECOND = {"tp_size": 2, "tp_rank": 1}
KINDS = [
    *(pytest.param(name, {}, id=name) for name in ("replicated", "merged", "qkv-as-one", "row", "embedding", "logits")),
    *(pytest.param(name, SECOND, id=f"{name}-second-of-two") for name in ("merged-as-one", "variable", "row")),
    *(pytest.param(name, {**SECOND, "sharded": True}, id=f"{name}-sharded") for name in ("column", "qkv", "row")),
]


def layer_of(
    name: str, tp_size: int = 1, tp_rank: int = 0, sharded: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Any, int, tuple[int, ...]]:
    """The layer with slots of width 64; the full widths of its input and of its slices."""
    config = LoRAConfig(max_lora_rank=WIDTH, max_loras=MAX_LORAS, lora_dtype=dtype, fully_sharded_loras=sharded)
    with torch.device(DEVICE):
        if name == "embedding":
            return from_layer(VocabParallelEmbedding(ORG, DIM, dtype), MAX_LORAS, config, []), ORG, (DIM,)
        if name == "logits":
            head = ParallelLMHead(VOCAB, DIM, False, dtype)
            return from_layer_logits_processor(LogitsProcessor(VOCAB), head, MAX_LORAS, config), DIM, (VOCAB,)
        base = LINEAR[name].build(tp_size=tp_size, tp_rank=tp_rank, params_dtype=dtype)
    return from_layer(base, MAX_LORAS, config, ["m"] * LINEAR[name].packed), IN, LINEAR[name].sizes


def by_kernel(image: Tensor, slots: Sequence[Tensor], ranks: Sequence[Tensor], index: int) -> None:
    slot_write.write_slot(image.to(DEVICE), slot_write.SlotTable(slots, ranks), index)


@pytest.mark.parametrize("write", [slot_image.write_slot, by_kernel], ids=["torch", "kernel"])
@pytest.mark.parametrize(("rank", "dtype"), [(1, torch.float32), (WIDTH, torch.float16)])
@pytest.mark.parametrize(("name", "place"), KINDS)
def test_an_image_fills_a_slot_as_set_lora_does(name, place, rank, dtype, write) -> None:
    layer, in_size, sizes = layer_of(name, **place, dtype=dtype)
    given = as_arguments(layer, [random_pair(rank, in_size, size) for size in sizes])
    layer.set_lora(SLOT, *given)
    parts = layer.slot_parts(layer.check_lora(*given))
    expected = [(part.slots.clone(), part.ranks.clone()) for part in parts]
    for part in parts:
        part.slots[SLOT].fill_(torch.nan)
        part.ranks[SLOT] = -1
    stored = [part.stored() for part in parts]
    image = pack_image(stored, dtype)
    write(image, [part.slots for part in stored], [part.ranks for part in stored], SLOT)
    for part, (slots, ranks) in zip(parts, expected, strict=True):
        assert torch.equal(part.slots, slots)
        assert torch.equal(part.ranks, ranks)
