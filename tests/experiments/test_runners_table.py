"""Figure 13's bounds on the hour of runners on Ray."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.claims.fig13 import ASKED, runners_table
from experiments.cluster.served import RAY, SHARE, SIMULATED_RAY, ServedHour, readings
from experiments.facts.paper import as_rows, read_figure

PAPER = Path(__file__).resolve().parents[2] / "paper_results"


def hour(panel: str, batches: list[int], seconds: int = 3600) -> pd.DataFrame:
    """Rows of an hour in which each GPU serves as many requests all the time, while their rate doubles."""
    batch = np.repeat(np.array(batches)[:, None], seconds, axis=1)
    load = np.linspace(1, 2, seconds)
    arrivals = np.repeat(np.arange(seconds) + 0.5, np.round(load * 5).astype(int))
    tokens = np.round(load * 1000).astype(int)
    served = ServedHour(seconds, arrivals, arrivals + 1, arrivals + 2, tokens, batch, np.zeros(33), "measured")
    frame = as_rows(read_figure(PAPER, "13")).iloc[:1]
    about = frame.to_dict("records")[0]
    told = [
        {**about, "panel": panel, "system": "punica", "model": "llama2-7b", "metric": one.metric, "value": one.value,
         "t_s": one.t_s, "gpu": one.gpu, "unit": one.unit, "kind": "measured", "statistic": one.statistic}
        for one in readings(served)
    ]  # fmt: skip
    return pd.DataFrame(told)


def cells(table: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.filterwarnings("ignore:invalid value")  # a constant line has no correlation
def test_each_bound_is_held_against_the_measured_hour() -> None:
    rows = pd.concat([hour(RAY, [32, 32, 1]), hour(SIMULATED_RAY, [32, 0, 0])], ignore_index=True)
    lines = {(line[0], line[2]): line[3:] for line in cells(runners_table(rows, PAPER))}
    assert {(claim, name.replace("_", " ")) for (claim, _), name in ASKED.items()} == lines.keys()
    assert lines["C46", SHARE.replace("_", " ")] == ["0.667", "1", "share >= 0.6", "yes"]
    measured, simulated, bound, met = lines["C48", "largest excess of active gpus"]
    assert (measured, simulated, bound, met) == ("1", "1", "largest_excess <= 1.6", "yes")
    assert lines["C47", "correlation of throughput and request rate"][2:] == ["correlation >= 0.95", "yes"]
    spread = hour(RAY, [4, 4, 4])
    (line,) = [line for line in cells(runners_table(spread, PAPER)) if "excess" in line[2]]
    assert line[3:] == ["3", "-", "largest_excess <= 1.6", "**no**"]


def test_a_part_of_an_hour_and_other_figures_have_no_table() -> None:
    assert runners_table(hour(RAY, [32], seconds=600), PAPER) == []
    assert runners_table(hour(SIMULATED_RAY, [32]), PAPER) == []
    assert runners_table(hour(RAY, [32]).assign(figure="8"), PAPER) == []
