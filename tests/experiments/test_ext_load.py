"""Latency under load and many adapters: their grids, what they refuse, rows of a short run, figures."""

import shlex
from collections import Counter
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pandas as pd
import pytest
from fakes import QUIET, composed
from hydra.core.config_store import ConfigStore

from experiments.ext_latency_under_load import AT_BASELINE, CAPACITY, WITHOUT_LORA, LoadBench, bound
from experiments.ext_many_adapters import ROOM, Holding, ManyBench
from experiments.harness import ConfigError, Reading
from experiments.harness.catalogue import experiments
from experiments.harness.command import register_names
from experiments.harness.resume import run
from experiments.harness.settings import keys_read, refuse_unread, settle
from experiments.harness.span import FEWEST_FOR_P99, Span
from experiments.measure.records import read_rows
from experiments.plots.frames import measured_frame, rows_of_repeats
from experiments.plots.load import draw_load, draw_many
from experiments.systems import load_bench
from experiments.systems.open_loop import SLOT, TimedStep, Trace, Traced
from experiments.workload import WORKLOADS

LOAD, MANY = (next(iter(experiments([name]))) for name in ("ext_latency_under_load", "ext_many_adapters"))


def settled(tmp_path, experiment, *overrides):
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def test_every_system_is_loaded_up_to_its_own_capacity_and_punica_at_the_baselines(tmp_path) -> None:
    points = LOAD.points(settled(tmp_path, LOAD, "scale=laptop"))
    panels = {name: [point.panel for point in points if point.system == name] for name in ("punica", "static_batching")}
    loads = [f"load {percent} %" for percent in (30, 60, 80, 100, 120)]
    assert panels == {"punica": [CAPACITY, *loads, AT_BASELINE], "static_batching": [CAPACITY, *loads]}
    assert {point.rank for point in points if point.system == "continuous_batching"} == {None}
    assert len({point.key() for point in points}) == len(points)


def test_panels_name_where_adapters_are(tmp_path) -> None:
    points = MANY.points(settled(tmp_path, MANY, "scale=gpu", "workload=zipf"))
    assert list(dict.fromkeys(point.panel for point in points)) == [
        "1 adapters", "32 adapters", "100 adapters", "1000 adapters", "2000 adapters", "16 adapters, 8 slots",
        "1000 adapters, 128 in memory",
    ]  # fmt: skip
    assert Holding(7, slots=2, in_memory=4).panel == "7 adapters, 2 slots, 4 in memory"


