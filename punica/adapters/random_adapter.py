"""Random adapters in the PEFT format, for benchmarks, examples and tests: the weights are noise, everything else is
genuine.

The paper measures with random weights, because speed does not depend on their values. Here A ~ N(0, 1/in) and
B ~ N(0, 1/(16 r)), so with the default `alpha = 2 r` the change `scaling * B A` has a standard deviation of `0.5 /
sqrt(in)` per element: about half of a typical base weight, enough to change what is generated, too little to drown the
base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from punica.adapters.checkpoint import WEIGHTS_FILE
from punica.adapters.peft import CONFIG_FILE, PEFT_PREFIX, PEFTHelper
from punica.adapters.weights import LoRAModel

LLAMA_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama_module_shapes(model_config: Any, target_modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """`{module name: (in, out)}` of the targeted linear layers of a Hugging Face Llama config.

    Raises:
        ValueError: no target, or one that is not a linear layer of Llama.
    """
    unknown = sorted(set(target_modules) - set(LLAMA_LORA_MODULES))
    if unknown or not target_modules:
        raise ValueError(f"target_modules must be some of {list(LLAMA_LORA_MODULES)}, got {list(target_modules)}")
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    q_size, kv_size = heads * head_dim, (model_config.num_key_value_heads or heads) * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, model_config.intermediate_size),
        "mlp.up_proj": (hidden, model_config.intermediate_size),
        "mlp.down_proj": (model_config.intermediate_size, hidden),
    }
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model_config.num_hidden_layers)
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in target_modules
    }


def random_adapter_tensors(
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """PEFT-named random tensors `{...lora_A.weight: [rank, in], ...lora_B.weight: [out, rank]}`; the same seed, the
    same bits.

    Raises:
        ValueError: `rank` < 1 or bad `target_modules`.
    """
    if rank < 1:
        raise ValueError(f"rank must be >= 1, got {rank}")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (width, height) in llama_module_shapes(model_config, target_modules).items():
        a = torch.randn(rank, width, generator=generator) / math.sqrt(width)
        b = torch.randn(height, rank, generator=generator) / (4 * math.sqrt(rank))
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    return tensors


def _peft_config(rank: int, alpha: float | None, target_modules: Sequence[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(target_modules),
    }


def write_random_adapter(
    folder: str | Path,
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`) that the peft library loads too; returns
    its path.

    Args:
        folder: created with its parents; existing adapter files in it are overwritten.
        model_config: Hugging Face Llama config (or anything with its sizes).
        rank, seed, target_modules, dtype: see :func:`random_adapter_tensors`.
        alpha: `lora_alpha`; default `2 * rank`, i.e. scaling 2.
    """
    tensors = random_adapter_tensors(model_config, rank, seed, target_modules=target_modules, dtype=dtype)
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    config = _peft_config(rank, alpha, target_modules)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, str(path / WEIGHTS_FILE), metadata={"format": "pt"})
    return path


def random_adapter(
    lora_model_id: int,
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoRAModel:
    """The adapter that :func:`write_random_adapter` would write, built in memory.

    Thousands of distinct tenants need not cost thousands of random draws: `random_adapter(...).clone(other_id)` shares
    the tensors.
    """
    tensors = random_adapter_tensors(model_config, rank, seed, target_modules=target_modules, dtype=dtype)
    helper = PEFTHelper.from_dict(_peft_config(rank, alpha, target_modules))
    return LoRAModel.from_lora_tensors(lora_model_id, tensors, helper)
