"""Scheduling rules side by side: their loads, their rows, and the verdicts on what newer systems claim."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fakes import composed

from experiments.claims.placement import placement_tables
from experiments.cluster.hour import RANK
from experiments.ext_placement import CROWD, DRIFT, LOAD, MIXED, PADDED, load, while_full
from experiments.ext_placement import EXPERIMENT as PLACEMENT
from experiments.harness.points import Point
from experiments.harness.resume import run
from experiments.measure.records import read_rows

PAPER = Path(__file__).parents[2] / "paper_results"
ABOUT = {"ranks": [8, 64], "adapters": 200}


def rows_of(values: dict[str, dict[str, float]], panel: str = "load", spread: float = 0.0) -> pd.DataFrame:
    """Rows of rules, with a span of ``spread`` on both sides."""
    about = {"figure": "ext placement", "panel": panel}
    return pd.DataFrame(
        [
            {**about, "system": rule, "metric": f"{name}{suffix}", "value": value * by}
            for rule, metrics in values.items()
            for name, value in metrics.items()
            for suffix, by in (("", 1.0), ("_low", 1 - spread), ("_high", 1 + spread))
        ]
    )


def one(capacity: float = 1000.0, gpus: float = 50.0, wait: float = 90.0, host: float = 10.0, disk: float = 30.0):
    """Return the metrics of a rule."""
    names = ("capacity", "gpu_seconds", "p99_time_to_first_token", "loads_from_host", "loads_from_disk")
    return dict(zip(names, (capacity, gpus, wait, host, disk), strict=True))


# rules over Punica's, and verdicts on what newer systems claim


def lines_of(rows: pd.DataFrame, *words: str) -> list[list[str]]:
    """Return the cells of the lines with all ``words``."""
    found = [line for line in placement_tables(rows) if all(word in line for word in words)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


BOTH = {"punica": one(), "least_loaded": one()}


@pytest.mark.parametrize(
    ("rule", "first", "second", "claim", "extent", "verdict"),
    [
        ("loraserve", {"capacity": 700}, {"capacity": 2200}, "2 times the throughput", "2.20", "reproduced"),
        ("loraserve", {"capacity": 700}, {"capacity": 2000}, "2 times the throughput", "2.00", "within noise"),
        ("loraserve", {"capacity": 700}, {"capacity": 1500}, "2 times the throughput", "1.50", "differs"),
        ("loraserve", {"gpus": 24}, {"gpus": 40}, "fewer GPUs", "0.48", "reproduced"),
        ("loraserve", {"gpus": 26}, {"gpus": 40}, "fewer GPUs", "0.52", "differs"),
        ("dynamo", {"disk": 5}, {"disk": 20}, "NVIDIA Dynamo", "0.75", "reproduced"),
        ("dynamo", {"disk": 5}, {"disk": 32}, "NVIDIA Dynamo", "1.05", "differs"),
        ("chameleon", {"capacity": 900}, {"capacity": 1020}, "1.5 times", "1.02", "not implemented: no order"),
    ],
)  # fmt: skip
def test_up_to_is_held_against_the_kindest_load_and_a_claim_without_a_number_against_all(
    rule, first, second, claim, extent, verdict
) -> None:
    parts = ((first, "load"), (second, "drift"))
    rows = pd.concat([rows_of({**BOTH, rule: one(**changed)}, panel, 0.01) for changed, panel in parts])
    ((_, _, told, _, found),) = lines_of(rows, claim)
    assert f" {extent} (" in told
    assert found.startswith(verdict)


# loads


def drawn(panel: str, seed: int = 1, **part):
    workload = "Skewed" if panel == LOAD else "Zipf"
    return load(PAPER, Point(panel, "punica", workload, settings=ABOUT), seed, **part)


def test_the_load_is_the_middle_of_the_hour_from_zero_on() -> None:
    asked, whole = drawn(LOAD, seconds=100.0), drawn(LOAD)
    assert 0 <= asked.arrivals[0] < asked.arrivals[-1] < 100
    assert len(asked.arrivals) > 1.5 * len(whole.arrivals) / 36  # its peak
    assert np.isin(asked.arrivals + 1750.0, whole.arrivals).all()
    assert set(asked.ranks) == {RANK}
    assert len(drawn(MIXED, count=37).arrivals) == len(drawn(DRIFT, count=37).arrivals) == 37


def test_a_crowd_comes_for_the_adapter_that_was_rare_and_under_drift_others_are_popular() -> None:
    parts = np.array_split(drawn(CROWD, seconds=300.0).adapters, 3)
    assert [float((part == 200).mean()) for part in parts] == pytest.approx([0.0, 0.5, 0.0], abs=0.06)
    asked = drawn(DRIFT, seconds=300.0)
    favourites = [int(np.bincount(part).argmax()) for part in np.array_split(asked.adapters, 6)]
    assert favourites == [1 + 32 * turn for turn in range(6)]
    assert (pd.Series(asked.ranks).groupby(asked.adapters).nunique() == 1).all()


def test_capacity_is_that_of_full_gpus_while_requests_wait() -> None:
    firsts = np.array([9.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5])  # the fourth fills the last of three places
    tokens = np.array([1, 2, 4, 8, 8, 8, 8, 8, 8, 8, 3, 2, 1])
    assert while_full(firsts, tokens, places=3) == 8.0
    assert while_full(firsts[:2], tokens, places=3) == 8.0
    assert while_full(np.array([0.1, 0.2]), tokens[:1], places=3) == 1.0


# the figure


@pytest.mark.slow
def test_placement_measures_every_rule_on_every_load(tmp_path) -> None:
    cut = ("system=punica", "figure.seconds=2", "figure.waiting=8", "figure.seeds=2")
    outcome = run(composed(tmp_path, *cut, name=PLACEMENT.name), PLACEMENT)
    panels = [LOAD, MIXED, PADDED, CROWD, DRIFT]
    assert (outcome.failed, outcome.measured) == ([], len(panels))
    rows = read_rows(outcome.rows_file)
    assert [row.panel for row in rows if row.metric == "capacity"] == panels
    assert {row.kind for row in rows} == {"simulated"}
    value = {(row.panel, row.metric): row.value for row in rows}
    for panel in panels:
        assert value[panel, "capacity_low"] < value[panel, "capacity_mean"] < value[panel, "capacity_high"]
        assert value[panel, "loads_from_disk"] > 0
        assert value[panel, "load_wait"] > 0
    assert value[MIXED, "loads_from_disk"] == value[PADDED, "loads_from_disk"]
    assert value[MIXED, "time_per_output_token"] < value[PADDED, "time_per_output_token"]
    plt.close("all")