@pytest.mark.parametrize(
    ("experiment", "override", "words"),
    [
        (LOAD, "figure.max_len=5000", "figure.max_len=5000 must lie in"),
        (MANY, "figure.max_len=3", "figure.max_len=3 must lie in"),
        (MANY, "figure.in_memory=2", "figure.in_memory=2 must be at least figure.batch_size=3"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, experiment, override, words) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment.points(settled(tmp_path, experiment, override))


@pytest.fixture
def halves(tmp_path, monkeypatch):
    """A workload of the user's own, while the test runs."""
    monkeypatch.setitem(WORKLOADS._entries, "Halves", lambda n: [n - n // 2, n // 2] if n > 1 else [1])
    composed(tmp_path)  # registers the others
    monkeypatch.setitem(ConfigStore.instance().repo["workload"], "halves.yaml", None)
    register_names("workload", ["Halves"])
    return "workload=halves"


READS_WORKLOAD = [  # ext_server asks a server
    experiment for experiment in experiments() if "workload" in experiment.reads and experiment.name != "ext_server"
]


@pytest.mark.parametrize("experiment", READS_WORKLOAD, ids=lambda experiment: experiment.name)
def test_a_workload_is_measured_everywhere_by_being_registered(tmp_path, halves, experiment) -> None:
    hardware = "hardware=h200" if experiment.name == "ext_determinism" else "hardware=cpu"
    points = experiment.points(settled(tmp_path, experiment, halves, hardware))
    assert {point.workload for point in points} - {"", "none"} == {"Halves"}
    assert len({point.key() for point in points}) == len(points)


def test_a_registered_workload_draws_among_many_adapters(tmp_path, halves) -> None:
    cfg = settled(tmp_path, MANY, halves)
    drawn = Counter(job.adapter_id for job in ManyBench(cfg).jobs("Halves", 100))
    assert drawn.keys() == {1, 2}
    assert drawn.total() == cfg.figure.requests


def test_adapters_that_memory_cannot_hold_are_aliases_and_said_to_be(tmp_path, monkeypatch) -> None:
    cfg = settled(tmp_path, MANY)
    size = cfg.model.lora_parameters(cfg.adapters.ranks[0]) * cfg.model.dtype.bytes
    for free, sets in ((6.5 * size / ROOM, 6), (1e12, 7), (0, 3)):
        monkeypatch.setattr("punica.parallel.memory.free_bytes", lambda _, free=free: int(free))
        bench = ManyBench(cfg)
        assert bench.world.sets == sets
        held = {one.metric: one.value for one in bench.held(object(), Holding(7, in_memory=4))}
        assert held == {"weight_sets": sets, "aliases": 7 - sets}
        assert bench.held(object(), Holding(2))[0].value == 2
    assert {one.metric for one in bench.held(SimpleNamespace(cached=0.0), Holding(2))} > {"page_cache_share"}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [LOAD, MANY], ids=lambda experiment: experiment.name)
def test_a_registered_workload_is_served_under_load(tmp_path, halves, experiment) -> None:
    outcome = run(composed(tmp_path, halves, "system=punica", name=experiment.name), experiment)
    assert outcome.failed == []
    assert {row.workload for row in read_rows(outcome.rows_file)} == {"Halves"}


def test_the_bound_is_five_decode_steps_and_a_prompt() -> None:
    values = {"decode_step": 10.0, "prefill_step": 30.0, "time_to_first_token_p99": 40.0}
    found = {one.metric: one.value for one in bound([Reading(name, x, "ms") for name, x in values.items()])}
    assert found == {"ttft_bound": 80.0, "ttft_p99_over_bound": 0.5}
    assert bound([Reading("decode_step", 10.0, "ms")]) == []
    assert [one.metric for one in bound([Reading(name, values[name], "ms") for name in list(values)[:2]])] == [
        "ttft_bound"
    ], "too few requests for a p99"


@pytest.mark.parametrize("name", ["ext_latency_under_load", "ext_many_adapters", "ext_moe"])
def test_the_commands_of_the_docstring_can_be_pasted(tmp_path, name) -> None:
    experiment = next(iter(experiments([name])))
    text = import_module(f"experiments.{name}").__doc__.replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.lstrip().startswith("python -m")]
    assert len(commands) >= 2
    for _, _, module, *words in commands:
        assert module == f"experiments.{name}"
        device = ["hardware=h200", "hardware.device=cuda"]
        assert experiment.points(settle(composed(tmp_path, *device, *words, name=name), experiment))
        refuse_unread([*device, *words], keys_read(experiment), name)


# rates come from rows


def trace_at(rate: float, span) -> Trace:
    """Three requests in its measured time, served at once."""
    begin = span.warm
    done = [
        Traced(begin, 2, SLOT, 0, SLOT, 0, begin, begin + 0.01, begin + 0.02, tokens=2, ended=1, gaps=[0.01])
        for _ in range(3)
    ]
    return Trace(done, [TimedStep(begin, begin + 0.01, 3, 9, 0), TimedStep(begin + 0.01, begin + 0.02, 3, 0, 0)], 9.0)


class Scripted:
    """Stands for what is timed: every capacity is another one, and what was asked for is kept."""

    def __init__(self, monkeypatch) -> None:
        self.capacities: list[tuple[object, float]] = []
        self.loads: list[tuple[float, float, int]] = []
        monkeypatch.setattr(load_bench, "capacity_of", self.capacity_of)
        monkeypatch.setattr(load_bench, "load", self.load)
        monkeypatch.setattr(LoadBench, "system", lambda bench, name: name)
        monkeypatch.setattr(LoadBench, "__init__", self.bench)
        monkeypatch.setattr(LoadBench, "jobs", lambda bench, workload: [])
        monkeypatch.setattr(ManyBench, "system", lambda bench, name, holding: name)
        monkeypatch.setattr(ManyBench, "__init__", self.bench)
        monkeypatch.setattr(ManyBench, "jobs", lambda bench, workload, adapters: [])

    @staticmethod
    def bench(bench, cfg) -> None:
        bench.span = Span(0.0, 1.0, 1.0, 6, 5.0)
        bench.held = lambda system, holding: []

    def capacity_of(self, system, jobs, seconds):
        self.capacities.append((system, 10.0 + len(self.capacities)))
        return load_bench.Capacity(self.capacities[-1][1], 1.0, 1.0, 4, 1)

    def load(self, system, jobs, rate, span, seed):
        self.loads.append((rate, span.at(rate).seconds, seed))
        return trace_at(rate, span.at(rate))


def values(outcome, metric):
    """By panel, system and repeat."""
    rows = [row for row in read_rows(outcome.rows_file) if row.metric == metric]
    return {(row.panel, row.system, row.repeat): row.value for row in rows}


def test_each_repeat_measures_capacity_anew_and_loads_by_its_own(tmp_path, monkeypatch) -> None:
    timed = Scripted(monkeypatch)
    words = ("system=punica", "figure.loads=[50,80]", "scale.passes=3")
    outcome = run(composed(tmp_path, *words, name=LOAD.name), LOAD)
    assert (outcome.measured, outcome.failed) == (3 * (3 + 3), [])
    capacities = values(outcome, "capacity")
    assert len(set(capacities.values())) == len(capacities) == len(timed.capacities) == 9, "and the baselines' too"
    rates = values(outcome, "offered_rate")
    for repeat in range(3):
        own = capacities[CAPACITY, "punica", repeat]
        best = max(capacities[CAPACITY, name, repeat] for name in WITHOUT_LORA)
        assert [rates[f"load {load} %", "punica", repeat] for load in (50, 80)] == [0.5 * own, 0.8 * own]
        assert rates[AT_BASELINE, "punica", repeat] == best
        assert values(outcome, "load")[AT_BASELINE, "punica", repeat] == best / own


def test_a_later_command_loads_by_the_rows_that_are_there(tmp_path, monkeypatch) -> None:
    timed = Scripted(monkeypatch)
    first = run(composed(tmp_path, "system=punica", "figure.loads=[120]", name=LOAD.name), LOAD)
    assert first.measured == 3 + 1 + 1
    outcome = run(composed(tmp_path, "system=punica", "figure.loads=[50]", name=LOAD.name), LOAD)
    assert (outcome.measured, len(timed.capacities)) == (1, 3), "nothing but the load"
    own = values(outcome, "capacity")[CAPACITY, "punica", 0]
    assert timed.loads[-1][0] == 0.5 * own
    run(composed(tmp_path, "system=punica", "figure.loads=[50]", "figure.max_len=24", name=LOAD.name), LOAD)
    assert len(timed.capacities) == 6, "rows of other settings are none"


def test_a_disturbed_capacity_is_measured_again(tmp_path, monkeypatch, machine) -> None:
    timed = Scripted(monkeypatch)
    machine.script = [replace(QUIET, disturbed=True, other_cpu=0.5)]
    words = ("system=static_batching", "figure.loads=[120]", "scale.tries=1")
    outcome = run(composed(tmp_path, *words, name=LOAD.name), LOAD)
    assert [capacity for _, capacity in timed.capacities] == [10.0, 11.0], "not the same number once more"
    assert values(outcome, "capacity") == {(CAPACITY, "static_batching", 0): 11.0}


def test_the_baselines_capacity_is_offered_for_as_long_as_it_takes(tmp_path, monkeypatch) -> None:
    timed = Scripted(monkeypatch)
    run(composed(tmp_path, "system=punica", "figure.loads=[1]", name=LOAD.name), LOAD)
    (low, longest, _), (best, long, _) = timed.loads
    assert (low * longest < 6, longest) == (True, 5.0), "a load is cut off"
    assert best * long >= 6


@pytest.mark.parametrize("order", ["system.names=[punica_resident_first,punica]", "system=punica_resident_first"])
def test_rules_of_admission_get_the_same_arrivals(tmp_path, monkeypatch, order) -> None:
    timed = Scripted(monkeypatch)
    outcome = run(composed(tmp_path, "workload=zipf", order, "scale.passes=2", name=MANY.name), MANY)
    assert (outcome.measured, outcome.failed) == (2 * 2 * 3, [])
    assert len(timed.capacities) == 12
    capacities, rates = values(outcome, "capacity"), values(outcome, "offered_rate")
    assert len(set(capacities.values())) == 12
    for (panel, system, repeat), rate in rates.items():
        assert rate == 0.5 * capacities[panel, "punica", repeat], system
    by_arrivals = Counter((rate, seed) for rate, _, seed in timed.loads)
    assert set(by_arrivals.values()) == {2}, "one rate and seed for both"


@pytest.mark.slow
def test_a_loaded_system_has_rows_and_a_figure(tmp_path) -> None:
    cfg = composed(tmp_path, "system=punica", "engine.max_batch_size=4", "figure.loads=[80]", name=LOAD.name)
    outcome = run(cfg, LOAD)
    assert (outcome.measured, outcome.failed) == (5, [])
    rows = read_rows(outcome.rows_file)
    by_panel = {panel: {row.metric for row in rows if row.panel == panel} for panel in {row.panel for row in rows}}
    assert by_panel[CAPACITY] == {"capacity", "throughput", "mean_batch_size", "steps", "finished"}
    steps_of_both_kinds = {"decode_step", "prefill_step"} <= by_panel[AT_BASELINE]  # so few may be all of one
    assert ("ttft_bound" in by_panel[AT_BASELINE]) == steps_of_both_kinds
    requests = {row.panel: row.value for row in rows if row.metric == "requests"}  # follows the machine
    assert set(requests) == {"load 80 %", AT_BASELINE}
    for panel, count in requests.items():
        assert ("time_to_first_token_p99" in by_panel[panel]) == (count >= FEWEST_FOR_P99)
        assert ("ttft_p99_over_bound" in by_panel[panel]) == (
            {"ttft_bound", "time_to_first_token_p99"} <= by_panel[panel]
        )
        assert {"offered_rate", "time_to_first_token_max", "steps_to_first_token", "lost", "starved"} <= by_panel[panel]
    wrong = [row.value for row in rows if row.metric in ("lost", "doubled", "starved")]
    assert wrong == [0.0] * 6
    figure = draw_load(measured_frame(rows_of_repeats(outcome.rows_file)), pd.DataFrame())
    assert [axis.get_ylabel() for axis in figure.axes][-1] == "throughput\n(token/s)"
    assert all(axis.lines for axis in figure.axes)


@pytest.mark.slow
def test_many_adapters_have_rows_and_a_figure(tmp_path) -> None:
    outcome = run(composed(tmp_path, "workload=zipf", "system=punica_resident_first", name=MANY.name), MANY)
    assert (outcome.measured, outcome.failed) == (6, [])
    rows = read_rows(outcome.rows_file)
    found = {(row.panel, row.metric): row.value for row in rows if row.statistic in ("value", "count")}
    disk = "7 adapters, 4 in memory"
    assert {row.panel for row in rows} == {"5 adapters", "4 adapters, 2 slots", disk}
    assert found["5 adapters", "memory_hit_rate"] == 1
    assert found[disk, "adapters"] == found[disk, "weight_sets"] == 7
    assert found["5 adapters", "weight_sets"] == 5
    assert {value for (_, name), value in found.items() if name == "aliases"} == {0}
    assert 0 <= found[disk, "page_cache_share"] <= 1
    assert ("5 adapters", "page_cache_share") not in found
    assert all(found[disk, name] == 0 for name in ("lost", "doubled", "starved"))
    figure = draw_many(measured_frame(rows_of_repeats(outcome.rows_file)), pd.DataFrame())
    assert len(figure.axes) == 3
    assert len(figure.axes[0].patches) == 6
