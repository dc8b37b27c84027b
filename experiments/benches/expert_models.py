"""Mixtures of experts of two published shapes, over a divisor, and adapters on all of their experts.

Torch is imported where it is used: the grid of points needs the names alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import torch

    from punica.adapters import LoRAModel, LoRAModelManager
    from punica.layers import FusedMoEWithLoRA
    from punica.models import MixtureOfExpertsForCausalLM

COMMON = {"head_dim": 128, "max_position_embeddings": 4096, "dtype": "float32"}
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "mixtral-8x7b": (
        "MixtralConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 151936},
        {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
}  # fmt: skip
"""Name -> class of its Hugging Face config, what is divided, and what is not."""


def model_config(name: str, layers: int, divisor: int) -> Any:
    """The Hugging Face config of `name` with `layers` layers, its widths, heads and vocabulary over `divisor`.

    ValueError for a name that is not in `MODELS`.
    """
    import transformers

    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    kind, widths, rest = MODELS[name]
    sizes = {key: max(1, value // divisor) for key, value in widths.items()}
    return getattr(transformers, kind)(**COMMON, **sizes, **rest, num_hidden_layers=layers)


class MoESizes(NamedTuple):
    """Sizes of a model (of `MODELS`), its adapters (`fp8`: format of their slots), and the largest batch."""

    model: str
    rank: int
    layers: int
    divisor: int
    batch: int
    context: int  # cached tokens of every request
    dtype: str
    fp8: str | None = None

    def random_model(self, device: str) -> MixtureOfExpertsForCausalLM:
        """Build the model with random weights."""
        import torch

        from punica.models import MixtureOfExpertsForCausalLM

        config = model_config(self.model, self.layers, self.divisor)
        model = MixtureOfExpertsForCausalLM(config, dtype=getattr(torch, self.dtype), device=device)
        model.init_random_weights(0)
        return model


def fill_slots(layer: FusedMoEWithLoRA, first: int) -> None:
    """Copy the first slot into those from `first` on, on the device: adapters that no row uses."""
    import torch

    families = (
        layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, layer.w2_lora_a_stacked, layer.w2_lora_b_stacked,
        layer.w13_lora_a_scale, layer.w13_lora_b_scale, layer.w2_lora_a_scale, layer.w2_lora_b_scale,
    )  # fmt: skip
    for stack in itertools.chain(*families):
        stack.view(torch.uint8)[first:] = stack.view(torch.uint8)[:1]
    layer.adapter_enabled[first:-1] = 1
    ranks = cast("torch.Tensor", layer.lora_ranks)
    ranks[:, first:] = ranks[:, :1]


def random_experts(manager: LoRAModelManager, rank: int) -> LoRAModel:
    """Adapter 1, for the experts of every layer: A ~ N(0, 1/in), B ~ N(0, 1/rank) of w1, w2 and w3 of every expert, in
    host memory.
    """
    import torch

    from punica.adapters import LoRAModel, ModuleWeights

    loras: dict[str, Any] = {}
    for name, layer in manager.modules.items():
        experts = cast("FusedMoEWithLoRA", layer)
        dtype, device = experts.base_layer.routed_experts.w2_weight.dtype, experts.device
        generator = torch.Generator(device).manual_seed(11)
        slices = experts.zero_slices(rank, dtype)
        for one in itertools.chain(*zip(*slices, strict=True)):  # A, then B; drawn on the GPU, which is quick
            factor = cast("torch.Tensor", one)
            drawn = torch.empty(factor.shape, dtype=dtype, device=device)
            factor.copy_(drawn.normal_(0.0, factor.shape[-1] ** -0.5, generator=generator))
        loras[name] = ModuleWeights(name, rank, slices)
    return LoRAModel(1, rank, loras)
