"""Schedules that were measured on a GPU, for single operators: ``tuned/<gpu>.json``.

A table is sparse: it holds the operators of layers, in 16 bits, for which a search found a schedule that is faster than
the estimate's (`schedules`). A key names an operator and a step as far as they select a schedule, with rows rounded up
to a power of two; its value is the shrink's and the expand's schedule, one of which may be missing.
"""

import functools
import json
from pathlib import Path

from punica.ops.triton_ops.schedules import Problem, Schedule

FOLDER = Path(__file__).with_name("tuned")
OPS = ("shrink", "expand")


def table_name(gpu_name: str) -> str:
    return f"{gpu_name.lower().replace(' ', '_').replace('-', '_')}.json"


def key_of(problem: Problem) -> str:
    shape, rows = problem.shape, 1 << (problem.rows - 1).bit_length()
    widths = "+".join(map(str, problem.widths))
    step = f"{rows} rows of {shape.adapters}, longest {shape.longest}"
    return f"{problem.k} -> {widths} r{problem.rank}, {step}, {problem.element} bytes"


@functools.cache
def read_table(gpu_name: str) -> dict[str, dict[str, Schedule]]:
    """Return a GPU's measured schedules by key and op; empty without a table. ValueError: another entry."""
    path = FOLDER / table_name(gpu_name)
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text())["operators"]
    for key, pair in entries.items():
        if unknown := {op: one for op, one in pair.items() if op not in OPS or len(one) != len(Schedule._fields)}:
            raise ValueError(
                f"{path}, operator {key!r}: {unknown} is no schedule of {' or '.join(OPS)}, whose "
                f"{len(Schedule._fields)} fields are {', '.join(Schedule._fields)}"
            )
    return {key: {op: Schedule(*one) for op, one in pair.items()} for key, pair in entries.items()}


def measured_schedule(op_type: str, problem: Problem, gpu_name: str) -> Schedule | None:
    """Return the measured schedule of ``op_type``, one of `OPS`; None where the table has none."""
    table = {} if problem.by_rows else read_table(gpu_name)
    return table.get(key_of(problem), {}).get(op_type) if table else None
