"""Choice of a launch's schedule, from the first source that has one:

1. batch invariance: an estimate among schedules that keep bits (`schedules`);
2. the files of a `tuned_dir`, in vLLM's format (below); then the estimate;
3. the table of measured schedules of this GPU that the package ships (`tuned`); then the estimate.

A tuned file ``<gpu>_SHRINK.json``, ``<gpu>_EXPAND_TRUE.json`` (the value of `add_inputs`) and so on nests string keys
``[max_loras][num_slices][m][k][n]`` (and ``[moe_intermediate_size]``): m = rows, shrink: k = hidden size and n = rank,
others: k = rank and n = hidden size. At each level the nearest key is taken (ties: the smaller); ``num_slices`` must
match. A leaf has ``block_m, block_n, block_k, num_warps, num_stages``, ``split_k`` but for expands, and optionally

``row_wise``: GEMV, one row per program without tensor cores; `block_m` is then unused.
``block_r``: of a row-wise shrink, ranks per program (a power of two, 1 and up).
``tiles_n``: of an expand by tiles, column blocks of one program.
``swap_ab``: of tiles, weights are the left operand of the tensor cores.
"""

import functools
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from punica.lazy import lazily
from punica.ops.triton_ops.launch import block_at_least
from punica.ops.triton_ops.schedules import Gpu, Problem, Schedule, choose_expand, choose_shrink
from punica.ops.triton_ops.tuned import measured_schedule, read_table
from punica.ops.weights import forget_plans

Config = dict[str, Any]


class Options(NamedTuple):
    """Options of the choice of kernels; fields of `punica.config.LoRAConfig`."""

    batch_invariant: bool = False
    pdl: bool = True
    tuned_dir: str | None = None


OP_TYPES = ("shrink", "expand", *(f"fused_moe_lora_{s}_{op}" for s in ("w13", "w2") for op in ("shrink", "expand")))
_OPTIONAL: dict[str, Config] = {
    "shrink": {"row_wise": False, "block_r": 1, "swap_ab": False},
    "expand": {"row_wise": False, "tiles_n": 1, "swap_ab": False},
}
_LEVELS = ("max_loras", "num_slices", "m", "k", "n", "moe_intermediate_size")
_BLOCKS = ("block_m", "block_n", "block_k")  # powers of two from 16 on
_POWERS = (*_BLOCKS, "block_r", "num_warps")
_UNUSED = ("num_ctas", "group_size_m", "max_nreg")  # of tables by other tools


def tuned_file_name(op_type: str, add_inputs: bool | None, gpu_name: str) -> str:
    """Return the name of a tuned file; those of expands differ by ``add_inputs`` (None: as False)."""
    value = f"_{bool(add_inputs)}" if op_type == "expand" else ""
    return f"{gpu_name.replace(' ', '_').replace('-', '_')}_{(op_type + value).upper()}.json"


@functools.cache
def _gpu_name(device: torch.device | None = None) -> str:
    is_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return torch.cuda.get_device_name(device) if is_gpu else "cpu"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def check_op_type(op_type: str) -> None:
    """Raise ValueError for another name than `OP_TYPES`."""
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")


@functools.cache
def load_lora_op_config(op_type: str, add_inputs: bool | None, tuned_dir: str | None = None) -> dict | None:
    """Load this GPU's tuned file; None without a folder, or, with a warning, without the file. ValueError: unknown
    `op_type`, or a file that is not JSON.
    """
    check_op_type(op_type)
    if tuned_dir is None:
        return None
    path = Path(tuned_dir, tuned_file_name(op_type, add_inputs, _gpu_name()))
    if path.is_file():
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"tuned LoRA kernel table {path} is not valid JSON: {error}") from error
    _warn_once(f"no tuned LoRA kernel table {path}: default configurations are used")
    return None


@functools.cache
def _entries(op_type: str, add_inputs: bool | None, tuned_dir: str, depth: int) -> list | None:
    """Return the entries of a tuned file, ``(keys, configuration)``; None without a file."""
    table = load_lora_op_config(op_type, add_inputs, tuned_dir)
    where = f"tuned LoRA kernel table {Path(tuned_dir, tuned_file_name(op_type, add_inputs, _gpu_name()))}"
    return None if table is None else list(_leaves(table, _LEVELS[:depth], op_type, where, ()))


