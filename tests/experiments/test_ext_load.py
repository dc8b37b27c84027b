"""Latency under load and many adapters: their grids, what they refuse, and rates that come from rows."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import QUIET, composed, points_of
from hydra.core.config_store import ConfigStore
from tiny import values

from experiments.ext_latency_under_load import AT_BASELINE, CAPACITY, WITHOUT_LORA, bound
from experiments.harness import ConfigError, Reading
from experiments.harness.catalogue import experiments
from experiments.harness.command import register_names
from experiments.harness.resume import run
from experiments.measure.records import read_rows
from experiments.systems import loaded
from experiments.systems.open_loop import SLOT, Trace, Traced
from experiments.systems.serving import Step
from experiments.workload import WORKLOADS

LOAD, MANY = (next(iter(experiments([name]))) for name in ("ext_latency_under_load", "ext_many_adapters"))


def test_every_system_is_loaded_up_to_its_own_capacity_and_punica_at_the_baselines(tmp_path) -> None:
    points = points_of(tmp_path, LOAD, "scale=laptop")
    panels = {name: [point.panel for point in points if point.system == name] for name in ("punica", "static_batching")}
    loads = [f"load {percent} %" for percent in (30, 60, 80, 100, 120)]
    assert panels == {"punica": [CAPACITY, *loads, AT_BASELINE], "static_batching": [CAPACITY, *loads]}
    assert {point.rank for point in points if point.system == "continuous_batching"} == {None}


@pytest.mark.parametrize(
    ("experiment", "override"),
    [(LOAD, "figure.max_len=5000"), (MANY, "figure.max_len=3"), (MANY, "figure.in_memory=2")],
)
def test_what_cannot_run_is_refused(tmp_path, experiment, override) -> None:
    with pytest.raises(ConfigError, match=f"{override} must"):
        points_of(tmp_path, experiment, override)


READS_WORKLOAD = [experiment for experiment in experiments() if "workload" in experiment.reads]


@pytest.mark.parametrize("experiment", READS_WORKLOAD, ids=lambda experiment: experiment.name)
def test_a_workload_is_measured_everywhere_by_being_registered(tmp_path, monkeypatch, experiment) -> None:
    monkeypatch.setitem(WORKLOADS._entries, "Halves", lambda n: [n - n // 2, n // 2] if n > 1 else [1])
    composed(tmp_path)  # registers the others
    monkeypatch.setitem(ConfigStore.instance().repo["workload"], "halves.yaml", None)
    register_names("workload", ["Halves"])
    (trace := tmp_path / "trace.jsonl").write_text("")
    given = [f"figure.trace={trace}"] if experiment.name == "ext_prefix_cache" else []
    points = points_of(tmp_path, experiment, "workload=halves", "hardware=cpu", *given)
    assert {point.workload for point in points} - {"", "none"} == {"Halves"}
    assert len({point.key() for point in points}) == len(points)


def test_the_bound_is_five_decode_steps_and_a_prompt() -> None:
    readings = [Reading("decode_step", 10.0, "ms"), Reading("prefill_step", 30.0, "ms")]
    assert bound(readings[:1]) == []
    assert values(bound(readings)) == {"ttft_bound": 80.0}, "too few requests for a p99"
    p99 = Reading("time_to_first_token_p99", 40.0, "ms")
    assert values(bound([*readings, p99])) == {"ttft_bound": 80.0, "ttft_p99_over_bound": 0.5}


def trace_at(span) -> Trace:
    """Three requests in its measured time, served at once."""
    at = span.warm
    times = {"step": 0, "first": at + 0.01, "last": at + 0.02, "tokens": 2, "ended": 1, "gaps": [0.01]}
    done = [Traced(at, 2, SLOT, 0, SLOT, **times) for _ in range(3)]
    return Trace(done, [Step(at, at + 0.01, 3, 9), Step(at + 0.01, at + 0.02, 3, 0)], 9.0)


class Scripted:
    """Stands for what is timed: every capacity is another one, and what was asked for is kept."""

    def __init__(self, monkeypatch) -> None:
        self.capacities: list[float] = []
        self.loads: list[tuple[float, float, int]] = []
        monkeypatch.setattr(loaded, "capacity_of", self.capacity_of)
        monkeypatch.setattr(loaded, "load", self.load)
        monkeypatch.setattr(loaded, "World", lambda *_: SimpleNamespace(sets=4))
        monkeypatch.setattr(loaded.LoadBench, "system", lambda *_: None)
        monkeypatch.setattr(loaded.LoadBench, "jobs", lambda *_: [])

    def capacity_of(self, *_):
        self.capacities.append(10.0 + len(self.capacities))
        return [Reading("capacity", self.capacities[-1], "request/s")]

    def load(self, system, jobs, rate, span, seed):
        self.loads.append((rate, span.seconds, seed))
        return trace_at(span)


@pytest.fixture
def timed(monkeypatch):
    LOAD.release()
    MANY.release()
    yield Scripted(monkeypatch)
    LOAD.release()
    MANY.release()


def by_point(outcome, metric):
    """By panel, system and repeat."""
    rows = [row for row in read_rows(outcome.rows_file) if row.metric == metric]
    return {(row.panel, row.system, row.repeat): row.value for row in rows}


def test_each_repeat_measures_capacity_anew_and_loads_by_its_own(tmp_path, timed) -> None:
    words = ("system=punica", "figure.loads=[50,80]", "scale.passes=3")
    outcome = run(composed(tmp_path, *words, name=LOAD.name), LOAD)
    assert (outcome.measured, outcome.failed) == (3 * (3 + 3), [])
    capacities, rates = by_point(outcome, "capacity"), by_point(outcome, "offered_rate")
    assert len(set(capacities.values())) == len(capacities) == len(timed.capacities) == 9, "and the baselines' too"
    for repeat in range(3):
        own = capacities[CAPACITY, "punica", repeat]
        best = max(capacities[CAPACITY, name, repeat] for name in WITHOUT_LORA)
        assert [rates[f"load {load} %", "punica", repeat] for load in (50, 80)] == [0.5 * own, 0.8 * own]
        assert rates[AT_BASELINE, "punica", repeat] == best
        assert by_point(outcome, "load")[AT_BASELINE, "punica", repeat] == best / own


def test_a_later_command_loads_by_the_rows_that_are_there(tmp_path, timed) -> None:
    first = run(composed(tmp_path, "system=punica", "figure.loads=[120]", name=LOAD.name), LOAD)
    assert first.measured == 3 + 1 + 1
    outcome = run(composed(tmp_path, "system=punica", "figure.loads=[50]", name=LOAD.name), LOAD)
    assert (outcome.measured, len(timed.capacities)) == (1, 3), "nothing but the load"
    assert timed.loads[-1][0] == 0.5 * by_point(outcome, "capacity")[CAPACITY, "punica", 0]
    run(composed(tmp_path, "system=punica", "figure.loads=[50]", "figure.max_len=24", name=LOAD.name), LOAD)
    assert len(timed.capacities) == 6, "rows of other settings are none"


def test_a_disturbed_capacity_is_measured_again(tmp_path, timed, machine) -> None:
    machine.script = [replace(QUIET, disturbed=True, other_cpu=0.5)]
    words = ("system=static_batching", "figure.loads=[120]", "scale.tries=1")
    outcome = run(composed(tmp_path, *words, name=LOAD.name), LOAD)
    assert timed.capacities == [10.0, 11.0], "not the same number once more"
    assert by_point(outcome, "capacity") == {(CAPACITY, "static_batching", 0): 11.0}


@pytest.mark.parametrize("order", ["system.names=[punica_resident_first,punica]", "system=punica_resident_first"])
def test_rules_of_admission_get_the_same_arrivals(tmp_path, timed, order) -> None:
    outcome = run(composed(tmp_path, "workload=zipf", order, "scale.passes=2", name=MANY.name), MANY)
    assert (outcome.measured, outcome.failed) == (2 * 2 * 3, [])
    capacities = by_point(outcome, "capacity")
    assert len(set(capacities.values())) == len(timed.capacities) == 12
    for (panel, _, repeat), rate in by_point(outcome, "offered_rate").items():
        assert rate == 0.5 * capacities[panel, "punica", repeat]
    assert set(Counter((rate, seed) for rate, _, seed in timed.loads).values()) == {2}, "one rate and seed for both"
