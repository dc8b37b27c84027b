"""Rows and verdicts for tests of the claims."""

import pandas as pd
from fakes import PAPER

from experiments.claims.bounds import read_bounds
from experiments.claims.judge import Judge
from experiments.facts import paper as facts
from experiments.measure.records import COLUMNS, Row

STATEMENTS = {statement.id: statement for statement in facts.read_claims(PAPER)}
BOUNDS = read_bounds(PAPER)


def verdict_of(rows, id):
    """The verdict on one claim, as `judge` gives it for all."""
    return Judge(rows, PAPER).verdict(STATEMENTS[id])


def repeated(rows, *factors):
    """Each of ``rows`` as repeats that are spread in time, its value times each of ``factors``."""
    parts = [rows.assign(value=rows["value"] * factor, repeat=i) for i, factor in enumerate(factors)]
    return pd.concat(parts, ignore_index=True)


def laptop(figure, **columns):
    """One row of a laptop's small model."""
    fixed = {"panel": "", "system": "", "workload": "", "rank": None, "seq_len": None, "unit": "ms"}
    fixed |= {"statistic": "median", "timer": "host_clock", "scale": "laptop"}
    fixed |= {"hardware": "cpu", "model": "llama-small", "figure": figure}
    return Row(**{**fixed, **columns})


def decode(batch_sizes, scale="laptop", timer="host_clock", seq_len=64, growth=1.2, **more):
    """Figure 1, decode: ``growth`` from batch 1 to 32."""
    fixed = {"panel": "decode", "system": "backbone", "metric": "step_latency", "seq_len": seq_len}
    fixed |= {"scale": scale, "timer": timer, **more}
    return [
        laptop("1", batch_size=size, value=10 * (1 + (growth - 1) * (size - 1) / 31), **fixed) for size in batch_sizes
    ]


def growths(*values):
    """Figure 1 with one repeat, of a run of its own, per growth from batch 1 to 32."""
    days = [f"2026-01-0{i + 1}" for i in range(len(values))]
    parts = [frame(decode([1, 2, 32], growth=value, date=day)) for value, day in zip(values, days, strict=True)]
    return pd.concat([one.assign(repeat=i) for i, one in enumerate(parts)], ignore_index=True)


def serving(**throughput):
    """Figure 11 rows: system -> token/s on Distinct, Uniform, Skewed, Identical."""
    names = ("Distinct", "Uniform", "Skewed", "Identical")
    fixed = {"batch_size": 32, "rank": 16, "metric": "throughput", "unit": "token/s", "statistic": "value"}
    return [
        laptop("11", system=system, workload=name, value=value, **fixed)
        for system, values in throughput.items()
        for name, value in zip(names, values, strict=True)
    ]


def frame(rows):
    return pd.DataFrame([vars(row) for row in rows], columns=list(COLUMNS))