def _leaves(
    node: Any, levels: Sequence[str], op_type: str, where: str, keys: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Config]]:
    if not levels:
        yield keys, _complete(op_type, node, where)
        return
    if not isinstance(node, dict) or not node:
        raise ValueError(f"{where}: no entries of level {levels[0]!r}")
    for key, child in node.items():
        try:
            number = int(key)
        except ValueError:
            raise ValueError(f"{where}: key {key!r} is not an integer") from None
        yield from _leaves(child, levels[1:], op_type, f"{where}[{key}]", (*keys, number))


def _complete(op_type: str, leaf: Any, where: str) -> Config:
    required = (*_BLOCKS, "num_warps", "num_stages", *(() if op_type == "expand" else ("split_k",)))
    known = (*required, *_OPTIONAL.get(op_type, ("row_wise", "tiles_n")), *_UNUSED)
    if not isinstance(leaf, dict):
        raise ValueError(f"{where}: a configuration is needed, got {leaf!r}")
    if missing := [key for key in required if key not in leaf]:
        raise ValueError(f"{where}: key {missing[0]!r} is missing; needed are {', '.join(required)}")
    for key, value in leaf.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        least = 16 if key in _BLOCKS else 1
        is_legal = isinstance(value, int) and value >= least and not (key in _POWERS and value & (value - 1))
        if not is_legal and key not in ("row_wise", "swap_ab"):
            wanted = f"a power of two >= {least}" if key in _POWERS else "an integer >= 1"
            raise ValueError(f"{where}: {key} must be {wanted}, got {value!r}")
    return _OPTIONAL.get(op_type, {}) | leaf


def tuned_config(op_type: str, add_inputs: bool | None, tuned_dir: str | None, wanted: Sequence[int]) -> Config | None:
    """Look up segments, slices, rows and sizes in the tuned file; None without file or slices."""
    entries = None if tuned_dir is None else _entries(op_type, add_inputs, tuned_dir, len(wanted))
    if entries is None:
        return None
    keys, found = min(entries, key=lambda entry: [(abs(k - w), k) for k, w in zip(entry[0], wanted, strict=True)])
    if keys[1] == wanted[1]:
        return found
    _warn_once(f"the tuned table of {op_type} in {tuned_dir} has nothing for {wanted[1]} slices: defaults are used")
    return None


def clear_config_cache() -> None:
    """Forget loaded tables, chosen configurations, the plans made with them, and given warnings (for tests)."""
    forget_plans()
    for cached in (choose, read_table, _entries, load_lora_op_config, _warn_once, _gpu_name):
        cached.cache_clear()


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, {"punica.vllm.ops.tuned": ("get_lora_op_configs",)})


def expert_default(op_type: str, rank: int) -> Config:
    """Return the configuration of experts where a tuned file has none; without file schedules are `moe_rules`'."""
    lanes = block_at_least(rank)
    block_n, block_k = (min(lanes, 64), 32) if op_type.endswith("shrink") else (64, min(lanes, 32))
    config = {"block_m": 64, "block_n": block_n, "block_k": block_k, "split_k": 1, "num_warps": 4, "num_stages": 3}
    return config | {"group_size_m": 8}


def schedule_of(op_type: str, found: Config) -> Schedule:
    row_wise = found.get("row_wise", False)
    columns = found["block_r"] if row_wise and op_type == "shrink" else found["block_n"]
    return Schedule(
        0 if row_wise else found["block_m"], columns, found["block_k"], found["num_warps"], found["num_stages"],
        found.get("split_k", 1), found.get("tiles_n", 1), found.get("swap_ab", False),
    )  # fmt: skip


@functools.lru_cache(maxsize=65536)
def choose(
    op_type: str, problem: Problem, options: Options, device: torch.device, partials: int = 1,
    add_inputs: bool | None = None,
) -> Schedule:  # fmt: skip
    """Choose the schedule of a shrink or an expand (which adds up ``partials`` sums)."""
    shape, rank, is_shrink = problem.shape, problem.rank, op_type == "shrink"
    if options.batch_invariant:
        problem = problem._replace(invariant=True)
    elif options.tuned_dir is not None:
        sizes = (problem.k, rank) if is_shrink else (rank, max(problem.widths))
        wanted = (shape.adapters, len(problem.widths), problem.rows, *sizes)
        if (found := tuned_config(op_type, add_inputs, options.tuned_dir, wanted)) is not None:
            return schedule_of(op_type, found)
    elif (measured := measured_schedule(op_type, problem, _gpu_name(device))) is not None:
        return measured
    gpu = Gpu.of(device)
    return choose_shrink(problem, gpu) if is_shrink else choose_expand(problem, partials, gpu)
