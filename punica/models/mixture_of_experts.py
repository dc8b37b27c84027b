"""Mixtral and Qwen3-MoE: a Llama whose MLP is a mixture of experts; and the model of a folder of any family.

    p, e = topk(softmax(Router(RMSNorm(x))));   x += sum_j p_j Down_e_j(silu(Gate_e_j x) * Up_e_j x)

Qwen3-MoE may keep some layers dense, and its config tells whether the chosen probabilities are scaled to sum to 1;
Mixtral's always are.

Adapters on experts have one pair of matrices per expert and projection (``experts.3.w1``, ``experts.3.gate_proj``), or
one for all experts of a layer (PEFT's ``target_parameters``).
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from punica.adapters.read import FLOATS
from punica.models.checkpoint import NO_WEIGHTS, CheckpointEntry, StoredTensor, stored_tensors
from punica.models.families import DENSE, EXPERTS, model_type_of
from punica.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from punica.parallel import FusedMoE, ReplicatedLinear

QWEN3, MIXTRAL = "qwen3_moe", "mixtral"
EXPERT_PARTS = {MIXTRAL: ("w1", "w2", "w3"), QWEN3: ("gate_proj", "down_proj", "up_proj")}
"""Names of gate, down and up of an expert in checkpoints and adapters."""
BLOCK = {MIXTRAL: "block_sparse_moe", QWEN3: "mlp"}
"""Names of the block of experts in checkpoints; adapters use them, or ``mlp``."""
_IN_BLOCK = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:block_sparse_moe|mlp)\."
    r"(?P<rest>gate\.weight|experts\.(?:(?P<packed>gate_up_proj|down_proj)|.+))"
)


def expert_size(config: Any) -> int:
    size: int = config.moe_intermediate_size if config.model_type == QWEN3 else config.intermediate_size
    return size


class SparseMLP(nn.Module):
    """Router and experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = expert_size(config)
        hidden, experts, dtype = config.hidden_size, config.num_local_experts, config.dtype
        self.gate = ReplicatedLinear(hidden, experts, bias=False, params_dtype=dtype, return_bias=False)
        self.experts = FusedMoE(
            experts, config.num_experts_per_tok, hidden, inner, dtype,
            renormalize=config.model_type == MIXTRAL or config.norm_topk_prob, use_ep=config.expert_parallel,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x))


