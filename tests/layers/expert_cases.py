"""Mixtures of experts with adapters, and the same with the adapters in the weights; what ranks run, too."""

import copy
from typing import Any

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.metadata import LoRAMapping
from punica.ops.quant import Fp8Matrix
from punica.parallel import FusedMoE
from punica.parallel.moe import halves
from punica.wrapper import get_punica_wrapper

HIDDEN, INNER, SLOTS, MAX_RANK = 12, 8, 4, 8
SLOTS_OF_ROWS = [0, 2, -1, 0, 1, 2, 1, -1, 0]
NAMES = ("w1", "w2", "w3")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def base_layer(
    experts: int = 5, top_k: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> FusedMoE:
    """The same full weights whatever the group is."""
    with torch.device(device):
        layer = FusedMoE(experts, top_k, HIDDEN, INNER, dtype, **options)
    generator = torch.Generator().manual_seed(7)
    for expert in range(experts):
        for which in NAMES if layer.moe_config.is_act_and_mul else NAMES[:2]:
            shape = (HIDDEN, INNER) if which == "w2" else (INNER, HIDDEN)
            weight = torch.randn(shape, generator=generator) * 0.4
            parameter = layer.routed_experts.w2_weight if which == "w2" else layer.routed_experts.w13_weight
            layer.weight_loader(parameter, weight, (expert, which))
    return layer


def adapter(experts: int, rank: int, seed: int, shared: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """w1, w2, w3 over all experts; ``shared``: w1 and w3 have one A, as where gate and up are stored as one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    a = [normal(experts, rank, HIDDEN), normal(experts, rank, INNER), normal(experts, rank, HIDDEN)]
    b = [normal(experts, INNER, rank), normal(experts, HIDDEN, rank), normal(experts, INNER, rank)]
    if shared:
        a[2] = a[0]
    return a, b


def stacked(a: list[Tensor], b: list[Tensor], layout: str) -> tuple[list[Tensor], list[Tensor]]:
    up = torch.cat((b[0], b[2]), dim=1) if layout == "concatenated" else torch.stack((b[0], b[2]), dim=2).flatten(1, 2)
    return [a[0], a[1]], [up, b[1]]


def rounded(adapter: tuple[list[Tensor], list[Tensor]], fp8: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What FP8 leaves of an adapter."""
    a, b = ([Fp8Matrix.of(factor, fp8).real() for factor in side] for side in adapter)
    return a, b


def local(layer: Any, factors: list[Any]) -> list[Any]:
    def mine(factor: Tensor) -> Tensor:
        return factor[layer.local_experts]

    return [f.cut(mine) if isinstance(f, Fp8Matrix) else None if f is None else mine(f) for f in factors]


def wrapped(base: FusedMoE, adapters: dict[int, Any], three_d: bool = False, **config: Any) -> FusedMoEWithLoRA:
    """With each adapter in its slot, and the mapping set."""
    layer = (FusedMoE3DWithLoRA if three_d else FusedMoEWithLoRA)(base)
    model_config = type("Config", (), {"architectures": ["MixtralForCausalLM"]})()
    layer.create_lora_weights(
        SLOTS, LoRAConfig(MAX_RANK, SLOTS, lora_dtype=base.routed_experts.w2_weight.dtype, **config),
        model_config if three_d else None,
    )  # fmt: skip
    wrapper = get_punica_wrapper(32, 32, layer.device, max_loras=SLOTS)
    layer.set_mapping(wrapper)
    for slot, (a, b) in adapters.items():
        layer.set_lora(slot, local(layer, a), local(layer, b))
    ids = [slot + 1 for slot in SLOTS_OF_ROWS]
    wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, SLOTS + 1)), SLOTS + 1, 100)
    return layer


def inputs(experts: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = len(SLOTS_OF_ROWS)
    x, logits = (torch.randn(rows, width, generator=generator) for width in (HIDDEN, experts))
    return x.to(device), logits.to(device)


def merged_output(base: FusedMoE, adapters: dict[int, Any], x: Tensor, logits: Tensor) -> Tensor:
    """Row by row through a copy of the layer with the row's adapter in its weights; w1, w2, w3 on one rank."""
    rows = []
    for row, slot in enumerate(SLOTS_OF_ROWS):
        layer = copy.deepcopy(base)
        layer.routed_experts.lora_context = None
        if slot in adapters:
            (a1, a2, a3), (b1, b2, b3) = adapters[slot]
            experts = layer.routed_experts
            experts.w2_weight.data += b2 @ a2
            if layer.moe_config.is_act_and_mul:
                gate, up = halves(experts.w13_weight.data.mT, layer.w13_layout)
                gate += (b1 @ a1).mT
                up += (b3 @ a3).mT
            else:
                experts.w13_weight.data += b1 @ a1
        rows.append(layer(x[row : row + 1], logits[row : row + 1]))
    return torch.cat(rows)


ADAPTERS = {0: 8, 1: 3, 2: 5}
"""Rank by slot."""
RANK_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, dict[int, int]]] = {
    "tp": ({}, {}, False, ADAPTERS),
    "tp, fully sharded": ({}, {"fully_sharded_loras": True}, False, ADAPTERS),
    "tp, gate and up as one": ({}, {}, True, ADAPTERS),
    "tp, interleaved": ({"w13_layout": "interleaved", "activation": "swigluoai"}, {}, True, ADAPTERS),
    "ep, blocks": ({"use_ep": True}, {}, False, ADAPTERS),
    "ep, round robin": ({"use_ep": True, "placement": "round_robin"}, {}, False, ADAPTERS),
    "ep, gate and up as one": ({"use_ep": True}, {}, True, ADAPTERS),
    "tp, FP8": ({}, {"fp8": E4M3}, False, ADAPTERS),
    "tp, fully sharded, FP8": ({}, {"fully_sharded_loras": True, "fp8": E4M3}, False, ADAPTERS),
    "tp, interleaved, FP8": (
        {"w13_layout": "interleaved", "activation": "swigluoai"}, {"fp8": E4M3}, True, ADAPTERS,
    ),
    "ep, FP8": ({"use_ep": True}, {"fp8": E4M3}, False, ADAPTERS),
}  # fmt: skip


def output_of(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A case in the current group, of any size."""
    options, config, three_d, ranks = RANK_CASES[name]
    adapters = {slot: adapter(5, rank, slot, shared=three_d) for slot, rank in ranks.items()}
    if three_d:
        layout = options.get("w13_layout", "concatenated")
        adapters = {slot: stacked(*one, layout) for slot, one in adapters.items()}
    x, logits = inputs(5, device)
    return wrapped(base_layer(device=device, dtype=dtype, **options), adapters, three_d, **config)(x.to(dtype), logits)


def on_gpu(rank: int, names: list[str]) -> dict[str, Tensor]:
    """What this rank of a group finds in bfloat16."""
    torch.cuda.set_device(rank)
    return {name: output_of(name, f"cuda:{rank}", torch.bfloat16).cpu() for name in names}
