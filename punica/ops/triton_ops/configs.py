"""Choice of a launch's schedule: with `batch_invariant` by estimate among schedules that keep bits; with a `tuned_dir`
from its file, else by estimate; else from the shipped table of this GPU (`tuned`), else by estimate.

A configuration is the dict form of a `schedules.Schedule`, with lower-case keys: ``block_m, block_n, block_k,
num_warps, num_stages`` always, ``split_k`` for shrinks, and these extras, all optional in a tuned file:

``row_wise``: GEMV, one row per program without tensor cores; `block_m` is then unused.
``block_r``: of a row-wise shrink, ranks per program (a power of two, 1 and up).
``tiles_n``: of an expand by tiles, column blocks of one program.
``swap_ab``: of tiles, weights are the left operand of the tensor cores.

A tuned file ``<gpu>_SHRINK.json``, ``<gpu>_EXPAND_TRUE.json`` ... (GPU name with spaces and hyphens as underscores)
nests string keys ``[max_loras][num_slices][m][k][n]`` (and ``[moe_intermediate_size]`` when given): m = rows, shrink: k
= hidden size and n = rank, all others: k = rank and n = hidden size. At each level the nearest key is taken (ties: the
smaller); ``num_slices`` must match. ``<gpu>_EXPAND.json`` serves both values of `add_inputs` that have no file of their
own. Configurations that a table needs often may be given once in its ``"configurations"`` (name to configuration).
Such files are made by hand or by other tools: `make tune` writes the shipped table, which has another format.
"""

import functools
import json
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from punica.metadata import StepShape
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


OP_TYPES = (
    "shrink",
    "expand",
    "fused_moe_lora_w13_shrink",
    "fused_moe_lora_w13_expand",
    "fused_moe_lora_w2_shrink",
    "fused_moe_lora_w2_expand",
)
OPTIONAL_KEYS: dict[str, Config] = {
    "shrink": {"row_wise": False, "block_r": 1, "swap_ab": False},
    "expand": {"row_wise": False, "tiles_n": 1, "swap_ab": False},
}
"""Keys that a tuned file may leave out, and their values then."""
_EXPERT_KEYS = ("row_wise", "tiles_n")
_UNUSED_KEYS = ("num_ctas", "group_size_m", "max_nreg")  # of tables by other tools
_LEVELS = ("max_loras", "num_slices", "m", "k", "n", "moe_intermediate_size")
_BLOCKS = ("block_m", "block_n", "block_k")
_COUNTS = ("num_warps", "num_stages")
_SWITCHES = ("row_wise", "swap_ab")


def tuned_file_name(op_type: str, add_inputs: bool | None, gpu_name: str) -> str:
    """Return the file name of the tuned table: ``NVIDIA_H200_EXPAND_TRUE.json``, or for an expand whose `add_inputs` is
    None the table of both values, ``NVIDIA_H200_EXPAND.json``.
    """
    value = f"_{add_inputs}" if op_type == "expand" and add_inputs is not None else ""
    return f"{gpu_name.replace(' ', '_').replace('-', '_')}_{op_type.upper()}{value.upper()}.json"


@functools.cache
def _gpu_name(device: torch.device | None = None) -> str:
    """Return the name of the GPU ``device`` (None: the current one); "cpu" where it is none."""
    is_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return torch.cuda.get_device_name(device) if is_gpu else "cpu"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def _table_path(op_type: str, add_inputs: bool | None, tuned_dir: str) -> Path:
    """Return the table made for `add_inputs`, or that of both values when there is only this one."""
    own, both = (Path(tuned_dir, tuned_file_name(op_type, value, _gpu_name())) for value in (bool(add_inputs), None))
    return both if both.is_file() and not own.is_file() else own


def _check_op_type(op_type: str) -> None:
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")


@functools.cache
def load_lora_op_config(op_type: str, add_inputs: bool | None, tuned_dir: str | None = None) -> dict | None:
    """Load the tuned table of this GPU from `tuned_dir`; None: no folder, or no such file in it. It is as in the file:
    sparse, and perhaps with names in place of configurations.

    ValueError: unknown `op_type`, or a file that is not JSON. A given folder without the file warns, once per process.
    """
    _check_op_type(op_type)
    if tuned_dir is None:
        return None
    path = _table_path(op_type, add_inputs, tuned_dir)
    if path.is_file():
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"tuned LoRA kernel table {path} is not valid JSON: {error}") from error
    _warn_once(f"no tuned LoRA kernel table {path}: default configurations are used")
    return None