class MoEDecoderLayer(LlamaDecoderLayer):
    """Attention and experts (or a dense MLP), each after a norm and with a residual connection."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, layer_index)
        if config.model_type == MIXTRAL:  # alias for adapters that use this name
            self.block_sparse_moe = self.mlp

    def make_parts(self, config: Any, layer_index: int) -> tuple[LlamaAttention, nn.Module]:
        dense = config.model_type == QWEN3 and (
            layer_index in config.mlp_only_layers or (layer_index + 1) % config.decoder_sparse_step
        )
        return LlamaAttention(config, layer_index), LlamaMLP(config) if dense else SparseMLP(config)


class MixtureOfExpertsForCausalLM(LlamaForCausalLM):
    """Mixtral or Qwen3-MoE with its language-model head, see `LlamaForCausalLM`.

    Args:
        config: a ``transformers.MixtralConfig`` or ``Qwen3MoeConfig``, or a folder whose ``config.json`` is one.
        dtype, device: of the weights.
        expert_parallel: distribute the experts over the ranks of the group, instead of sharding each.
    """

    config_classes: ClassVar[dict[str, type[Any]]] = EXPERTS
    layer_class = MoEDecoderLayer
    is_3d_moe_weight = False
    is_non_gated_moe = False

    def __init__(
        self, config: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
        *, expert_parallel: bool = False,
    ) -> None:  # fmt: skip
        resolved = self.resolve_config(config)
        resolved.expert_parallel = expert_parallel
        super().__init__(resolved, dtype, device)
        parts = EXPERT_PARTS[self.config.model_type]
        packed = {**LlamaForCausalLM.packed_modules_mapping, "experts": list(parts)}
        self.packed_modules_mapping = packed  # type: ignore[misc]  # of this family
        for name, module in self.named_modules():
            if isinstance(module, FusedMoE):
                module.prefix = name

    def get_expert_mapping(self) -> list[str]:
        """List the module names of gate, down and up of every expert within the block."""
        parts = EXPERT_PARTS[self.config.model_type]
        return [f"experts.{expert}.{part}" for expert in range(self.config.num_local_experts) for part in parts]

    def _stored_tensors(self, folder: str | Path) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for name, tensor in super()._stored_tensors(folder).items():
            match = _IN_BLOCK.fullmatch(name)
            if match is None:
                found[name] = tensor
                continue
            block = f"{match['layer']}.{BLOCK[self.config.model_type]}"
            if match["packed"] is None:
                found[f"{block}.{match['rest']}"] = tensor
            else:
                found |= self._unpacked(block, match["packed"], tensor, folder)
        return found

    def _unpacked(self, block: str, packed: str, tensor: StoredTensor, folder: str | Path) -> dict[str, StoredTensor]:
        """List the experts of a tensor in which transformers 5 packs all of a layer: ``experts.gate_up_proj``."""
        experts, inner, hidden = self.config.num_local_experts, expert_size(self.config), self.config.hidden_size
        gate, down, up = EXPERT_PARTS[self.config.model_type]
        parts, shape = {gate: slice(0, inner), up: slice(inner, 2 * inner)}, (experts, 2 * inner, hidden)
        if packed == "down_proj":
            parts, shape = {down: slice(0, hidden)}, (experts, hidden, inner)
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.name} of checkpoint {str(folder)!r} has shape {tensor.shape}, packed experts of this model "
                f"have {shape} (experts, outputs, inputs); build the model from the config.json of the same folder"
            )
        return {
            f"{block}.experts.{expert}.{part}.weight": tensor.part((expert, rows))
            for expert in range(experts) for part, rows in parts.items()
        }  # fmt: skip

    def _mlp_entries(self, prefix: str, mlp: Any) -> list[CheckpointEntry]:
        if isinstance(mlp, LlamaMLP):
            return super()._mlp_entries(prefix, mlp)
        kind, hidden = self.config.model_type, self.config.hidden_size
        inner, block = mlp.experts.intermediate_size, f"{prefix}.{BLOCK[kind]}"
        experts = mlp.experts.routed_experts
        entries = [CheckpointEntry(f"{block}.gate.weight", (self.config.num_local_experts, hidden), mlp.gate.weight)]
        for expert in range(self.config.num_local_experts):
            for which, part in zip(("w1", "w2", "w3"), EXPERT_PARTS[kind], strict=True):
                shape = (hidden, inner) if which == "w2" else (inner, hidden)
                parameter = experts.w2_weight if which == "w2" else experts.w13_weight
                name = f"{block}.experts.{expert}.{part}.weight"
                entries.append(CheckpointEntry(name, shape, parameter, (expert, which)))
        return entries


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
    *, fp8_weights: bool = False,
) -> LlamaForCausalLM:  # fmt: skip
    """Build the model of ``config.json`` in ``folder``, of any family, and load its weights.

    ``dtype``: of the weights; ``None`` takes the config's, else that of the first tensor, as transformers does.
    ``fp8_weights``: as `LlamaForCausalLM`. FileNotFoundError: no folder, config or weights. ValueError: an unsupported
    family; a damaged or wrong config; damaged or quantised weights; experts in FP8.
    """
    kind = model_type_of(folder)
    model_class = MixtureOfExpertsForCausalLM if kind in EXPERTS else LlamaForCausalLM
    if fp8_weights and kind in EXPERTS:
        raise ValueError(
            f"fp8_weights is for dense models ({', '.join(DENSE)}), {str(folder)!r} is a {kind}, whose experts have no "
            "FP8 form; leave it out"
        )
    config = model_class.resolve_config(folder)
    stored = stored_tensors(folder, NO_WEIGHTS)  # what is refused takes no memory of the device
    of_tensors = FLOATS[next(iter(stored.values())).dtype] if stored else None
    given: dict[str, Any] = {"fp8_weights": fp8_weights} if fp8_weights else {}
    model = model_class(config, dtype or config.dtype or of_tensors, device, **given)
    model.load_weights(folder)
    return model
