"""Which block sizes a kernel runs with: what the step is decides, by a rule (`rules`) or by a file tuned for this GPU.

A configuration is a dict with lower-case keys. ``block_m, block_n, block_k, num_warps, num_stages`` always, ``split_k``
for shrinks, and for shrink and expand these extras of the kernels in this package (all optional in a tuned file):

| key | op | meaning |
|---|---|---|
| ``row_wise`` | both | one row per program, multiply and sum, no tensor core (`block_m` is then unused) |
| ``block_r`` | shrink, row-wise | ranks per program (a power of two, 1 and up) |
| ``tiles_n`` | expand, tiles | column blocks that one program walks |
| ``short_k`` | shrink, tiles | above 0: only for long segments; rows of short ones singly, so much of K at once |
| ``short_n`` | expand, tiles | the same, in blocks of so many columns |
| ``ahead`` | expand | weights are read before the true rank is known |
| ``prefetch_y`` | expand, tiles | while shrink runs, y is brought to the L2 cache (of loops; not ``in_words``) |
| ``together`` | shrink, tiles | the ranks of all slices side by side, x read once for all of them |
| ``swap_ab`` | both, tiles | weights are the left operand of the tensor cores |
| ``in_words`` | expand, tiles | B in FP8 is read four columns to a word (not with ``swap_ab``) |

A tuned file ``<gpu>_SHRINK.json``, ``<gpu>_EXPAND_TRUE.json`` ... (GPU name with spaces and hyphens as underscores)
nests string keys ``[max_loras][num_slices][m][k][n]`` (and ``[moe_intermediate_size]`` when given): m = rows, shrink: k
= hidden size and n = rank, all others: k = rank and n = hidden size. At each level the nearest key is taken (ties: the
smaller); ``num_slices`` must match. So a table may be sparse: what neighbours answer alike need not be in it.
``<gpu>_EXPAND.json`` serves both values of `add_inputs` that have no file of their own. Configurations that a table
needs often may stand once in its ``"configurations"`` (name to configuration), and their names where they are meant.
`experiments/commands/tune.py` writes these files, from times with B as layers store it, rank after rank.
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
from punica.ops.triton_ops.rules import rule

Config = dict[str, Any]


class Options(NamedTuple):
    """How kernels are chosen, whatever is computed; fields of `punica.config.LoRAConfig`."""

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
# What the keys that a tuned file may leave out are then.
OPTIONAL_KEYS: dict[str, Config] = {
    "shrink": {"row_wise": False, "block_r": 1, "short_k": 0, "swap_ab": False, "together": False},
    "expand": {
        "row_wise": False,
        "tiles_n": 1,
        "short_n": 0,
        "swap_ab": False,
        "ahead": False,
        "prefetch_y": False,
        "in_words": False,
    },
}
_LEVELS = ("max_loras", "num_slices", "m", "k", "n", "moe_intermediate_size")
_BLOCKS = ("block_m", "block_n", "block_k")
_COUNTS = ("num_warps", "num_stages")
_SWITCHES = ("row_wise", "swap_ab", "together", "ahead", "prefetch_y", "in_words")


def tuned_file_name(op_type: str, add_inputs: bool | None, gpu_name: str) -> str:
    """File name of the tuned table: ``NVIDIA_H200_EXPAND_TRUE.json``, or for an expand whose `add_inputs` is None the
    table of both values, ``NVIDIA_H200_EXPAND.json``.
    """
    value = f"_{add_inputs}" if op_type == "expand" and add_inputs is not None else ""
    return f"{gpu_name.replace(' ', '_').replace('-', '_')}_{op_type.upper()}{value.upper()}.json"


@functools.cache
def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def _table_path(op_type: str, add_inputs: bool | None, tuned_dir: str) -> Path:
    """The table made for `add_inputs`, or that of both values when there is only this one."""
    own, both = (Path(tuned_dir, tuned_file_name(op_type, value, _gpu_name())) for value in (bool(add_inputs), None))
    return both if both.is_file() and not own.is_file() else own


def _check_op_type(op_type: str) -> None:
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")


@functools.cache
def load_lora_op_config(op_type: str, add_inputs: bool | None, tuned_dir: str | None = None) -> dict | None:
    """Parsed tuned table of this GPU from `tuned_dir`, or None: no folder, or no such file in it. What it holds is as
    it stands in the file: sparse, and perhaps names where configurations are meant.

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
    """The tuned table with every key and configuration of its `depth` levels checked, ready to be searched (None: there
    is no file): ``num_slices`` is a dict, the other levels are (limits, what is below) as `_nearest` reads them.
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
    """What is below the key nearest to `wanted`: each key but the last answers up to half-way to the next."""
    limits, below = level
    return below[bisect_left(limits, wanted)]


def _complete(op_type: str, leaf: Any, where: str) -> Config:
    """`leaf` checked, with the optional keys filled in."""
    required = _BLOCKS + _COUNTS + (() if op_type == "expand" else ("split_k",))
    if not isinstance(leaf, dict):
        raise ValueError(f"{where}: a configuration is needed, got {leaf!r}")
    for key in required:
        if key not in leaf:
            raise ValueError(f"{where}: key {key!r} is missing; needed are {', '.join(required)}")
    for key, value in leaf.items():
        if key in _SWITCHES or (key in ("short_k", "short_n") and value == 0):
            continue
        smallest = 16 if key in _BLOCKS else 1
        power = key in _BLOCKS or key in ("block_r", "num_warps", "short_k", "short_n")
        if not isinstance(value, int) or value < smallest or (power and value & (value - 1)):
            wanted = f"a power of two >= {smallest}" if power else "an integer >= 1"
            raise ValueError(f"{where}: {key} must be {wanted}, got {value!r}")
    return OPTIONAL_KEYS.get(op_type, {}) | leaf


def clear_config_cache() -> None:
    """Forget loaded tables, chosen configurations and given warnings (for tests)."""
    for cached in (choose, _checked_table, load_lora_op_config, _table_path, _warn_once, _gpu_name):
        cached.cache_clear()


def get_lora_op_configs(
    op_type: str,
    max_loras: int, batch: int, hidden_size: int, rank: int, num_slices: int,
    add_inputs: bool | None = None, moe_intermediate_size: int | None = None, tuned_dir: str | None = None,
    batch_invariant: bool = False,
) -> Config:  # fmt: skip
    """Configuration of one launch. ``max_loras``: segments the grid holds; ``batch``: rows; ``batch_invariant``: the
    one form and split that depends on neither, whatever a tuned file says.
    """
    shape = StepShape.even(max_loras, batch)
    sizes = (hidden_size, rank, num_slices)
    moe = moe_intermediate_size
    return dict(_chosen(op_type, shape, max_loras, batch, *sizes, add_inputs, moe, tuned_dir, batch_invariant))


@functools.lru_cache(maxsize=65536)
def choose(
    op_type: str, shape: StepShape, rows: int, hidden_size: int, rank: int, num_slices: int, options: Options,
    add_inputs: bool | None = None, partials: int = 1, row_major: bool = True, listed: bool = True,
) -> Config:  # fmt: skip
    """What the ops ask: the configuration for ``rows`` rows of a step; for expand, how many ``partials`` it adds up and
    how B is stored; for shrink, whether tiles are ``listed``. Shared by all who ask alike: not to be changed.
    """
    sizes = (hidden_size, rank, num_slices)
    tuned_dir, segments = options.tuned_dir, shape.adapters
    return _chosen(
        op_type, shape, segments, rows, *sizes, add_inputs, None, tuned_dir, options.batch_invariant,
        partials, row_major, listed,
    )  # fmt: skip


def _chosen(
    op_type: str, shape: StepShape, segments: int, rows: int, hidden_size: int, rank: int, num_slices: int,
    add_inputs: bool | None, moe_size: int | None, tuned_dir: str | None, batch_invariant: bool,
    partials: int = 1, row_major: bool = True, listed: bool = True,
) -> Config:  # fmt: skip
    sizes: tuple[int, ...] = (rows, hidden_size, rank) if op_type == "shrink" else (rows, rank, hidden_size)
    if moe_size is not None:
        sizes += (moe_size,)
    _check_op_type(op_type)
    table = None if batch_invariant else _checked_table(op_type, add_inputs, tuned_dir, 2 + len(sizes))
    if table is not None and tuned_dir is not None:
        by_slices = _nearest(table, segments)
        if num_slices in by_slices:
            found = by_slices[num_slices]
            for size in sizes:
                found = _nearest(found, size)
            return found
        path = _table_path(op_type, add_inputs, tuned_dir)
        _warn_once(f"tuned LoRA kernel table {path} has nothing for {num_slices} slices: defaults are used")
    return rule(op_type, shape, rows, hidden_size, rank, num_slices, batch_invariant, partials, row_major, listed)
