"""Windows: drawn to agree with the stream, run as the stream runs, and good for predicting it."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.facts.systems import FIG11, FIG12, SYSTEMS, names_in
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import DType, ModelConf
from experiments.systems import hf_decoding
from experiments.systems.bench import StreamBench, StreamConf, check_steps
from experiments.systems.serving import Step, built
from experiments.systems.stream import paper_stream, timeline_of
from experiments.systems.timeline import Timeline
from experiments.systems.weights import Limits
from experiments.systems.whole_stream import DRAWS, compare
from experiments.systems.windows import AGREEMENT, AGREEMENT_OF_OTHERS, Window, draw_windows
from experiments.systems.world import World
from experiments.workload import popularity, released_lengths, stated_lengths
from experiments.workload.popularity import PAPER_WORKLOADS
from punica.engine.residency import AdapterResidency
from punica.engine.runner import ModelRunner

WINDOWED = sorted({*names_in(FIG11), *names_in(FIG12)})
TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    return World(TINY, "cpu", Limits(max_batch_size=4, max_len=96), rank=8)


@pytest.fixture(scope="module")
def bench(world) -> StreamBench:
    return StreamBench(world, StreamConf("released", 16, 96, draws=2, pieces=3, steps=4, slow_steps=3), 3, 4)


def cost(features):
    """A step's time as a CPU has it: weights once, then by rows, context, adapters and tokens of prompts."""
    _, rows, context, adapters, prompts, prefills = features.T
    return 30.0 + 0.4 * rows + 2e-3 * context + 0.2 * adapters + 0.3 * prompts + 8.0 * prefills


@pytest.mark.parametrize("policy", sorted({SYSTEMS.get(name).admission for name in WINDOWED}))
@pytest.mark.parametrize("workload", ["Distinct", "Uniform", "Skewed", "Identical"])
@pytest.mark.parametrize("lengths", [released_lengths, stated_lengths], ids=["released", "stated"])
def test_draws_agree_with_the_stream_and_together_predict_its_time_within_3_percent(lengths, workload, policy):
    line = Timeline(lengths(1000), popularity(workload).requests(1000).tolist(), policy, 32)
    features = line.features()
    whole = cost(features).mean()
    draws, predicted = draw_windows(line, 10, 4, 8), []
    assert len({draw.starts for draw in draws}) == 10
    for draw in draws:
        steps = np.concatenate([features[start : start + draw.length] for start in draw.starts])
        assert len(steps) == draw.steps == 32
        assert (np.diff(draw.starts) >= draw.length).all()
        assert draw.tokens == steps[:, 0].sum()
        assert sum(draw.weights) == pytest.approx(1)
        assert draw.means["tokens"] == pytest.approx(draw.mean(steps[:, 0]))
        assert steps[:, 5].any()
        assert draw.means["prefills"] == pytest.approx(line.means["prefills"])
        assert draw.means["prompts"] == pytest.approx(line.means["prompts"], rel=AGREEMENT_OF_OTHERS)
        assert draw.means["tokens"] == pytest.approx(line.means["tokens"], rel=AGREEMENT)
        assert draw.means["context"] == pytest.approx(line.means["context"], rel=AGREEMENT_OF_OTHERS)
        predicted.append(draw.mean(cost(steps)))
    assert predicted == pytest.approx([whole] * 10, rel=0.06)
    assert np.mean(predicted) == pytest.approx(whole, rel=0.03)


def test_draws_are_not_picked_for_their_agreement():
    """They lie in their limits as chance has it: about half of them in the outer half, which the best would avoid."""
    line = Timeline(released_lengths(1000), popularity("Distinct").requests(1000).tolist(), "fcfs", 32)
    draws = draw_windows(line, 200, 4, 8)
    off = [abs(draw.means["context"] / line.means["context"] - 1) for draw in draws]
    assert 0.3 < np.mean([one > AGREEMENT_OF_OTHERS / 2 for one in off]) < 0.7
    assert draws == draw_windows(line, 200, 4, 8)
    assert draws[:50] != draw_windows(line, 50, 4, 8, seed=1)


