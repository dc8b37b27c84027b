"""Rows and verdicts for tests of the claims."""

from pathlib import Path

import pandas as pd

from experiments.claims.bounds import read_bounds
from experiments.claims.judge import judge_claim
from experiments.claims.paper import read_claims
from experiments.claims.rows import Rows
from punica.measure.records import COLUMNS, Row

PAPER = Path(__file__).parents[3] / "paper_results"
STATEMENTS = {statement.id: statement for statement in read_claims(PAPER)}
BOUNDS = read_bounds(PAPER)


def verdict_of(rows, id):
    """The verdict on one claim, as `judge` gives it for all."""
    return judge_claim(STATEMENTS[id], BOUNDS[id], Rows(rows), "cpu")


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


def loading(panel, system, metric, value, unit="ms", **more):
    """One row of section 5.2, at rank 16."""
    fixed = {"figure": "text 5.2", "model": "7B", "hardware": "a100", "rank": 16, "seq_len": None, "kind": "paper"}
    fixed |= {"workload": "Distinct", "batch_size": 32} if panel == "overlap" else {"workload": "", "batch_size": None}
    return Row(**{**fixed, "panel": panel, "system": system, "metric": metric, "value": value, "unit": unit, **more})
