"""Numbers of a whole hour: the same of rows and of a served hour, by hand and beside the paper's."""

from pathlib import Path

import numpy as np
import pytest

from experiments.cluster import hour_numbers as numbers
from experiments.cluster.hour_numbers import UNITS, Windows, number_readings, windows_of
from experiments.cluster.served import ServedHour
from experiments.facts.paper import read_figure

PAPER = Path(__file__).parents[2] / "paper_results"


def hour(seconds: int = 3600) -> ServedHour:
    """Two GPUs: one full, the other full too from 2400 s to 2460 s; from 1200 s to 1800 s both are half full."""
    second = np.arange(seconds)
    spread, full = second // 600 == 2, second // 60 == 40
    batch = np.stack([np.where(spread, 16, 32), 16 * spread + 32 * full])
    arrivals = np.repeat(second, np.where(full, 2, 1)).astype(float)
    tokens, steps = batch.sum(axis=0), np.zeros(33)
    return ServedHour(float(seconds), arrivals, arrivals, arrivals + 1, tokens, batch, steps, "simulated", "a")


def test_numbers_of_an_hour_made_by_hand():
    found = windows_of(hour()).numbers()
    assert (found[numbers.FIRST], found[numbers.LAST], found[numbers.EXCESS]) == (1.0, 1.0, pytest.approx(2.0))
    assert [found[name] for name in (numbers.LEAST_WOKEN, numbers.WOKEN, numbers.MOST_WOKEN)] == [0.0, 1.0, 2.0]
    assert found[numbers.PACE] == pytest.approx(32.0)
    assert found[numbers.FULL_MINUTES] == pytest.approx(51 / 71, abs=0.04)  # pixels at the edges are of two minutes
    assert found[numbers.FOLLOWS] > 0.99
    assert 0.1 < found[numbers.CONSOLIDATED] < 0.5


def test_readings_of_a_seed_are_those_of_its_windows_and_a_part_of_an_hour_has_none():
    served = hour()
    found = {one.metric: (one.value, one.unit, one.kind, one.cost_model) for one in number_readings(served)}
    told = windows_of(served).numbers()
    assert found == {name: (told[name], unit, "simulated", "a") for name, unit in UNITS.items()}
    assert number_readings(hour(600)) == []


def test_the_papers_windows_give_what_it_prints():
    found = Windows.of(read_figure(PAPER, "13")).numbers()
    assert found[numbers.FOLLOWS] == pytest.approx(0.997, abs=5e-4)
    assert found[numbers.CONSOLIDATED] == pytest.approx(0.99, abs=5e-3)
    assert found[numbers.PACE] == pytest.approx(590, rel=0.05)
