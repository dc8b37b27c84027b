"""Scheduling rules side by side: their loads, their rows, and the verdicts on what newer systems claim."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fakes import composed

from experiments.claims.placement import placement_verdicts
from experiments.cluster.hour import RANK
from experiments.cluster.placed import CROWD, DRIFT, LOAD, MIXED, PADDED, load, while_full
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


# sentences and verdicts


def test_a_sentence_compares_each_rule_with_punica_over_all_loads() -> None:
    rows = pd.concat([
        rows_of({"punica": one(), "other": one(capacity=1100.0, gpus=100.0, disk=10.0)}, "load"),
        rows_of({"punica": one(), "other": one(capacity=900.0, gpus=60.0, disk=70.0)}, "drift"),
    ])  # fmt: skip
    (said,) = placement_verdicts(rows)
    assert "Simulated: `other` serves 0.90 to 1.10 times Punica's throughput of full GPUs." in said
    assert "Over the part of the hour that was simulated it takes 1.20 to 2.00 times its GPU time" in said
    assert "0.50 to 2.00 times its loads: lowest and highest of 2 loads." in said
    length = {"figure": "ext placement", "panel": "load", "system": "punica", "metric": "simulated_seconds"}
    for seconds, told in ((30.0, "Over 30 s of the hour it takes"), (3600.0, "Over the whole hour")):
        assert told in placement_verdicts(pd.concat([rows, pd.DataFrame([{**length, "value": seconds}])]))[0]
    assert placement_verdicts(rows[rows["system"] != "punica"]) == []
    assert placement_verdicts(rows.assign(figure="13")) == []


@pytest.mark.parametrize(
    ("capacity", "spread", "verdict"),
    [(2200.0, 0.01, "reproduced in simulation"), (2000.0, 0.01, "within noise"), (1500.0, 0.01, "differs")],
)
def test_up_to_is_held_against_the_kindest_panel_within_the_span_over_seeds(capacity, spread, verdict) -> None:
    both = {"punica": one(), "least_loaded": one()}
    rows = pd.concat([
        rows_of({**both, "loraserve": one(capacity=700.0)}, "load", spread),
        rows_of({**both, "loraserve": one(capacity=capacity)}, "mixed ranks, padded", spread),
    ])  # fmt: skip
    (said,) = [one for one in placement_verdicts(rows) if "2 times the throughput" in one]
    low, high = capacity / 1000 * 0.99 / 1.01, capacity / 1000 * 1.01 / 0.99
    assert f"at best {capacity / 1000:.2f} times the throughput of full GPUs of `least_loaded`" in said
    assert f"({low:.2f} to {high:.2f} over seeds; mixed ranks, padded): {verdict}." in said


@pytest.mark.parametrize(("gpus", "verdict"), [(24.0, "reproduced in simulation"), (26.0, "differs")])
def test_fewer_is_at_most(gpus, verdict) -> None:
    rows = rows_of({"punica": one(), "least_loaded": one(), "loraserve": one(gpus=gpus)})
    (said,) = [one for one in placement_verdicts(rows) if "fewer GPUs" in one]
    assert said.endswith(f"over seeds; load): {verdict}.")


@pytest.mark.parametrize(("disk", "verdict"), [(20.0, "reproduced in simulation"), (31.0, "differs")])
def test_fewer_loads_must_hold_on_every_panel(disk, verdict) -> None:
    both = {"punica": one(), "least_loaded": one()}
    rows = pd.concat([
        rows_of({**both, "dynamo": one(disk=5.0)}, "load"), rows_of({**both, "dynamo": one(disk=disk)}, "drift"),
    ])  # fmt: skip
    (said,) = [one for one in placement_verdicts(rows) if "NVIDIA Dynamo" in one]
    assert f"`dynamo` has at worst {(10 + disk) / 40:.2f} times the loads of `least_loaded`" in said
    assert said.endswith(f"drift): {verdict}.")


def test_a_claim_on_what_a_rule_lacks_is_shown_and_not_judged() -> None:
    rows = rows_of({"punica": one(), "least_loaded": one(), "chameleon": one(capacity=1020.0)})
    said = [one for one in placement_verdicts(rows) if ": Chameleon" in one]
    assert len(said) == 2
    assert "at best 1.02 times the throughput" in said[0]
    assert all("not implemented, since a cluster's queue has no order by size" in one for one in said)


def test_rows_without_loads_or_without_the_baseline_say_less() -> None:
    rows = rows_of({"punica": one(), "least_loaded": one(), "llm_d": one()})
    fewer = placement_verdicts(rows[~rows["metric"].str.startswith("loads")])
    assert len(fewer) == 2
    assert "loads (" not in fewer[0].replace("of 1 loads", "")
    assert len(placement_verdicts(rows[rows["system"] != "least_loaded"])) == 1


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


def test_padded_ranks_are_the_same_requests() -> None:
    asked, padded = drawn(MIXED, seconds=50.0), drawn(PADDED, seconds=50.0)
    assert set(asked.ranks) == {8, 64}
    for name in ("arrivals", "adapters", "ranks"):
        assert getattr(asked, name).tolist() == getattr(padded, name).tolist()


def test_a_crowd_comes_for_the_adapter_that_was_rare() -> None:
    adapters = drawn(CROWD, seconds=300.0).adapters
    parts = [float((part == 200).mean()) for part in np.array_split(adapters, 3)]
    assert parts[1] == pytest.approx(0.5, abs=0.06)
    assert max(parts[0], parts[2]) < 0.05


def test_under_drift_other_adapters_are_popular_and_each_keeps_its_rank() -> None:
    asked = drawn(DRIFT, seconds=300.0)
    sixths = np.array_split(asked.adapters, 6)
    favourites = [int(np.bincount(part).argmax()) for part in sixths]
    assert favourites == [1 + 32 * turn for turn in range(6)]
    ranks = pd.Series(asked.ranks).groupby(asked.adapters).nunique()
    assert (ranks == 1).all()


def test_capacity_is_that_of_full_gpus_while_requests_wait() -> None:
    firsts = np.array([9.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5])  # the fourth fills the last of three places
    tokens = np.array([1, 2, 4, 8, 8, 8, 8, 8, 8, 8, 3, 2, 1])
    assert while_full(firsts, tokens, places=3) == 8.0
    assert while_full(firsts[:2], tokens, places=3) == 8.0
    assert while_full(np.array([0.1, 0.2]), tokens[:1], places=3) == 1.0


# the figure


@pytest.mark.slow
def test_placement_measures_every_rule_on_every_load_and_draws(tmp_path) -> None:
    cut = ("draw=true", "system=punica", "figure.seconds=2", "figure.waiting=8", "figure.seeds=2")
    outcome = run(composed(tmp_path, *cut, name=PLACEMENT.name), PLACEMENT)
    panels = [LOAD, MIXED, PADDED, CROWD, DRIFT]
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], len(panels), 3)
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


def test_another_popularity_is_placed_at_one_rank_in_a_panel_of_its_own(tmp_path) -> None:
    cut = ("system=punica", "figure.seconds=2", "figure.waiting=8", "figure.seeds=1", "draw=false")
    outcome = run(composed(tmp_path, *cut, "workload.names=[Skewed,Identical]", name=PLACEMENT.name), PLACEMENT)
    loads = [row for row in read_rows(outcome.rows_file) if row.metric == "loads_from_disk"]
    assert [(row.panel, row.workload) for row in loads] == [(LOAD, "Skewed"), (f"{LOAD}, Identical", "Identical")]
    assert loads[1].value < loads[0].value
