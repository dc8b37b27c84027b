"""Rows and verdicts for tests of the claims."""

from functools import cache
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import read_bounds
from experiments.claims.judge import judge_claim
from experiments.claims.rows import Rows
from experiments.facts.paper import FIGURE_FILES, as_rows, read_claims, read_figure
from punica.measure.records import COLUMNS, Row

PAPER = Path(__file__).parents[3] / "paper_results"
STATEMENTS = {statement.id: statement for statement in read_claims(PAPER)}
BOUNDS = read_bounds(PAPER)


def verdict_of(rows, id):
    """The verdict on one claim, as `judge` gives it for all."""
    return judge_claim(STATEMENTS[id], BOUNDS[id], Rows(rows), rows["hardware"].iloc[0])


@cache
def paper_rows():
    """The paper's own numbers as rows of an A100: what any rule must call reproduced. Do not write into it."""
    frames = [as_rows(read_figure(PAPER, figure)) for figure in FIGURE_FILES]
    return pd.concat([*frames, section_52(), section_6()], ignore_index=True)


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
    """Figure 1 with one repeat per growth from batch 1 to 32."""
    parts = [frame(decode([1, 2, 32], growth=value)).assign(repeat=i) for i, value in enumerate(values)]
    return pd.concat(parts, ignore_index=True)


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


def section_52():
    """Section 5.2 has no figure: its three numbers and the bytes of 7B (D03), as the rows that an experiment gives."""
    table = pd.read_csv(PAPER / "text_other_numbers.csv")
    table = table[(table["figure"] == "text section 5.2") & (table["model"].isna() | (table["model"] == "7B"))]
    said = dict(zip(table["metric"], table["value"], strict=True))
    size, arithmetic = said["lora_bytes_model_fp16"], said["load_time_at_25GBps"]
    return frame(
        [
            loading("layer", "punica", "load_time", said["load_one_layer"], "us"),
            loading("model", "punica", "load_time", said["load_one_model"]),
            loading("model", "punica", "bytes", size, "byte"),
            loading("model", "link", "load_time", arithmetic),
            loading("model", "link", "bandwidth", size / arithmetic / 1e6, "GB/s"),
            loading("overlap", "punica", "load_time", said["load_one_model"]),
            loading("overlap", "punica", "step_latency_alone", said["decode_step"]),
        ]
    )


def section_6():
    """Section 6 names two times and no shape: they are taken as those of a full decode step, and of one row."""
    fixed = {"figure": "text 6", "panel": "RMSNorm", "metric": "norm_latency", "unit": "us", "kind": "paper"}
    fixed |= {"hardware": "a100", "workload": "", "model": "", "seq_len": None, "rank": None}
    said = (("unfused", 110.0), ("fused", 4.0))
    return frame([Row(system=name, batch_size=rows, value=us, **fixed) for name, us in said for rows in (1, 32)])


def loading(panel, system, metric, value, unit="ms", **more):
    """One row of section 5.2, at rank 16."""
    fixed = {"figure": "text 5.2", "model": "7B", "hardware": "a100", "rank": 16, "seq_len": None, "kind": "paper"}
    fixed |= {"workload": "Distinct", "batch_size": 32} if panel == "overlap" else {"workload": "", "batch_size": None}
    return Row(**{**fixed, "panel": panel, "system": system, "metric": metric, "value": value, "unit": unit, **more})
