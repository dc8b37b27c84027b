"""Configurations of fused MoE LoRA as callers spell them: upper-case keys, one dict for shrink and one for expand."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from punica.checks import check_count

Config = dict[str, Any]

DEFAULTS: Config = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 8,
    "NUM_WARPS": 4,
    "NUM_STAGES": 3,
    "SPLIT_K": 1,
}
"""Defaults of all keys, in the positional order of `fused_moe_lora`."""
OP_TYPES = tuple(f"fused_moe_lora_{site}_{part}" for site in ("w13", "w2") for part in ("shrink", "expand"))


def normalize_lora_config_keys(config: Mapping[str, Any]) -> Config:
    """Copy with upper-case keys: ``block_m`` becomes ``BLOCK_SIZE_M``, ``num_warps`` ``NUM_WARPS``."""
    blocks = {f"block_{letter}": f"BLOCK_SIZE_{letter.upper()}" for letter in "mnk"}
    return {blocks.get(key, key.upper()): value for key, value in config.items()}


def positional_config(name: str, config: Mapping[str, Any], **overrides: int) -> tuple[int, ...]:
    """The seven numbers of a config for `fused_moe_lora`. ValueError for unknown keys."""
    given = normalize_lora_config_keys(config)
    if unknown := sorted(set(given) - set(DEFAULTS)):
        raise ValueError(f"{name} has unknown keys {unknown}; known: {list(DEFAULTS)}, or these in lower case")
    values = DEFAULTS | given | overrides
    return tuple(values[key] for key in DEFAULTS)


def try_get_optimal_moe_lora_config(
    op_type: str, w1_shape: Sequence[int], w2_shape: Sequence[int],
    rank: int, top_k: int,
    dtype: torch.dtype,
    M: int,
) -> Config:  # fmt: skip
    """Return a config of the base layer's expert product, adjusted to rank ``rank``, for `add_lora_fused_moe`.

    ``w1_shape``, ``w2_shape``: ``[E, out, in]``; ``M``: tokens; ``top_k`` and ``dtype`` are vLLM's, and unused.
    ValueError for an ``op_type`` not in `OP_TYPES`.
    """
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")
    if len(w1_shape) != 3 or len(w2_shape) != 3 or w1_shape[0] != w2_shape[0]:
        raise ValueError(f"w1_shape and w2_shape must be [E, out, in], got {tuple(w1_shape)} and {tuple(w2_shape)}")
    lanes = 1 << (check_count("rank", rank) - 1).bit_length()
    few = w1_shape[0] >= M
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    if not few:
        config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    key = "BLOCK_SIZE_N" if op_type.endswith("shrink") else "BLOCK_SIZE_K"
    return config | {key: max(16, min(config[key], lanes))}
