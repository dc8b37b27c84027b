"""Engines that are loaded by the clock: on a clock on which every step takes a second, all of it can be foretold."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from experiments.benches import page_cache
from experiments.facts.systems import ENGINE, entries, without_lora
from experiments.harness import CheckFailed
from experiments.harness.schema import REPOSITORY, DType, ModelConf
from experiments.harness.span import Span
from experiments.systems.load_bench import capacity_of, check_system, load
from experiments.systems.load_readings import load_readings, place_readings, tail, user_readings, users_of
from experiments.systems.loaded import FromFolders, Loaded
from experiments.systems.open_loop import DISK, MEMORY, SLOT, Arrival, Trace, Traced, check_trace, counts_of, drive
from experiments.systems.steady import _members
from experiments.systems.stream import Job, paper_stream
from experiments.systems.weights import Limits
from experiments.systems.world import World
from experiments.workload import drawn_adapters, poisson_arrivals
from punica.engine import Engine

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip
PROMPT = (5, 9, 77)
LOADED = [entry.name for entry in entries() if entry.served_by == ENGINE]


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
    return World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8)


@pytest.fixture(scope="module")
def systems(world) -> dict[str, Loaded]:
    return {name: Loaded(world, name) for name in LOADED}


def run(system, ticks, jobs, times, measured=(0.0, 100.0), deadline=1000.0) -> Trace:
    system.hold({job.adapter_id for job in jobs})
    arrivals = [Arrival(request, at) for request, at in zip(system.requests(jobs), times, strict=True)]
    return drive(system.engine, arrivals, measured, deadline, system.place_of, ticks, ticks.sleep)


def poisson(system, ticks, jobs, rate, span, seed=0) -> Trace:
    times = poisson_arrivals(rate, span.deadline, seed)
    repeated = [jobs[i % len(jobs)] for i in range(len(times))]
    return run(system, ticks, repeated, times.tolist(), span.measured, span.deadline)


# the driver


def test_requests_join_when_their_time_has_passed(systems, monkeypatch) -> None:
    ticks = Ticks(systems["punica"], monkeypatch)
    trace = run(systems["punica"], ticks, [Job(PROMPT, 3, 1), Job(PROMPT, 2, 2), Job(PROMPT, 1, 1)], [0.0, 0.5, 10.0])
    first, second, third = trace.requests
    assert (first.joined, first.first, first.last, first.tokens) == (0, 1, 3, 3)
    assert (second.joined, second.first, second.last) == (1, 2, 3), "it came during the first step"
    assert (third.joined, third.first, third.last) == (10, 11, 11)
    assert ticks.slept == [7.0], "from the end of the third step to the third request"
    assert [request.step - request.before + 1 for request in trace.requests] == [1, 1, 1]
    assert [request.place for request in trace.requests] == [MEMORY, MEMORY, SLOT]
    assert [(step.live, step.prompt_rows) for step in trace.steps] == [(1, 3), (2, 3), (2, 0), (1, 3)]
    assert check_trace(trace) == counts_of(trace.requests)


def test_what_users_saw(systems, monkeypatch) -> None:
    ticks = Ticks(systems["punica"], monkeypatch)
    trace = run(systems["punica"], ticks, [Job(PROMPT, 3, 1), Job(PROMPT, 2, 2), Job(PROMPT, 1, 1)], [0.0, 0.5, 10.0])
    found = {
        (reading.metric, reading.statistic): reading.value for reading in load_readings(trace, Span(0.25, 10.0, 0.0))
    }
    assert found["requests", "count"] == 2, "the first came before the measured time"
    assert found["time_to_first_token", "median"] == pytest.approx(1250)
    assert found["time_to_first_token_p95", "value"] == pytest.approx(1000 * np.percentile([1.5, 1.0], 95))
    assert found["time_to_first_token_max", "value"] == pytest.approx(1500)
    assert not any(metric.endswith("_p99") for metric, _ in found), "two requests have none"
    assert found["time_per_output_token", "median"] == 1000
    assert found["request_latency", "median"] == pytest.approx(1000 * (2.5 + 1.0) / 2)
    assert found["queue_time", "median"] == pytest.approx(250)
    assert found["steps_to_first_token", "median"] == 1
    assert found["throughput", "value"] == pytest.approx((1 + 3 + 2 + 3 + 2) / 10.0)  # the fourth step ends too late
    assert (found["decode_step", "value"], found["prefill_step", "value"]) == (1000, 1000)
    assert found["busy", "value"] == pytest.approx(0.3)


@pytest.mark.parametrize(("samples", "far"), [(99, {"x_p95", "x_max"}), (100, {"x_p95", "x_p99", "x_max"})])
def test_a_p99_is_of_a_hundred_samples_or_more(samples, far) -> None:
    found = {one.metric: one.value for one in tail("x", range(samples), 2.0, "ms")}
    assert set(found) == {"x", *far}
    assert found["x_max"] == 2 * (samples - 1)
    assert tail("x", [], 1.0, "ms") == []


def test_at_a_low_rate_arrivals_are_measured_longer_up_to_a_limit() -> None:
    span = Span(1.0, 10.0, 5.0, least=400, longest=30.0)
    assert [span.at(rate).seconds for rate in (80.0, 20.0, 2.0)] == [10.0, 20.0, 30.0]
    assert replace(span, longest=np.inf).at(2.0).seconds == 200.0


def test_the_lifted_limit_shows_in_single_gaps_and_hardly_in_a_requests_mean(systems, monkeypatch) -> None:
    """A burst of three joins one who decodes; a step takes a second, and one more for each row of a prompt."""
    found = {}
    for name in ("punica", "punica_many"):
        with monkeypatch.context() as patch:
            ticks = Ticks(systems[name], patch, row=1.0)
            jobs = [Job(PROMPT, 20, 1), *[Job(PROMPT, 1, 2)] * 3]
            trace = run(systems[name], ticks, jobs, [0.0, 4.5, 4.5, 4.5])
        gaps = trace.requests[0].gaps
        assert (len(gaps), sum(gaps)) == (19, pytest.approx(19 + 9)), "what was to do is the same"
        readings = {one.metric: one.value for one in user_readings(trace.requests[:1], trace)}
        found[name] = readings["inter_token_latency_max"], readings["time_per_output_token_max"]
    assert found == {"punica": (4000, pytest.approx(28000 / 19)), "punica_many": (10000, pytest.approx(28000 / 19))}


def test_those_who_are_not_done_by_the_deadline_count_and_leave(systems, monkeypatch) -> None:
    system = systems["continuous_batching"]
    ticks = Ticks(system, monkeypatch)
    jobs = [Job(PROMPT, 4, adapter) for adapter in (1, 2, 3)]
    trace = run(system, ticks, jobs, [0.0, 0.0, 0.0], deadline=6.0)
    assert counts_of(trace.requests).unfinished == 2
    assert [request.tokens for request in trace.requests] == [4, 2, 0]
    assert not system.engine.has_unfinished()
    found = {(one.metric, one.statistic): one.value for one in user_readings(trace.requests, trace)}
    assert found["unfinished", "count"] == 2
    assert found["time_to_first_token", "p90"] > 5000, "who got nothing has waited until the end, at least"


def test_arrivals_go_on_until_the_measured_ones_are_done(systems, monkeypatch) -> None:
    ticks = Ticks(systems["punica"], monkeypatch)
    jobs = [Job(PROMPT, 5, 1 + i % 4) for i in range(50)]
    trace = run(systems["punica"], ticks, jobs, [float(i) for i in range(50)], measured=(2.0, 6.0))
    ended = [request.is_done for request in trace.requests if 2 <= request.at < 6]
    assert ended == [True] * 4
    assert 8 < len(trace.requests) < 20, "and no longer"


def trace_of(*requests: Traced, strangers: int = 0) -> Trace:
    return Trace(list(requests), [], 10.0, strangers)


DONE = Traced(0.0, 2, SLOT, 0, step=0, joined=0.0, first=1.0, last=2.0, tokens=2, ended=1)
WAITS = Traced(0.0, 2, SLOT, 0)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (trace_of(DONE, replace(DONE, tokens=1)), "1 ended without all"),
        (trace_of(replace(DONE, ended=2)), "1 were served twice"),
        (trace_of(replace(DONE, tokens=3)), "1 were served twice"),
        (trace_of(DONE, strangers=1), "1 were served twice"),
        (trace_of(WAITS, *[DONE] * 33), "1 got nothing"),
    ],
    ids=["lost", "ended twice", "a token too many", "a token after the end", "starved"],
)
def test_a_trace_in_which_somebody_was_wronged_is_refused(trace, words) -> None:
    with pytest.raises(CheckFailed, match=words):
        check_trace(trace)


def test_waiting_in_a_queue_is_no_wrong() -> None:
    assert check_trace(trace_of(DONE, WAITS, *[DONE] * 32, WAITS)).unfinished == 2
    with pytest.raises(CheckFailed, match="no request arrived"):
        users_of(trace_of(DONE), Span(5.0, 1.0, 0.0))


# the systems, by steps


@pytest.mark.parametrize("name", LOADED)
def test_every_system_gives_the_right_tokens(name, systems, world) -> None:
    check_system(systems[name], paper_stream("Distinct", 6, 48, world.vocab_size), 5, 4)


def test_capacity_in_steps_is_that_of_the_batch(systems, world, monkeypatch) -> None:
    """Steps of a second, requests of five tokens for adapters of their own: a place of the batch serves 1/5 per s."""
    jobs = [Job(PROMPT, 5, 1 + i) for i in range(12)]
    found = {}
    for name in ("punica", "punica_many", "punica_resident_first", *without_lora()):
        with monkeypatch.context() as patch:
            found[name] = capacity_of(systems[name], jobs, 40.0, Ticks(systems[name], patch))
        assert not systems[name].engine.has_unfinished()
    for name in without_lora():
        assert found[name].requests == pytest.approx(1 / 5)
        assert found[name].batch == 1
    for name in ("punica", "punica_many", "punica_resident_first"):
        assert found[name].requests == pytest.approx(4 / 5, rel=0.03)
        assert found[name].tokens == pytest.approx((4 / 5) * (5 + 3), rel=0.03)


def test_capacity_is_that_of_the_middle_of_a_queue(systems, monkeypatch) -> None:
    """Requests longer than what is timed (10 steps beyond the 4 of the warm-up) end in it all the same."""
    jobs = [Job(PROMPT, tokens, 1 + i) for i, tokens in enumerate((17, 43, 23, 37, 29, 19, 41))]
    mean = np.mean([job.new_tokens for job in jobs])
    for name, batch in (("punica", 4), ("punica_many", 4), ("punica_resident_first", 4), ("continuous_batching", 1)):
        with monkeypatch.context() as patch:
            found = capacity_of(systems[name], jobs, 10.0, Ticks(systems[name], patch))
        assert found.requests == pytest.approx(batch / mean, rel=0.1)
        assert found.batch == pytest.approx(batch, rel=0.1)
        assert found.finished <= 4
        assert found.finished > 0 or batch == 1


def test_the_middle_of_a_queue_is_by_the_rule(systems, world) -> None:
    jobs = [Job(PROMPT, tokens, 1 + i) for i, tokens in enumerate((17, 43, 23, 37, 29, 19, 41))]
    members = _members(systems["punica"], cycle(jobs), 3 * 43)
    assert len({done for _, done in members}) == len(members) >= 3, "they did not join together"
    assert all(0 < done < job.new_tokens for job, done in members)
    assert len(_members(systems["continuous_batching"], cycle(jobs), 3 * 43)) == 1
    few = _members(Loaded(world, "punica", slots=2), cycle(jobs), 3 * 43)
    assert 0 < len({job.adapter_id for job, _ in few}) <= 2


def test_static_batches_are_counted_whole(systems, monkeypatch) -> None:
    """Batches of four for ten steps each, in which two end after two: 0.4 requests a second, wherever time ends."""
    jobs = [Job(PROMPT, tokens, 1) for tokens in (2, 10, 2, 10)]
    for seconds in (11.0, 15.0, 24.0):
        with monkeypatch.context() as patch:
            found = capacity_of(systems["static_batching"], jobs, seconds, Ticks(systems["static_batching"], patch))
        assert (found.requests, found.steps % 10) == (pytest.approx(0.4), 0)
        assert found.finished == 0.4 * found.steps


def test_where_the_best_baseline_saturates_punica_waits_a_few_steps(systems, world, monkeypatch) -> None:
    jobs = [Job(PROMPT, 5, 1 + i) for i in range(12)]
    span = Span(20.0, 400.0, 200.0)
    waits = {}
    for name in ("punica", "continuous_batching"):
        with monkeypatch.context() as patch:
            trace = poisson(systems[name], Ticks(systems[name], patch), jobs, 1 / 5, span)
        users = users_of(trace, span)
        assert len(users) > 50
        waits[name] = np.percentile([(user.first or trace.end) - user.at for user in users], 99)
    assert waits["punica"] < 5 + 1, "five decode steps and its own prefill"
    assert waits["continuous_batching"] > 3 * waits["punica"]


def test_the_limit_of_one_prefill_per_step_shapes_the_tail(systems, monkeypatch) -> None:
    waits = {}
    for name in ("punica", "punica_many"):
        with monkeypatch.context() as patch:
            trace = run(systems[name], Ticks(systems[name], patch), [Job(PROMPT, 3, 1)] * 4, [0.0] * 4)
        waits[name] = [request.first for request in trace.requests]
    assert waits == {"punica": [1, 2, 3, 4], "punica_many": [1, 1, 1, 1]}


# where adapters are


def test_loading_from_memory_costs_no_step_and_many_adapters_no_throughput(world, systems, monkeypatch) -> None:
    found = {}
    for adapters in (4, 200):
        drawn = drawn_adapters("Uniform", adapters, 200, seed=1)
        jobs = [Job(PROMPT, 4, 1 + int(index)) for index in drawn]
        with monkeypatch.context() as patch:
            found[adapters] = capacity_of(systems["punica"], jobs, 60.0, Ticks(systems["punica"], patch)).tokens
        with monkeypatch.context() as patch:
            trace = poisson(systems["punica"], Ticks(systems["punica"], patch), jobs, 0.4, Span(10.0, 200.0, 100.0))
    assert found[200] == found[4]
    places = {(one.metric, one.statistic): one.value for one in place_readings(users_of(trace, Span(10.0, 200.0, 0.0)))}
    assert places["slot_hit_rate", "value"] < 0.2
    assert places["memory_hit_rate", "value"] == 1
    assert places["slot_hit_rate_at_join", "value"] < 0.2
    assert places["loading_over_resident", "value"] < 1.3


def test_an_adapter_that_is_evicted_while_its_request_waits_has_to_be_loaded(world, monkeypatch) -> None:
    """Two slots for adapters 1 and 2; 3 takes that of 1, which somebody waits for who came while it was there."""
    system = Loaded(world, "punica", slots=2)
    jobs = [Job(PROMPT, 2, 1), Job(PROMPT, 9, 2), Job(PROMPT, 9, 3), Job(PROMPT, 2, 1), Job(PROMPT, 2, 1)]
    trace = run(system, Ticks(system, monkeypatch), jobs, [0.0, 0.0, 1.5, 1.6, 30.0])
    assert [(one.place, one.at_join) for one in trace.requests] == [
        (MEMORY, MEMORY), (MEMORY, MEMORY), (MEMORY, MEMORY), (SLOT, MEMORY), (SLOT, SLOT),
    ]  # fmt: skip
    found = {one.metric: one.value for one in place_readings(trace.requests) if one.statistic == "value"}
    assert (found["slot_hit_rate"], found["slot_hit_rate_at_join"]) == (0.4, 0.2)


def test_loading_is_told_from_reading() -> None:
    users = [replace(DONE, at_join=place, first=first) for place, first in ((SLOT, 1.0), (MEMORY, 2.0), (DISK, 8.0))]
    found = {one.metric: one.value for one in place_readings(users) if one.statistic in ("median", "value")}
    wanted = {"resident": 1000, "loading": 5000, "from_memory": 2000, "from_disk": 8000}
    assert {name: found[f"time_to_first_token_{name}"] for name in wanted} == wanted
    assert found["loading_over_resident"] == 5
    assert (found["slot_hit_rate"], found["memory_hit_rate_at_join"]) == (1, pytest.approx(2 / 3))


def test_adapters_that_host_memory_has_no_room_for_are_read_again(world, tmp_path: Path, monkeypatch) -> None:
    system = FromFolders(world, "punica", slots=None, in_memory=5, root=tmp_path)
    jobs = [Job(PROMPT, 3, 1 + i) for i in range(9)]
    trace = run(system, Ticks(system, monkeypatch), jobs * 2, [float(i) for i in range(18)])
    places = [request.place for request in trace.requests]
    assert places[:5] == [MEMORY] * 5
    assert set(places[5:]) == {DISK}, "nine in turn through five places: nobody finds theirs"
    assert [request.tokens for request in trace.requests] == [3] * 18
    assert len(system.engine.manager) == 5
    monkeypatch.undo()
    check_system(system, jobs, 8, 4)


@pytest.fixture
def on_a_drive() -> Iterator[Path]:
    """A folder that is not in memory."""
    with TemporaryDirectory(dir=REPOSITORY) as folder:
        yield Path(folder)


def test_files_are_forgotten_by_the_page_cache(on_a_drive: Path) -> None:
    folders = [on_a_drive / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "weights").write_bytes(os.urandom(1 << 20))
    assert page_cache.cached_share(folders) == 1.0
    page_cache.drop(folders[:1])
    assert page_cache.cached_share(folders) == pytest.approx(0.5, abs=0.05)
    assert (folders[0] / "weights").stat().st_size == len((folders[0] / "weights").read_bytes())
    assert page_cache.cached_share(folders) == 1.0


def test_adapters_on_disk_are_read_from_there(world, on_a_drive: Path) -> None:
    system = FromFolders(world, "punica", slots=None, in_memory=4, root=on_a_drive, folders=world.sets)
    assert system.cached == 1.0
    system.hold(range(1, 9))
    assert system.cached < 0.1
    assert len(list(on_a_drive.iterdir())) == world.sets


def test_a_world_draws_as_many_sets_as_it_is_asked_for_and_keeps_a_batch_of_them(world) -> None:
    many = World(world.model, "cpu", Limits(max_batch_size=2, max_len=32), rank=8, sets=5)
    drawn = [many.adapter_tensors(number) for number in range(1, 7)]
    assert len({float(next(iter(one.values())).sum()) for one in drawn[:5]}) == 5
    assert drawn[5] is drawn[0]
    assert many.adapter_tensors(5) is not drawn[4], "not kept on the device"
    name = next(iter(drawn[4]))
    assert torch.equal(many.adapter_tensors(5)[name], drawn[4][name])


def test_copies_share_the_memory_of_the_adapter(systems) -> None:
    system = systems["punica"]
    system.hold(range(1, 10))
    held = system.engine.manager.list_adapters()
    assert len(held) == 9
    name = next(iter(held[1].loras))
    first, copy, other = (held[i].get_lora(name) for i in (1, 5, 2))
    assert first is copy
    assert first is not other


# graphs


def test_all_graphs_are_there_before_the_clock_runs(monkeypatch) -> None:
    """Of one prompt a step, or of all that a step has room for."""
    limits, asked = Limits(max_batch_size=4, max_len=1024), {}
    world = World(TINY, "cpu", limits, rank=8)
    for name in ("punica", "punica_many", "continuous_batching", "static_batching"):
        monkeypatch.setattr(Engine, "capture_graphs", lambda engine, rows, name=name: asked.update({name: rows}))
        Loaded(world, name)
    assert asked == {"punica": 506, "punica_many": 1028, "continuous_batching": 506, "static_batching": 1028}


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


@pytest.mark.gpu
@pytest.mark.parametrize("folders", [False, True], ids=["memory", "folders"])
def test_loads_on_a_gpu(folders, tmp_path: Path) -> None:
    """Steps are graphs, slots are written beside them, images of evicted adapters are staged again."""
    half = TINY.model_copy(update=dict(dtype=DType.float16, hidden_size=256, intermediate_size=512))
    world = World(half, "cuda", Limits(4, 48), 8)
    system = FromFolders(world, "punica", 2, 4, tmp_path) if folders else Loaded(world, "punica_resident_first", 2)
    jobs = [Job(PROMPT, 6, 1 + int(index)) for index in drawn_adapters("Uniform", 12, 64, seed=2)]
    check_system(system, jobs, 5, 4)
    rate, span = capacity_of(system, jobs, 0.5).requests / 2, Span(0.1, 1.0, 20.0)
    users = users_of(trace := load(system, jobs, rate, span, seed=0), span)
    assert check_trace(trace).lost == 0
    assert all(user.is_done for user in users)
    assert {user.place for user in users} <= {SLOT, MEMORY, DISK}
    assert (DISK in {user.place for user in users}) == folders
    check_system(system, jobs, 5, 4)
