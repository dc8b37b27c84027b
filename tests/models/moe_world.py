"""Tiny models of transformers in folders, dense ones and mixtures, and adapters on experts in both spellings."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.models import MixtureOfExpertsForCausalLM
from punica.ops.backbone import PackedHeads

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61,
    "max_position_embeddings": 64, "initializer_range": 0.2, "num_experts_per_tok": 2,
}  # fmt: skip
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 60, 0])
CONFIGS: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4),
    "qwen3": transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=40, moe_intermediate_size=20, num_experts=6, head_dim=16, norm_topk_prob=True
    ),
    "qwen3, not scaled, one dense layer": transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=40, moe_intermediate_size=20, num_experts=6, head_dim=16, norm_topk_prob=False,
        mlp_only_layers=[0], tie_word_embeddings=True,
    ),
}  # fmt: skip
BLOCKS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
PARTS = {"mixtral": ("w1", "w2", "w3"), "qwen3_moe": ("gate_proj", "down_proj", "up_proj")}


class CausalAttention:
    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        q, k, v = packed.rotated()
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def hugging_face(config: Any) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)  # away from the neutral values they start with
            elif "gate.weight" in name:
                parameter.normal_(0, 0.2)
    return model


def saved(kind: str, folder: Path) -> tuple[Any, Path]:
    theirs = hugging_face(CONFIGS[kind])
    theirs.save_pretrained(folder)
    return theirs, folder


def loaded(folder: Path) -> MixtureOfExpertsForCausalLM:
    model = MixtureOfExpertsForCausalLM(folder)
    model.load_weights(folder)
    return model


def managed(model: Any, folder: Path, **config: Any) -> LoRAModelManager:
    """The adapter of a folder for all of `TOKENS`."""
    manager = LoRAModelManager(model, 4, 64, 61, LoRAConfig(6, 2, **config), "cpu")
    mapping = LoRAMapping([7] * len(TOKENS), [7] * len(TOKENS), is_prefill=True)
    manager.set_active_adapters([LoRARequest("a", 7, str(folder))], mapping)
    return manager


def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(tokens, torch.arange(len(tokens)), CausalAttention()))


def wanted(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def factors(config: Any, rank: int, seed: int) -> dict[int, dict[str, tuple[Tensor, Tensor]]]:
    """``{layer: {w1, w2, w3: (A [E, r, in], B [E, out, r])}}``; w1 and w3 share their A, so that both spellings fit."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden = config.num_local_experts, config.hidden_size
    inner = config.moe_intermediate_size if config.model_type == "qwen3_moe" else config.intermediate_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    dense = getattr(config, "mlp_only_layers", None) or []
    found = {}
    for layer in range(config.num_hidden_layers):
        if layer not in dense:
            a = normal(experts, rank, hidden)
            found[layer] = {
                "w1": (a, normal(experts, inner, rank)),
                "w2": (normal(experts, rank, inner), normal(experts, hidden, rank)),
                "w3": (a, normal(experts, inner, rank)),
            }
    return found


def write(folder: Path, tensors: dict[str, Tensor], rank: int, alpha: float, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    targets = {"target_modules": ["w1"]} | config
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **targets}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    named = {f"base_model.model.{name}": one.clone().contiguous() for name, one in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def write_per_expert(folder: Path, config: Any, layers: Any, rank: int, alpha: float, leave_out: Any = ()) -> Path:
    """One pair per expert and projection; ``leave_out``: (expert, projection) that the adapter has not."""
    tensors = {}
    for layer, pairs in layers.items():
        for which, part in zip(("w1", "w2", "w3"), PARTS[config.model_type], strict=True):
            for expert, (a, b) in enumerate(zip(*pairs[which], strict=True)):
                name = f"model.layers.{layer}.{BLOCKS[config.model_type]}.experts.{expert}.{part}"
                if (expert, which) not in leave_out:
                    tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return write(folder, tensors, rank, alpha)


def write_stacked(folder: Path, layers: Any, rank: int, alpha: float) -> Path:
    """One pair for all experts, as PEFT's ``target_parameters``: B's column ``j * E + e`` is rank j of expert e."""
    tensors = {}
    for layer, pairs in layers.items():
        name = f"model.layers.{layer}.mlp.experts"
        gate_up = pairs["w1"][0], torch.cat((pairs["w1"][1], pairs["w3"][1]), dim=1)
        for own, (a, b) in ((f"{name}.base_layer", gate_up), (name, pairs["w2"])):
            tensors[f"{own}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{own}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return write(folder, tensors, rank, alpha, target_modules=None, target_parameters=["mlp.experts.gate_up_proj"])


def merged(model: Any, layers: Any, scaling: float, leave_out: Any = ()) -> Any:
    """The Hugging Face model with an adapter in its weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer, pairs in layers.items():
            experts = model.model.layers[layer].mlp.experts
            inner = experts.down_proj.shape[2]
            for which, target in (("w1", experts.gate_up_proj[:, :inner]), ("w2", experts.down_proj),
                                  ("w3", experts.gate_up_proj[:, inner:])):  # fmt: skip
                of_expert = [factor.expand(len(target), -1, -1) for factor in pairs[which]]  # perhaps one for all
                for expert, (a, b) in enumerate(zip(*of_expert, strict=True)):
                    if (expert, which) not in leave_out:
                        target[expert] += scaling * b @ a
    return model


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    """One request, no cache: each token from a full pass."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]
