"""Which block sizes a kernel runs with: a tuned file for this GPU when there is one, else rules of thumb.

A configuration is a dict with lower-case keys. ``block_m, block_n, block_k, num_warps, num_stages`` always, ``split_k``
for shrinks, and for shrink and expand these extras of the kernels in this package (all optional in a tuned file):

| key | op | meaning |
|---|---|---|
| ``row_wise`` | both | one row per program, multiply and sum, no tensor core (`block_m` is then unused) |
| ``block_r`` | shrink, row-wise | ranks per program (a power of two, 1 and up) |
| ``tiles_n`` | expand, tiles | column blocks that one program walks |

A tuned file ``<gpu>_SHRINK.json``, ``<gpu>_EXPAND_TRUE.json`` ... (GPU name with spaces and hyphens as underscores)
nests string keys ``[max_loras][num_slices][m][k][n]`` (and ``[moe_intermediate_size]`` when given): m = rows, shrink: k
= hidden size and n = rank, all others: k = rank and n = hidden size. At each level the exact key is taken, else the
nearest (ties: the smaller); ``num_slices`` must match. `experiments/tune.py` writes these files.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from punica.ops.triton_ops.launch import block_at_least, cdiv

__all__ = ["OP_TYPES", "clear_config_cache", "get_lora_op_configs", "load_lora_op_config", "tuned_file_name"]

OP_TYPES = (
    "shrink",
    "expand",
    "fused_moe_lora_w13_shrink",
    "fused_moe_lora_w13_expand",
    "fused_moe_lora_w2_shrink",
    "fused_moe_lora_w2_expand",
)
PACKAGED = Path(__file__).parent / "tuned"
_BLOCKS = ("block_m", "block_n", "block_k")
_COUNTS = ("num_warps", "num_stages")


def tuned_file_name(op_type: str, add_inputs: bool | None, gpu_name: str) -> str:
    """File name of the tuned table, for example ``NVIDIA_H200_EXPAND_TRUE.json``."""
    gpu = gpu_name.replace(" ", "_").replace("-", "_")
    suffix = f"EXPAND_{str(bool(add_inputs)).upper()}" if op_type == "expand" else op_type.upper()
    return f"{gpu}_{suffix}.json"


@functools.cache
def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@functools.cache
def _warn_once(kind: str, message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def load_lora_op_config(op_type: str, add_inputs: bool | None, tuned_dir: str | None = None) -> dict | None:
    """Parsed tuned table of this GPU from `tuned_dir` (None: the tables that come with the package), or None.

    ValueError: unknown `op_type`, or a file that is not JSON. A given folder without the file warns, once per process.
    """
    _check_op_type(op_type)
    path = Path(tuned_dir or PACKAGED) / tuned_file_name(op_type, add_inputs, _gpu_name())
    if not path.is_file():
        if tuned_dir is not None:
            _warn_once("file", f"no tuned LoRA kernel table {path}: default configurations are used")
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"tuned LoRA kernel table {path} is not valid JSON: {error}") from error


def clear_config_cache() -> None:
    """Forget loaded tables, chosen configurations and given warnings (for tests)."""
    for cached in (load_lora_op_config, get_config, _warn_once, _gpu_name):
        cached.cache_clear()


def get_lora_op_configs(
    op_type: str,
    max_loras: int,
    batch: int,
    hidden_size: int,
    rank: int,
    num_slices: int,
    add_inputs: bool | None = None,
    moe_intermediate_size: int | None = None,
    *,
    tuned_dir: str | None = None,
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """Configuration of one launch. ``max_loras``: segments the grid holds; ``batch``: rows; ``batch_invariant``: the
    one form and split that depends on neither, whatever a tuned file says.
    """
    return dict(
        get_config(
            op_type,
            max_loras,
            batch,
            hidden_size,
            rank,
            num_slices,
            add_inputs,
            moe_intermediate_size,
            tuned_dir,
            batch_invariant,
        )
    )


@functools.lru_cache(maxsize=65536)
def get_config(
    op_type: str,
    max_loras: int,
    batch: int,
    hidden_size: int,
    rank: int,
    num_slices: int,
    add_inputs: bool | None,
    moe_intermediate_size: int | None,
    tuned_dir: str | None,
    batch_invariant: bool,
) -> dict[str, Any]:
    """`get_lora_op_configs` with every argument given; the dict is shared, do not change it."""
    _check_op_type(op_type)
    default = _default(op_type, max_loras, batch, hidden_size, rank, num_slices, batch_invariant)
    if batch_invariant:
        return default
    table = load_lora_op_config(op_type, add_inputs, tuned_dir)
    if table is None:
        return default
    file_name = tuned_file_name(op_type, add_inputs, _gpu_name())
    where = str(Path(tuned_dir or PACKAGED) / file_name)
    first, second = (hidden_size, rank) if op_type == "shrink" else (rank, hidden_size)
    keys: list[tuple[str, int]] = [("max_loras", max_loras), ("num_slices", num_slices), ("m", batch), ("k", first)]
    keys.append(("n", second))
    if moe_intermediate_size is not None:
        keys.append(("moe_intermediate_size", moe_intermediate_size))
    node: Any = table
    for level, wanted in keys:
        if not isinstance(node, dict) or not node:
            raise ValueError(f"tuned LoRA kernel table {where}: no entries of level {level!r}")
        if level == "num_slices" and str(wanted) not in node:
            if tuned_dir is not None:
                _warn_once(
                    "slices", f"tuned LoRA kernel table {where} has nothing for {wanted} slices: defaults are used"
                )
            return default
        key = min(node, key=lambda k: (abs(_number(k, where) - wanted), _number(k, where)))
        where, node = f"{where}[{key}]", node[key]
    return _complete(op_type, node, where, default)


def _number(key: str, where: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"tuned LoRA kernel table {where}: key {key!r} is not an integer") from None


def _complete(op_type: str, leaf: Any, where: str, default: dict[str, Any]) -> dict[str, Any]:
    """`leaf` checked, with the optional keys filled in."""
    required = _BLOCKS + _COUNTS + (("split_k",) if "split_k" in default else ())
    if not isinstance(leaf, dict):
        raise ValueError(f"tuned LoRA kernel table {where}: a configuration is needed, got {leaf!r}")
    for key in required:
        if key not in leaf:
            raise ValueError(
                f"tuned LoRA kernel table {where}: key {key!r} is missing; needed are {', '.join(required)}"
            )
    for key, value in leaf.items():
        if key == "row_wise":
            continue
        smallest = 16 if key in _BLOCKS else 1
        power = key in _BLOCKS or key in ("block_r", "num_warps")
        if not isinstance(value, int) or value < smallest or (power and value & (value - 1)):
            wanted = f"a power of two >= {smallest}" if power else "an integer >= 1"
            raise ValueError(f"tuned LoRA kernel table {where}: {key} must be {wanted}, got {value!r}")
    extras = {"row_wise": False, "block_r": 1} if op_type == "shrink" else {"row_wise": False, "tiles_n": 1}
    return {**(extras if op_type in ("shrink", "expand") else {}), **leaf}


def _check_op_type(op_type: str) -> None:
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")


def _default(
    op_type: str, segments: int, rows: int, hidden: int, rank: int, slices: int, invariant: bool
) -> dict[str, Any]:
    if op_type == "shrink":
        return _default_shrink(segments, rows, hidden, rank, slices, invariant)
    if op_type == "expand":
        return _default_expand(segments, rows, hidden, rank, slices, invariant)
    lanes = block_at_least(rank)
    block_n, block_k = (min(lanes, 64), 32) if op_type.endswith("shrink") else (64, min(lanes, 32))
    return {
        "block_m": 64,
        "block_n": block_n,
        "block_k": block_k,
        "split_k": 1,
        "num_warps": 4,
        "num_stages": 3,
        "group_size_m": 8,
    }


def _default_shrink(segments: int, rows: int, hidden: int, rank: int, slices: int, invariant: bool) -> dict[str, Any]:
    """Few rows or short segments: one row per program and all of K at once (up to 4096), as many ranks per program as
    leave about 64 programs. Long segments: tiles, K split only as far as it takes to occupy the multiprocessors, since
    expand sums the planes again.
    """
    lanes = block_at_least(rank)
    config: dict[str, Any] = {"row_wise": False, "block_m": 16, "block_n": min(lanes, 64), "block_k": 128, "block_r": 1}
    config |= {"split_k": 1, "num_warps": 4, "num_stages": 3}
    if invariant:
        return config | {
            "block_m": 16 if rows <= 128 else 32,
            "block_k": 256,
            "split_k": max(1, min(4, hidden // 1024)),
        }
    if rows <= 128 or rows < 4 * segments:
        block_k = min(4096, block_at_least(hidden))
        block_r = min(16, block_at_least(rank, 1), _power_below(rows * rank * slices // 64))
        warps = min(16, _power_below(block_k * block_r // 1024))
        return config | {
            "row_wise": True,
            "block_k": block_k,
            "block_r": block_r,
            "split_k": cdiv(hidden, block_k),
            "num_warps": warps,
        }
    block_m = 32 if rows <= 1024 else 64
    programs = (cdiv(rows, block_m) + min(segments, rows) - 1) * slices * cdiv(rank, config["block_n"])
    split_k = 1
    while split_k < 4 and programs * split_k <= 64 and hidden >= split_k * 1024:
        split_k *= 2
    return config | {"block_m": block_m, "split_k": split_k, "num_stages": 4}


def _default_expand(segments: int, rows: int, hidden: int, rank: int, slices: int, invariant: bool) -> dict[str, Any]:
    """Row-wise while segments are short; tiles above, and with many rows a walk over columns."""
    lanes = block_at_least(rank)
    config: dict[str, Any] = {"row_wise": False, "block_m": 16, "block_n": 128, "block_k": min(lanes, 128)}
    config |= {"num_warps": 4, "num_stages": 3, "tiles_n": 1}
    if invariant:
        return config | {"block_m": 16 if rows <= 128 else 32, "tiles_n": 1 if rows <= 512 else 8}
    if rows <= 16 or rows < 6 * segments:
        return config | {"row_wise": True, "block_n": max(32, 4096 // lanes)}
    if rows <= 256:
        return config | {"block_n": 256 if lanes == 16 else 128}
    return config | {"block_m": 64 if lanes == 16 or rows > 1024 else 32, "tiles_n": 8 if rows > 1024 else 1}


def _power_below(number: int) -> int:
    """The largest power of two that is at most `number`, and at least 1."""
    return 1 << (max(1, number).bit_length() - 1)