def test_no_draw_is_better_than_one_that_does_not_agree():
    """A single step has a prefill or none; the stream has both."""
    line = timeline_of(paper_stream("Distinct", 12, 32, 256), "single_adapter", 4)
    with pytest.raises(CheckFailed, match=r"0 of 2000000 draws of 1 times 1 steps .* 1 are needed.*window_steps"):
        draw_windows(line, 1, 1, 1)


def test_a_draw_that_one_stream_refuses_is_drawn_again_for_all():
    lengths = released_lengths(1000)
    asked = {name: popularity(name).requests(1000).tolist() for name in PAPER_WORKLOADS}
    lines = {name: Timeline(lengths, adapters, "fcfs", 32) for name, adapters in asked.items()}
    alone = {name: draw_windows(line, 12, 2, 100) for name, line in lines.items()}
    assert len({tuple(draw.starts for draw in draws) for draws in alone.values()}) > 1, "they would differ"
    first = lines["Distinct"]
    compared = [first.with_adapters(adapters) for adapters in asked.values()]
    assert [other.means for other in compared] == [line.means for line in lines.values()]
    found = {name: draw_windows(line, 12, 2, 100, compared=compared) for name, line in lines.items()}
    assert len({tuple(draw.starts for draw in draws) for draws in found.values()}) == 1
    for name, draws in found.items():
        limit = AGREEMENT_OF_OTHERS * lines[name].means["adapters"]
        assert all(abs(draw.means["adapters"] - lines[name].means["adapters"]) <= limit for draw in draws)
        assert {draw.means["context"] for draw in draws} == {draw.means["context"] for draw in found["Distinct"]}


def test_popularities_and_rules_that_form_the_same_batches_have_the_same_draws(world):
    """Contexts and requests of a repeat are equal, so that ratios compare the same steps."""
    bench = StreamBench(world, StreamConf("released", 60, 96, draws=3, pieces=3, steps=5, slow_steps=3), 3, 4)
    cells = [*((system, name) for system in ("punica", "punica_last_admitted") for name in PAPER_WORKLOADS),
             ("continuous_batching", "Identical")]  # fmt: skip
    drawn = [bench.drawn(*cell) for cell in cells]
    for repeat in range(3):
        windows = [one.windows[repeat] for one in drawn]
        assert len({window.starts for window in windows}) == 1
        assert len({(window.means["context"], window.means["rows"], window.tokens) for window in windows}) == 1
    ahead = [one.timeline.at(one.windows[0].starts[0]) for one in drawn]
    assert all(stretch == ahead[0] for stretch in ahead), "the same requests, each as far"
    assert len({one.windows[0].means["adapters"] for one in drawn}) > 1
    for repeat in range(2):
        timed = [{one.metric: one.value for one in bench.measure("punica", name, repeat)} for name in PAPER_WORKLOADS]
        served = {tuple(one[name] for name in ("mean_context", "mean_batch_size", "requests")) for one in timed}
        assert len(served) == 1
    parted = bench.drawn("continuous_batching", "Distinct")
    assert parted.timeline.steps > drawn[0].timeline.steps
    static = [bench.drawn("punica_static", name).windows for name in PAPER_WORKLOADS]
    assert len({windows[0].starts for windows in static}) == 1


def test_a_short_stream_is_its_own_window():
    line = timeline_of(paper_stream("Distinct", 3, 16, 256), "fcfs", 4)
    (one, other) = draw_windows(line, 2, 4, 64)
    assert one == other
    assert (one.starts, one.length, one.tokens) == ((0,), line.steps, line.features()[:, 0].sum())
    assert one.weights == pytest.approx([1 / line.steps] * line.steps)
    assert one.means == pytest.approx(line.means)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
