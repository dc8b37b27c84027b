"""Engines that are loaded by the clock: on a clock on which every step takes a second, all of it can be foretold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_world, values

from experiments.benches.engine_steps import clear
from experiments.facts.systems import ENGINE, entries
from experiments.harness import CheckFailed
from experiments.systems import open_loop
from experiments.systems.loaded import FromFolders, Loaded, begin_steadily, capacity_of, check_system, load
from experiments.systems.open_loop import DISK, MEMORY, SLOT, Arrival, Trace, Traced
from experiments.systems.serving import World
from experiments.systems.stream import Job, paper_stream
from experiments.workload.arrivals import Span

PROMPT = (5, 9, 77)
LOADED = [entry.name for entry in entries() if entry.served_by == ENGINE]
MIXED = [Job(PROMPT, tokens, 1 + i) for i, tokens in enumerate((17, 43, 23, 37, 29, 19, 41))]


class Ticks:
    """A clock that stands still but for `sleep`, and for a second in every step of `system` and `row` for each row of a
    prompt in it.
    """

    def __init__(self, system: Loaded, monkeypatch, row: float = 0.0) -> None:
        self.now, self.slept, real = 100.0, list[float](), system.engine.step

        def step():
            output = real()
            self.now += 1.0 + row * output.statistics.num_prefill_tokens
            return output

        monkeypatch.setattr(system.engine, "step", step)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(seconds, 1e-6)  # beyond what rounding takes away


@pytest.fixture(scope="module")
def world() -> World:
    return tiny_world()


@pytest.fixture(scope="module")
def systems(world) -> dict[str, Loaded]:
    return {name: Loaded(world, name) for name in LOADED}


def run(system, monkeypatch, jobs, times, measured=(0.0, 100.0), deadline=1000.0, row=0.0) -> Trace:
    with monkeypatch.context() as patch:
        ticks = Ticks(system, patch, row)
        system.register({job.adapter_id for job in jobs})
        arrivals = [Arrival(system.request(job), at) for job, at in zip(jobs, times, strict=True)]
        return open_loop.drive(system.engine, arrivals, measured, deadline, system.place_of, ticks, ticks.sleep)


def capacity(system, monkeypatch, jobs, seconds) -> dict[str, float]:
    with monkeypatch.context() as patch:
        return values(capacity_of(system, jobs, seconds, Ticks(system, patch)))


def test_requests_join_when_their_time_has_passed_and_what_users_see(systems, monkeypatch) -> None:
    jobs = [Job(PROMPT, 3, 1), Job(PROMPT, 2, 2), Job(PROMPT, 1, 1)]
    trace = run(systems["punica"], monkeypatch, jobs, [0.0, 0.5, 10.0])
    first, second, third = trace.requests
    assert (first.first, first.last, first.tokens) == (1, 3, 3)
    assert (second.first, second.last) == (2, 3), "it came during the first step"
    assert (third.first, third.last) == (11, 11)
    assert [request.place for request in trace.requests] == [MEMORY, MEMORY, SLOT]
    assert [(step.live, step.prompt_rows) for step in trace.steps] == [(1, 3), (2, 3), (2, 0), (1, 3)]
    span = Span(0.25, 10.0, 0.0)
    users = open_loop.users_of(trace, span)
    found = values([*open_loop.user_readings(users, trace), *open_loop.step_readings(trace, span)])
    assert found["requests"] == 2, "the first came before the measured time"
    assert found["time_to_first_token"] == pytest.approx(1250)
    assert found["time_to_first_token_p95"] == pytest.approx(1000 * np.percentile([1.5, 1.0], 95))
    assert found["time_to_first_token_max"] == pytest.approx(1500)
    assert (found["time_per_output_token"], found["steps_to_first_token"]) == (1000, 1)
    assert found["request_latency"] == pytest.approx(1000 * (2.5 + 1.0) / 2)
    assert found["throughput"] == pytest.approx((1 + 3 + 2 + 3 + 2) / 10.0)  # the fourth step ends too late
    assert (found["decode_step"], found["prefill_step"]) == (1000, 1000)
    assert found["busy"] == pytest.approx(0.3)


@pytest.mark.parametrize(("samples", "far"), [(99, {"x_p95", "x_max"}), (100, {"x_p95", "x_p99", "x_max"})])
def test_a_p99_is_of_a_hundred_samples_or_more(samples, far) -> None:
    found = values(open_loop.tail("x", range(samples), 2.0, "ms"))
    assert found.keys() == {"x", *far}
    assert found["x_max"] == 2 * (samples - 1)


def test_the_lifted_limit_shows_in_single_gaps_and_hardly_in_a_requests_mean(systems, monkeypatch) -> None:
    """A burst of three joins one who decodes; a step takes a second, and one more for each row of a prompt."""
    jobs, found = [Job(PROMPT, 20, 1), *[Job(PROMPT, 1, 2)] * 3], {}
    for name in ("punica", "punica_many"):
        trace = run(systems[name], monkeypatch, jobs, [0.0, 4.5, 4.5, 4.5], row=1.0)
        readings = values(open_loop.user_readings(trace.requests[:1], trace))
        found[name] = readings["inter_token_latency_max"], readings["time_per_output_token_max"]
    assert found == {"punica": (4000, pytest.approx(28000 / 19)), "punica_many": (10000, pytest.approx(28000 / 19))}


def test_those_who_are_not_done_by_the_deadline_count_and_leave(systems, monkeypatch) -> None:
    system = systems["continuous_batching"]
    jobs = [Job(PROMPT, 4, adapter) for adapter in (1, 2, 3)]
    trace = run(system, monkeypatch, jobs, [0.0, 0.0, 0.0], deadline=6.0)
    assert [request.tokens for request in trace.requests] == [4, 2, 0]
    assert not system.engine.has_unfinished()
    readings = open_loop.user_readings(open_loop.users_of(trace, Span(0.0, 1.0, 5.0)), trace)
    assert values(readings)["unfinished"] == 2
    assert values(readings, "p90")["time_to_first_token"] > 5000, "at least until the end"


def test_arrivals_go_on_until_the_measured_ones_are_done(systems, monkeypatch) -> None:
    jobs, times = [Job(PROMPT, 5, 1 + i % 4) for i in range(50)], [float(i) for i in range(50)]
    trace = run(systems["punica"], monkeypatch, jobs, times, measured=(2.0, 6.0))
    assert [request.ended for request in trace.requests if 2 <= request.at < 6] == [1] * 4
    assert 8 < len(trace.requests) < 20, "and no longer"


DONE = Traced(0.0, 2, SLOT, 0, step=0, first=1.0, last=2.0, tokens=2, ended=1)
WAITS = Traced(0.0, 2, SLOT, 0)
ALL = Span(0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("requests", "strangers", "words"),
    [
        ([DONE, replace(DONE, tokens=1)], 0, "{.lost.: 1}"),
        ([replace(DONE, ended=2)], 0, "{.doubled.: 1}"),
        ([replace(DONE, tokens=3)], 0, "{.doubled.: 1}"),
        ([DONE], 1, "{.doubled.: 1}"),
        ([WAITS, *[DONE] * 33], 0, "{.starved.: 1}"),
        ([replace(DONE, at=5.0)], 0, "no request arrived"),
    ],
    ids=["lost", "ended twice", "a token too many", "a token after the end", "starved", "none"],
)
def test_a_trace_in_which_a_request_was_wronged_is_refused(requests, strangers, words) -> None:
    with pytest.raises(CheckFailed, match=words):
        open_loop.users_of(Trace(requests, [], 10.0, strangers), ALL)


@pytest.mark.parametrize("name", LOADED)
def test_every_system_gives_the_right_tokens(name, systems) -> None:
    check_system(systems[name], paper_stream("Distinct", 6, 48, 256), 5, 4)


@pytest.mark.parametrize(("name", "batch"), [("punica", 4), ("punica_many", 4), ("continuous_batching", 1)])
def test_capacity_is_that_of_the_middle_of_a_queue(name, batch, systems, monkeypatch) -> None:
    """Requests longer than what is timed (10 steps beyond the 4 of the warm-up) end in it all the same."""
    found = capacity(systems[name], monkeypatch, MIXED, 10.0)
    assert found["capacity"] == pytest.approx(batch / np.mean([job.new_tokens for job in MIXED]), rel=0.1)
    assert found["finished"] <= 4
    assert found["finished"] > 0 or batch == 1


def test_the_queue_goes_on_with_the_request_that_joins_at_the_step_in_its_middle(systems) -> None:
    """Requests of four steps in a batch of four, one of which joins in every step: at step 12 the thirteenth."""
    jobs = [Job(PROMPT, 4, 1 + i) for i in range(4)]
    system = systems["punica"]
    system.register({1, 2, 3, 4})
    assert begin_steadily(system, jobs) == 12
    assert [state.adapter_id for state in system.engine.scheduler.running] == [2, 3, 4]
    clear(system.engine)
    assert begin_steadily(systems["static_batching"], jobs) == 0


@pytest.mark.parametrize("seconds", [11.0, 15.0, 24.0])
def test_static_batches_are_counted_whole(seconds, systems, monkeypatch) -> None:
    """Batches of four for ten steps each, in which two end after two: 0.4 requests a second, wherever time ends."""
    jobs = [Job(PROMPT, tokens, 1) for tokens in (2, 10, 2, 10)]
    found = capacity(systems["static_batching"], monkeypatch, jobs, seconds)
    assert (found["capacity"], found["steps"] % 10) == (pytest.approx(0.4), 0)
    assert found["finished"] == 0.4 * found["steps"]


def test_an_adapter_that_is_evicted_while_its_request_waits_has_to_be_loaded(world, monkeypatch) -> None:
    """Two slots for adapters 1 and 2; 3 takes that of 1 after another request for 1 came while it was there."""
    system = Loaded(world, "punica", slots=2)
    jobs = [Job(PROMPT, tokens, adapter) for tokens, adapter in ((2, 1), (9, 2), (9, 3), (2, 1), (2, 1))]
    trace = run(system, monkeypatch, jobs, [0.0, 0.0, 1.5, 1.6, 30.0])
    assert [request.place for request in trace.requests] == [MEMORY, MEMORY, MEMORY, SLOT, SLOT]
    assert [request.at_join for request in trace.requests] == [MEMORY, MEMORY, MEMORY, MEMORY, SLOT]
    found = values(open_loop.place_readings(trace.requests))
    assert (found["slot_hit_rate"], found["slot_hit_rate_at_join"]) == (0.4, 0.2)


def test_loading_is_told_from_reading() -> None:
    users = [replace(DONE, at_join=place, first=first) for place, first in ((SLOT, 1.0), (MEMORY, 2.0), (DISK, 8.0))]
    found = values(open_loop.place_readings(users))
    wanted = {"resident": 1000, "loading": 5000, "from_memory": 2000, "from_disk": 8000}
    assert {name: found[f"time_to_first_token_{name}"] for name in wanted} == wanted
    assert found["loading_over_resident"] == 5
    assert (found["slot_hit_rate"], found["memory_hit_rate_at_join"]) == (1, pytest.approx(2 / 3))


def test_adapters_that_host_memory_has_no_room_for_are_read_again(world, tmp_path: Path, monkeypatch) -> None:
    system = FromFolders(world, "punica", slots=None, in_memory=5, root=tmp_path)
    jobs = [Job(PROMPT, 3, 1 + i) for i in range(9)]
    trace = run(system, monkeypatch, jobs * 2, [float(i) for i in range(18)])
    places = [request.place for request in trace.requests]
    assert places[:5] == [MEMORY] * 5
    assert set(places[5:]) == {DISK}, "nine in turn through five places"
    assert [request.tokens for request in trace.requests] == [3] * 18
    assert len(system.engine.manager) == 5
    check_system(system, jobs, 8, 4)


@pytest.mark.parametrize("timed", [
    lambda system, jobs, ticks: capacity_of(system, jobs, 5.0, ticks),
    lambda system, jobs, ticks: load(system, jobs, 100.0, Span(0.01, 0.05, 5.0), seed=0),
], ids=["capacity", "load"])  # fmt: skip
def test_a_graph_captured_while_the_clock_runs_costs_the_row(systems, monkeypatch, timed) -> None:
    system, counts = systems["punica"], iter(range(9))
    monkeypatch.setattr(system, "_graphs", lambda: next(counts))
    with pytest.raises(CheckFailed, match="punica captured a CUDA graph while it was timed"):
        timed(system, [Job(PROMPT, 2, 1)] * 4, Ticks(system, monkeypatch))
    assert not system.engine.has_unfinished()