@functools.cache
def _checked_table(op_type: str, add_inputs: bool | None, tuned_dir: str | None, depth: int) -> Any:
    """Check every key and configuration of the tuned table's `depth` levels; return it ready to be searched (None:
    there is no file): ``num_slices`` is a dict, the other levels are (limits, what is below) as `_nearest` reads them.
    """
    table = load_lora_op_config(op_type, add_inputs, tuned_dir)
    if table is None or tuned_dir is None:
        return None
    where = f"tuned LoRA kernel table {_table_path(op_type, add_inputs, tuned_dir)}"
    named = {}
    if isinstance(table, dict) and isinstance(table.get("configurations"), dict):
        named = table["configurations"]
        table = {key: below for key, below in table.items() if key != "configurations"}
    return _checked(table, _LEVELS[:depth], named, op_type, where)


def _checked(node: Any, levels: Sequence[str], named: dict[str, Config], op_type: str, where: str) -> Any:
    if not levels:
        return _complete(op_type, named.get(node, node) if isinstance(node, str) else node, where)
    if not isinstance(node, dict) or not node:
        raise ValueError(f"{where}: no entries of level {levels[0]!r}")
    below = {}
    for key, child in node.items():
        try:
            number = int(key)
        except ValueError:
            raise ValueError(f"{where}: key {key!r} is not an integer") from None
        below[number] = _checked(child, levels[1:], named, op_type, f"{where}[{key}]")
    if levels[0] == "num_slices":
        return below
    keys = sorted(below)
    return [(a + b) // 2 for a, b in pairwise(keys)], [below[key] for key in keys]


def _nearest(level: tuple[list[int], list[Any]], wanted: int) -> Any:
    """Return the node below the key nearest to `wanted`: each key but the last answers up to half-way to the next."""
    limits, below = level
    return below[bisect_left(limits, wanted)]


def _complete(op_type: str, leaf: Any, where: str) -> Config:
    """Check `leaf` and fill in the optional keys."""
    required = _BLOCKS + _COUNTS + (() if op_type == "expand" else ("split_k",))
    if not isinstance(leaf, dict):
        raise ValueError(f"{where}: a configuration is needed, got {leaf!r}")
    for key in required:
        if key not in leaf:
            raise ValueError(f"{where}: key {key!r} is missing; needed are {', '.join(required)}")
    known = (*required, *OPTIONAL_KEYS.get(op_type, _EXPERT_KEYS), *_UNUSED_KEYS)
    for key, value in leaf.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        if key in _SWITCHES:
            continue
        smallest = 16 if key in _BLOCKS else 1
        power = key in _BLOCKS or key in ("block_r", "num_warps")
        if not isinstance(value, int) or value < smallest or (power and value & (value - 1)):
            wanted = f"a power of two >= {smallest}" if power else "an integer >= 1"
            raise ValueError(f"{where}: {key} must be {wanted}, got {value!r}")
    return OPTIONAL_KEYS.get(op_type, {}) | leaf


def clear_config_cache() -> None:
    """Forget loaded tables, chosen configurations, the plans made with them, and given warnings (for tests)."""
    forget_plans()
    for cached in (choose, read_table, _checked_table, load_lora_op_config, _table_path, _warn_once, _gpu_name):
        cached.cache_clear()


def get_lora_op_configs(
    op_type: str,
    max_loras: int, batch: int, hidden_size: int, rank: int, num_slices: int,
    add_inputs: bool | None = None, moe_intermediate_size: int | None = None, tuned_dir: str | None = None,
    batch_invariant: bool = False,
) -> Config:  # fmt: skip
    """Return the configuration of one launch. ``max_loras``: segments of the grid; ``batch``: rows;
    ``batch_invariant``: the one form and split that depends on neither, whatever a tuned file says.
    """
    _check_op_type(op_type)
    sizes: tuple[int, ...] = (batch, hidden_size, rank) if op_type == "shrink" else (batch, rank, hidden_size)
    if moe_intermediate_size is not None:
        sizes += (moe_intermediate_size,)
    found = None if batch_invariant else _tuned(op_type, add_inputs, tuned_dir, (max_loras, num_slices, *sizes))
    if found is not None:
        return dict(found)
    if op_type not in OPTIONAL_KEYS:
        return _of_experts(op_type, rank)
    k, width = (hidden_size, 0) if op_type == "shrink" else (0, hidden_size)
    shape, widths = StepShape.even(max_loras, batch), (width,) * num_slices
    problem = Problem(shape, batch, k, widths, rank, by_rows=True, direct=op_type == "shrink")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _config_of(op_type, choose(op_type, problem, Options(batch_invariant), device))


@functools.lru_cache(maxsize=65536)
def choose(
    op_type: str, problem: Problem, options: Options, device: torch.device, partials: int = 1,
    add_inputs: bool | None = None,
) -> Schedule:  # fmt: skip
    """Choose the schedule of a shrink or an expand (which adds up ``partials`` sums)."""
    shape, rank, slices = problem.shape, problem.rank, len(problem.widths)
    if options.batch_invariant:
        problem = problem._replace(invariant=True)
    elif options.tuned_dir is not None:
        sizes = (problem.k, rank) if op_type == "shrink" else (rank, max(problem.widths))
        found = _tuned(op_type, add_inputs, options.tuned_dir, (shape.adapters, slices, problem.rows, *sizes))
        if found is not None:
            return _schedule_of(op_type, found)
    elif (measured := measured_schedule(op_type, problem, _gpu_name(device))) is not None:
        return measured
    gpu = Gpu.of(device)
    return choose_shrink(problem, gpu) if op_type == "shrink" else choose_expand(problem, partials, gpu)


def _schedule_of(op_type: str, config: Config) -> Schedule:
    """Convert a configuration of a tuned file to a schedule."""
    block_m, block_n = config["block_m"], config["block_n"]
    if config["row_wise"]:
        block_m, block_n = 0, config["block_r"] if op_type == "shrink" else block_n
    return Schedule(
        block_m, block_n, config["block_k"], config["num_warps"], config["num_stages"],
        config.get("split_k", 1), config.get("tiles_n", 1), config["swap_ab"],
    )  # fmt: skip


def _config_of(op_type: str, schedule: Schedule) -> Config:
    """Convert a schedule to a configuration of a tuned file."""
    config = schedule._asdict() | {"row_wise": not schedule.block_m, "block_m": schedule.block_m or 16}
    if op_type == "expand":
        del config["split_k"]
        return config
    del config["tiles_n"]
    block_r = 1 if schedule.block_m else schedule.block_n
    return config | {"block_r": block_r, "block_n": max(16, schedule.block_n)}


def _of_experts(op_type: str, rank: int) -> Config:
    """Return the defaults of fused MoE LoRA, for callers who ask by name; the ops have schedules of their own
    (`moe_rules`).
    """
    lanes = block_at_least(rank)
    block_n, block_k = (min(lanes, 64), 32) if op_type.endswith("shrink") else (64, min(lanes, 32))
    config = {"block_m": 64, "block_n": block_n, "block_k": block_k, "split_k": 1, "num_warps": 4, "num_stages": 3}
    return config | {"group_size_m": 8}


def _tuned(op_type: str, add_inputs: bool | None, tuned_dir: str | None, keys: tuple[int, ...]) -> Config | None:
    """Look up ``keys`` in the tuned file: segments, slices, rows and sizes; None without file or slices."""
    table = _checked_table(op_type, add_inputs, tuned_dir, len(keys))
    if table is None or tuned_dir is None:
        return None
    segments, slices, *sizes = keys
    by_slices = _nearest(table, segments)
    if slices not in by_slices:
        path = _table_path(op_type, add_inputs, tuned_dir)
        _warn_once(f"tuned LoRA kernel table {path} has nothing for {slices} slices: defaults are used")
        return None
    found = by_slices[slices]
    for size in sizes:
        found = _nearest(found, size)
    return found
