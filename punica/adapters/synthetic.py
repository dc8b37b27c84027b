"""Random adapters in the PEFT format, for benchmarks, examples and tests.

A ~ N(0, 1/in) and B ~ N(0, 1/(16 r)). With the default `alpha = 2 r` the change `scaling * B A` has a standard
deviation of `0.5 / sqrt(in)` per element, about half of a typical base weight: outputs change, but not beyond sense.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from punica.adapters.config import CONFIG_FILE, PEFTHelper
from punica.adapters.names import PEFT_PREFIX, last_component
from punica.adapters.read import WEIGHTS_FILE
from punica.adapters.weights import LoRAModel
from punica.checks import check_count

LLAMA_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama_module_shapes(model_config: Any, target_modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """`{module name: (in, out)}` of the targeted linear layers of a Llama config. ValueError: no such target."""
    unknown = sorted(set(target_modules) - set(LLAMA_LORA_MODULES))
    if unknown or not target_modules:
        raise ValueError(f"target_modules must be some of {list(LLAMA_LORA_MODULES)}, got {list(target_modules)}")
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    q_size, kv_size = heads * head_dim, (model_config.num_key_value_heads or heads) * head_dim
    inner = model_config.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, q_size), "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size), "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model_config.num_hidden_layers)
        for name, shape in shapes.items()
        if last_component(name) in target_modules
    }


def random_adapter_tensors(
    model_config: Any, rank: int, seed: int, *, target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Draw PEFT-named tensors `{...lora_A.weight: [rank, in], ...lora_B.weight: [out, rank]}` on `device`.

    The same seed gives the same bits on the same kind of device. A CPU takes a second for an adapter of a 7B model.
    ValueError: `rank` < 1 or bad `target_modules`.
    """
    check_count("rank", rank)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for module, (width, height) in llama_module_shapes(model_config, target_modules).items():
        a = torch.randn(rank, width, generator=generator, device=device) / math.sqrt(width)
        b = torch.randn(height, rank, generator=generator, device=device) / (4 * math.sqrt(rank))
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    return tensors


def write_random_adapter(
    folder: str | Path, model_config: Any, rank: int, seed: int, *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES, alpha: float | None = None,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Path:  # fmt: skip
    """Write a PEFT folder, which the peft library loads too, and return its path; existing files are overwritten.

    `model_config`: a Hugging Face Llama config, or anything with its sizes. `alpha`: default `2 * rank`, i.e. scaling
    2. The rest is as in :func:`random_adapter_tensors`.
    """
    tensors = random_adapter_tensors(
        model_config, rank, seed, target_modules=target_modules, dtype=dtype, device=device
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(target_modules),
    }  # fmt: skip
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, str(path / WEIGHTS_FILE), metadata={"format": "pt"})
    return path


def random_adapter(
    lora_model_id: int, model_config: Any, rank: int, seed: int, *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES, dtype: torch.dtype = torch.float32,
) -> LoRAModel:  # fmt: skip
    """Build in memory the adapter that :func:`write_random_adapter` would write with the same arguments."""
    tensors = random_adapter_tensors(model_config, rank, seed, target_modules=target_modules, dtype=dtype)
    return LoRAModel.from_lora_tensors(lora_model_id, tensors, PEFTHelper(rank, 2 * rank, list(target_modules)))