def test_systems_run_the_steps_of_the_replay_wherever_a_window_begins(name, workload, world):
    system = built(name, world)
    jobs = paper_stream(workload, 11, 96, 256)
    line = timeline_of(jobs, system.facts.admission, 4)
    features = line.features()
    live = 0
    for start in (0, 1, line.steps // 3, line.steps // 2 + 1, line.steps - 5):
        steps = system.run_steps(jobs, line, start, 5)
        assert [step.tokens for step in steps] == features[start : start + 5, 0].astype(int).tolist()
        assert all(step.seconds > 0 for step in steps)
        live += sum(step.live for step in steps)
    assert live > 0
    if hasattr(system, "engine"):
        assert not system.engine.has_unfinished()
        assert system.engine.blocks.num_free == system.engine.blocks.num_blocks


@pytest.mark.parametrize("name", ["punica", "continuous_batching", "punica_static"])
def test_an_engine_lays_a_window_out_as_the_stream_does(name, world, monkeypatch):
    """The same spans, positions and rows of each adapter as when the stream is served from its start. Which slots they
    have, and so which of them are neighbours, depends on all that was served before.
    """
    system = built(name, world)
    jobs = paper_stream("Skewed", 9, 96, 256)
    line = timeline_of(jobs, system.facts.admission, 4)
    seen = []
    launch = system.engine.runner.launch

    def noted(staged):
        layout = staged.layout
        spans = sorted((span.length, span.kv_length) for span in layout.spans)
        rows = Counter[int]()
        for slot, length in layout.segments:
            rows[slot] += length
        seen.append((spans, layout.num_prefill_rows, sorted(rows.values())))
        return launch(staged)

    monkeypatch.setattr(system.engine.runner, "launch", noted)
    system.serve(jobs)
    whole, seen[:] = list(seen), []
    assert len(whole) == line.steps
    start = line.steps // 2
    system.run_steps(jobs, line, start, 8)
    assert seen == whole[start - 1 : start + 8]


def test_shapes_of_steps_are_those_that_the_engine_lays_out(world, monkeypatch):
    """So that their graphs can be captured before: prompt rows, decode rows, adapters among these."""
    for name in ("punica", "punica_static", "continuous_batching", "punica_last_admitted"):
        system = built(name, world)
        jobs = paper_stream("Skewed", 9, 96, 256)
        line, seen, captured = timeline_of(jobs, system.facts.admission, 4), set(), set()
        launch = system.engine.runner.launch

        def noted(staged, launch=launch, seen=seen):
            layout = staged.layout
            prompts = layout.num_prefill_rows
            decoding = zip(layout.sampled_slots, layout.spans, strict=True)
            slots = [slot for slot, span in decoding if span.start >= prompts]
            seen.add((prompts, len(slots), len({*slots} - {-1})))
            return launch(staged)

        def capture(*shape, uses_lora, captured=captured, system=system):
            assert uses_lora == system.facts.lora
            captured.add(shape if uses_lora else (*shape[:2], 0))

        monkeypatch.setattr(system.engine.runner, "launch", noted)
        monkeypatch.setattr(system.engine, "capture_step", capture)
        system.serve(jobs)
        assert seen == captured
        seen.clear()
        captured.clear()
        system.run_steps(jobs, line, line.steps // 2, 8)
        assert seen == captured


def test_a_graph_captured_inside_a_window_costs_its_row(world, monkeypatch):
    system, counts = built("punica", world), iter(range(9))
    jobs = paper_stream("Skewed", 9, 96, 256)
    monkeypatch.setattr(system, "_graphs", lambda: next(counts))
    with pytest.raises(CheckFailed, match="punica captured a CUDA graph while it was timed"):
        system.run_steps(jobs, timeline_of(jobs, system.facts.admission, 4), 5, 3)
    assert not system.engine.has_unfinished()
    with pytest.raises(CheckFailed, match="punica captured a CUDA graph while it was timed"):
        system.serve(jobs)


def test_engines_share_cache_and_registered_adapters(world):
    jobs = paper_stream("Distinct", 9, 96, 256)
    engines = []
    for name in ("punica", "punica_static"):
        system = built(name, world)
        system.serve(jobs)
        engines.append(system.engine)
    first, second = (engine.manager.list_adapters() for engine in engines)
    assert sorted(first) == sorted(second) == list(range(1, 10))
    assert all(first[number].loras is world.registered[False, (number - 1) % 4].loras for number in first)
    assert all(first[number].loras is second[number].loras for number in first)
    assert {engine.runner.attention.cache for engine in engines} == {world.kv_cache}


def test_slots_hold_what_running_requests_use_then_what_was_used_last(world):
    system = built("punica", world)
    drawn, adapters = paper_stream("Distinct", 7, 96, 256), [1, 2, 3, 2, 4, 5, 6]
    jobs = [replace(job, adapter_id=number) for job, number in zip(drawn, adapters, strict=True)]
    assert system._in_slots([4, 2], jobs[:5]) == [4, 2, 3, 1]
    assert system._in_slots([4, 2], jobs) == [4, 2, 6, 5, 3]  # a batch of four, and one slot more
    assert system._in_slots([], jobs[:0]) == []


@pytest.mark.parametrize("name", ["hf_peft", "hf_peft_mixed"])
def test_hugging_face_attends_to_as_many_tokens_as_in_the_whole_batch(name, world, monkeypatch):
    jobs = paper_stream("Identical", 4, 96, 256)
    system = built(name, world)
    line = timeline_of(jobs, system.facts.admission, 4)
    seen = []
    logits = hf_decoding.Decoding.logits

    def noted(self):
        found = logits(self)
        seen.append(self._cache.get_seq_length())
        return found

    monkeypatch.setattr(hf_decoding.Decoding, "logits", noted)
    system.serve(jobs)
    whole, seen[:] = list(seen), []
    start = line.steps // 2
    system.run_steps(jobs, line, start, 3)
    assert seen == whole[start - 1 : start + 3]


def test_a_system_that_leaves_its_replay_gets_no_row(bench, monkeypatch):
    monkeypatch.setattr(bench._system("punica"), "run_steps", lambda *_: [Step(1.0, 1, 1)] * 4)
    with pytest.raises(CheckFailed, match="12 steps with 12 tokens ran where the replay has 12 steps with"):
        bench.measure("punica", "Distinct", 0)
    with pytest.raises(CheckFailed, match="1 steps"):
        check_steps([Step(1.0, 4, 4)], Window((0,), 2, (0.5, 0.5), 4, {"tokens": 2.0}))


@pytest.mark.parametrize("workload", ["Distinct", "Skewed"])
def test_steps_are_those_of_the_replay_where_adapters_are_read_beside_them(world, monkeypatch, workload):
    """As on a GPU."""
    beside = lambda manager, reads_beside: AdapterResidency(manager, reads_beside=True)  # noqa: E731
    monkeypatch.setattr("punica.engine.engine.AdapterResidency", beside)
    bench = StreamBench(world, StreamConf("released", 24, 96, draws=2, pieces=2, steps=16, slow_steps=8), 2, 2)
    for draw in range(2):
        found = {reading.metric: reading.value for reading in bench.measure("punica", workload, draw)}
        assert found["throughput"] > 0


def test_windows_of_a_slow_system_are_shorter(bench):
    found = {name: bench.drawn(name, "Distinct").windows for name in ("hf_peft_mixed", "punica_static")}
    assert {name: {window.steps for window in windows} for name, windows in found.items()} == {
        "hf_peft_mixed": {9},
        "punica_static": {12},
    }


def test_readings_of_a_window_are_the_streams_at_its_speed(bench):
    found = {(reading.metric, reading.statistic): reading.value for reading in bench.measure("punica", "Skewed", 1)}
    seconds = found["step_latency", "value"] / 1e3
    assert found["window_steps", "count"] == 12
    assert 1 <= found["window_prefill_steps", "count"] <= 11
    assert 0.3 < seconds / (found["wall_time", "value"] / 12) < 3
    stream = found["total_tokens", "count"] / found["steps", "count"]
    assert found["stream_tokens_per_step", "value"] == pytest.approx(stream)
    assert found["throughput", "value"] == pytest.approx(stream / seconds)
    assert found["new_token_throughput", "value"] < found["throughput", "value"]
    assert found["step_latency", "p10"] <= found["median_step_latency", "value"] <= found["step_latency", "p90"]
    assert found["step_latency", "count"] == 12
    assert 0 < found["model_step_latency", "value"] < found["step_latency", "value"]
    assert found["tokens_per_step", "value"] == pytest.approx(stream, rel=0.2)
    assert 0 < found["mean_batch_size", "value"] <= 4
    assert found["token_agreement", "value"] == 1.0


def test_noise_fills_the_caches_of_engines_and_of_hugging_face(world):
    for cached in (world.kv_cache.keys[0], world.peft._room(0, 2, 96)[0]):
        assert torch.isfinite(cached).all()
    blocks = 4 * (96 // 16 + 1) + 1
    assert world.kv_cache.keys[1].shape == (blocks * 5 // 4 * 16, 2, 16)
    assert world.peft._room(1, 2, 96)[1].data_ptr() == world.kv_cache.values[1].data_ptr()
    larger = world.peft._room(1, 4, 300)[0]
    assert larger.shape == (4, 2, 300, 16)
    assert torch.isfinite(larger).all()


@pytest.mark.slow
def test_a_whole_stream_stands_beside_what_its_windows_predict(bench, monkeypatch):
    """On a clock that a step moves by what it costs, windows predict the stream; here within what tiny draws can."""
    readings = compare(many_draws(bench), "punica", "Distinct").readings()
    found = {reading.metric: reading.value for reading in readings}
    assert found["predictions"] == DRAWS
    assert found["prediction_over_stream"] == pytest.approx(found["predicted_throughput"] / found["stream_throughput"])
    assert found["stream_throughput"] > 0


def many_draws(bench):
    return StreamBench(bench.world, replace(bench.stream, draws=DRAWS), 3, 4)


@pytest.fixture
def work_clock(monkeypatch):
    """The clock goes on with the work of every invocation of a model, and with nothing else."""
    now, launch, logits = [0.0], ModelRunner.launch, hf_decoding.Decoding.logits

    def add(tokens, rows, context, adapters, prompts):
        now[0] += 1e-3 * float(cost(np.array([[tokens, rows, context, adapters, prompts, prompts > 0]])).item())

    def counted_launch(runner, staged):
        layout = staged.layout
        context = sum(span.kv_length for span in layout.spans)
        tokens, prompts = sum(span.length for span in layout.spans), layout.num_prefill_rows
        add(tokens, len(layout.spans), context, layout.num_segments, prompts)
        return launch(runner, staged)

    def counted_logits(decoding):
        rows, tokens = decoding._ids.shape
        prompts = 0 if decoding._done else rows * tokens
        add(rows * tokens, rows, rows * (decoding._width + decoding._done), rows, prompts)
        return logits(decoding)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ModelRunner, "launch", counted_launch)
    monkeypatch.setattr(hf_decoding.Decoding, "logits", counted_logits)


@pytest.mark.slow
@pytest.mark.usefixtures("work_clock")
@pytest.mark.parametrize("name", ["punica", "continuous_batching", "hf_peft_mixed"])
def test_windows_predict_a_whole_stream_on_a_clock(name, world):
    stream = StreamConf("released", 24, 96, draws=DRAWS, pieces=4, steps=6, slow_steps=6)
    found = compare(StreamBench(world, stream, 2, 3), name, "Distinct")
    assert found.served.seconds > 0
    assert found.mean == pytest.approx(found.served.throughput, rel=0.03)
    assert found.standard_error > 0  # windows, not the stream itself
