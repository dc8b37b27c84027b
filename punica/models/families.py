"""Supported Hugging Face configs, and how each family expresses the same properties.

    family       biases of q, k, v / of o       norm of query and key heads      sliding window
    Llama:       ``attention_bias``              no                               none
    Mistral:     no                              no                               its config may have one
    Qwen2:       q, k, v always, o never         no                               its config may have one
    Qwen3:       ``attention_bias``              yes                              its config may have one

Mixtral is a Mistral and Qwen3-MoE a Qwen3 with experts. A sliding window of n tokens equals full attention for up to n
tokens, so such a model is served up to that length.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from punica.checks import check_count, clip

CONFIG_FILE = "config.json"
DENSE: dict[str, type[Any]] = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
}  # fmt: skip
"""``model_type`` of a checkpoint's config -> its class; of dense models."""
EXPERTS: dict[str, type[Any]] = {"mixtral": MixtralConfig, "qwen3_moe": Qwen3MoeConfig}
NORMALIZED = ("qwen3", "qwen3_moe")
"""Families with a norm of query and key heads before rotation."""
SCALED_ROPES = ("linear", "llama3", "yarn")
"""RoPE types whose factor extends the model's positions."""
MOST_CONFIG_BYTES = 1 << 20
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
           "vocab_size", "max_position_embeddings", "head_dim")  # fmt: skip


def resolve_config(config: Any, classes: Mapping[str, type[Any]]) -> Any:
    """Copy ``config``, or read it from a folder's ``config.json``, and add the fields common to all families.

    They are ``head_dim``, ``qkv_bias``, ``o_bias``, ``mlp_bias``, ``qk_norm``, ``max_context`` (longest sequence for
    which full attention is exact) and ``dtype`` (a torch dtype; ``None`` where the config has none, or "auto").

    FileNotFoundError: a folder without ``config.json``. TypeError: neither a folder nor one of ``classes``. ValueError:
    a damaged ``config.json``; another family; sizes or an activation that no model of these families has.
    """
    names = " or ".join(one.__name__ for one in classes.values())
    if isinstance(config, (str, Path)):
        resolved = _read(Path(config).expanduser() / CONFIG_FILE, classes, names)
    elif isinstance(config, tuple(classes.values())):
        resolved = copy.deepcopy(config)
    else:
        given = f"a model; {loading_advice(config)}" if isinstance(config, nn.Module) else type(config).__name__
        raise TypeError(f"config must be a transformers.{names} or a folder, got {given}")
    kind = resolved.model_type
    if kind not in classes:
        raise ValueError(f"config is of model_type {kind!r}, this class computes {' or '.join(map(repr, classes))}")
    if resolved.hidden_act not in ("silu", "swish"):  # transformers' names of one function
        raise ValueError(f"hidden_act is {resolved.hidden_act!r}, the SwiGLU of these models needs 'silu' or 'swish'")
    resolved.head_dim = getattr(resolved, "head_dim", None) or resolved.hidden_size // resolved.num_attention_heads
    _check_sizes(resolved)
    both = kind in ("llama", *NORMALIZED) and bool(getattr(resolved, "attention_bias", False))
    resolved.qkv_bias, resolved.o_bias = both or kind == "qwen2", both
    resolved.mlp_bias = kind == "llama" and bool(resolved.mlp_bias)
    resolved.qk_norm = kind in NORMALIZED
    positions = max(resolved.max_position_embeddings, scaled_positions(resolved))
    if kind in ("qwen2", "qwen3") and "sliding_attention" not in resolved.layer_types[: resolved.num_hidden_layers]:
        resolved.sliding_window = None  # layers slide from max_window_layers on
    resolved.max_context = min(positions, getattr(resolved, "sliding_window", None) or positions)
    resolved.dtype = _torch_dtype(resolved.dtype)
    return resolved


def scaled_positions(config: Any) -> int:
    """Return the positions that RoPE scaling extends a model to, else 0: ``max_position_embeddings`` may not tell."""
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if rope.get("rope_type") not in SCALED_ROPES or not isinstance(factor, (int, float)):
        return 0
    return int((rope.get("original_max_position_embeddings") or config.max_position_embeddings) * factor)


def model_type_of(folder: str | Path) -> str:
    """The ``model_type`` that ``config.json`` in ``folder`` names; errors as :func:`resolve_config`."""
    path = Path(folder).expanduser() / CONFIG_FILE
    return _known_type(read_json(path, "a transformers config"), path, {**DENSE, **EXPERTS})


def _known_type(values: Mapping[str, Any], path: Path, classes: Mapping[str, type[Any]]) -> str:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"{str(path)!r} is of model_type {str(kind)[:80]!r}, must be one of {', '.join(classes)}")
    return kind


def loading_advice(model: nn.Module) -> str:
    """Return the advice for a model of another library passed as ours."""
    experts = getattr(getattr(model, "config", None), "model_type", None) in EXPERTS
    wanted, kind = "MixtureOfExpertsForCausalLM" if experts else "LlamaForCausalLM", type(model)
    return (
        f"{kind.__name__} is the class of {kind.__module__.partition('.')[0]}, punica.models.{wanted} is meant: "
        "Engine.from_pretrained(folder, adapters) with the folder of its checkpoint (model.save_pretrained(folder) "
        "writes one) and a LoRARequest for each adapter's"
    )


def _read(path: Path, classes: Mapping[str, type[Any]], names: str) -> Any:
    values = read_json(path, f"a {names}")
    kind = _known_type(values, path, classes)
    for key in _COUNTS:
        if values.get(key) is not None:
            check_count(f"{key} of {str(path)!r}", values[key])
    older = values.pop("torch_dtype", None)
    dtype = values.pop("dtype", None) or older
    try:
        made = classes[kind].from_dict(values)
    except Exception as error:  # any exception of transformers
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{str(path)!r} is no config of a {kind}: {reason}") from error
    made.dtype = _torch_dtype(dtype)
    return made


def read_json(path: Path, wanted: str) -> dict[str, Any]:
    """Read a JSON object of a model folder. FileNotFoundError (for ``wanted``); ValueError: its size or content."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist; pass {wanted} or a folder with such a {CONFIG_FILE}")
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise ValueError(f"{str(path)!r} has {path.stat().st_size} bytes, a config has at most {MOST_CONFIG_BYTES}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {str(error)[:200]}; download or save it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r} holds a {type(values).__name__}, must be an object; download or save it again")
    return values


def warn_of_quantization(config: Any) -> None:
    """Warn of quantised weights in the config beside plain tensors, as after a merge of a QLoRA."""
    if given := getattr(config, "quantization_config", None):
        warnings.warn(
            f"the config has a quantization_config, {clip(given)}, but the checkpoint's tensors are not quantised: "
            f"they are served as they are stored; remove it from {CONFIG_FILE} if the weights were merged",
            stacklevel=3,
        )


def _check_sizes(config: Any) -> None:
    kind = config.model_type
    for key in _COUNTS:
        check_count(f"{key} of this {kind}", getattr(config, key))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads is {heads}, must be a multiple of num_key_value_heads, {kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}, must be even: rotary embedding turns pairs")


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    found = None if name == "auto" else dtype if name is None else getattr(torch, name, name)
    if found not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"dtype of the config is {str(dtype)[:80]!r}, must be float32, float16, bfloat16 or auto")
    return found
