"""Scheduling rules side by side: their loads, their rows, and their table."""

import numpy as np
import pandas as pd
import pytest
from fakes import PAPER

from experiments.cluster.hour import RANK
from experiments.ext_placement import CROWD, DRIFT, LOAD, MIXED, load, while_full
from experiments.harness.points import Point
from experiments.harness.schema import ConfigError

ABOUT = {"ranks": [8, 64], "adapters": 200}


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
    with pytest.raises(ConfigError, match=r"figure\.waiting=20000, the hour has 18\d+ requests"):
        drawn(LOAD, count=20_000)


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
