"""Windows: drawn to agree with the stream, run as the stream runs, and good for predicting it."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.fig11_textgen import whole_stream
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import DType, ModelConf
from experiments.systems import SYSTEMS, Limits, StreamBench, StreamConf, World
from experiments.systems.bench import check_steps
from experiments.systems.serving import Step
from experiments.systems.stream import paper_stream, timeline_of
from experiments.systems.windows import AGREEMENT, AGREEMENT_OF_OTHERS, Window, draw_windows
from punica.workload import POLICIES, Timeline, popularity, released_lengths, stated_lengths

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    return World(TINY, "cpu", Limits(max_batch_size=4, max_len=96), rank=8)


@pytest.fixture(scope="module")
def bench(world) -> StreamBench:
    return StreamBench(world, StreamConf("released", 16, 96, draws=2, pieces=3, steps=4), 3, 4)


def cost(features):
    """A step's time as a CPU has it: weights once, then by rows, context, adapters and tokens of prompts."""
    tokens, rows, context, adapters = features.T
    return 30.0 + 0.4 * rows + 2e-3 * context + 0.2 * adapters + 0.3 * (tokens - rows).clip(0)


@pytest.mark.parametrize("policy", POLICIES)
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
        assert draw.means["tokens"] == pytest.approx(steps[:, 0].mean())
        assert draw.means["tokens"] == pytest.approx(line.means["tokens"], rel=AGREEMENT)
        assert draw.means["context"] == pytest.approx(line.means["context"], rel=AGREEMENT_OF_OTHERS)
        predicted.append(cost(steps).mean())
    assert predicted == pytest.approx([whole] * 10, rel=0.06)
    assert np.mean(predicted) == pytest.approx(whole, rel=0.03)


def test_draws_are_not_picked_for_their_agreement():
    """They lie in their limits as chance has it: about half of them in the outer half, which the best would avoid."""
    line = Timeline(released_lengths(1000), popularity("Distinct").requests(1000).tolist(), "fcfs", 32)
    draws = draw_windows(line, 200, 4, 8)
    off = [abs(draw.means["tokens"] / line.means["tokens"] - 1) for draw in draws]
    assert 0.3 < np.mean([one > AGREEMENT / 2 for one in off]) < 0.7
    assert draws == draw_windows(line, 200, 4, 8)
    assert draws[:50] != draw_windows(line, 50, 4, 8, seed=1)


def test_no_draw_is_better_than_one_that_does_not_agree():
    """One step of a stream of prompts and single tokens holds either; the stream's mean lies between."""
    line = timeline_of(paper_stream("Distinct", 12, 32, 256), "single_adapter", 4)
    with pytest.raises(CheckFailed, match=r"0 of 100000 draws of 2 times 3 steps .* 1 are needed.*window_steps"):
        draw_windows(line, 1, 2, 3)


def test_a_short_stream_is_its_own_window():
    line = timeline_of(paper_stream("Distinct", 3, 16, 256), "fcfs", 4)
    assert draw_windows(line, 2, 4, 64) == [Window((0,), line.steps, line.means)] * 2


@pytest.mark.parametrize("name", SYSTEMS.names())
@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
def test_systems_run_the_steps_of_the_replay_wherever_a_window_begins(name, workload, world):
    system = SYSTEMS.get(name)(world)
    jobs = paper_stream(workload, 11, 96, 256)
    line = timeline_of(jobs, system.admission, 4)
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
    """The same spans, positions and segments as when the stream is served from its start."""
    system = SYSTEMS.get(name)(world)
    jobs = paper_stream("Skewed", 9, 96, 256)
    line = timeline_of(jobs, system.admission, 4)
    seen = []
    run = system.engine.runner.run

    def noted(layout, meanwhile):
        spans = sorted((span.length, span.kv_length) for span in layout.spans)
        seen.append((spans, layout.num_prefill_rows, sorted(length for _, length in layout.segments)))
        return run(layout, meanwhile)

    monkeypatch.setattr(system.engine.runner, "run", noted)
    system.serve(jobs)
    whole, seen[:] = list(seen), []
    assert len(whole) == line.steps
    start = line.steps // 2
    system.run_steps(jobs, line, start, 8)
    assert seen == whole[start - 1 : start + 8]


def test_slots_hold_what_running_requests_use_then_what_was_used_last(world):
    system = SYSTEMS.get("punica")(world)
    drawn, adapters = paper_stream("Distinct", 7, 96, 256), [1, 2, 3, 2, 4, 5, 6]
    jobs = [replace(job, adapter_id=number) for job, number in zip(drawn, adapters, strict=True)]
    assert system._in_slots([4, 2], jobs[:5]) == [4, 2, 3, 1]
    assert system._in_slots([], jobs[:0]) == []


@pytest.mark.parametrize("name", ["hf_peft", "hf_peft_mixed"])
def test_hugging_face_attends_to_as_many_tokens_as_in_the_whole_batch(name, world, monkeypatch):
    from experiments.systems import hf_decoding

    jobs = paper_stream("Identical", 4, 96, 256)
    system = SYSTEMS.get(name)(world)
    line = timeline_of(jobs, system.admission, 4)
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
        check_steps([Step(1.0, 4, 4)], Window((0,), 2, {"tokens": 2.0}))


def test_readings_of_a_window_are_the_streams_at_its_speed(bench):
    found = {(reading.metric, reading.statistic): reading.value for reading in bench.measure("punica", "Skewed", 1)}
    seconds = found["wall_time", "value"] / found["window_steps", "count"]
    assert found["window_steps", "count"] == 12
    stream = found["total_tokens", "count"] / found["steps", "count"]
    assert found["stream_tokens_per_step", "value"] == pytest.approx(stream)
    assert found["throughput", "value"] == pytest.approx(stream / seconds)
    assert found["new_token_throughput", "value"] < found["throughput", "value"]
    assert found["step_latency", "value"] == pytest.approx(1e3 * seconds)
    assert found["step_latency", "p10"] <= found["median_step_latency", "value"] <= found["step_latency", "p90"]
    assert found["step_latency", "count"] == 12
    assert 0 < found["model_step_latency", "value"] < found["step_latency", "value"]
    assert found["tokens_per_step", "value"] == pytest.approx(stream, rel=0.2)
    assert 0 < found["mean_batch_size", "value"] <= 4
    assert found["token_agreement", "value"] == 1.0


def test_noise_fills_the_caches_of_engines_and_of_hugging_face(world):
    for cached in (world.kv_cache.keys[0], world.peft._room(0, 2, 96)[0]):
        assert torch.isfinite(cached).all()
    assert world.kv_cache.keys[1].shape == ((4 * (96 // 16 + 1) + 1) * 16, 2, 16)


def test_a_whole_stream_stands_beside_what_its_windows_predict(bench, monkeypatch):
    """On a clock that a step moves by what it costs, windows predict the stream; here within what tiny draws can."""
    found = {reading.metric: reading.value for reading in whole_stream(many_draws(bench), "punica", "Distinct")}
    assert found["prediction_over_stream"] == pytest.approx(found["predicted_throughput"] / found["stream_throughput"])
    assert found["stream_throughput"] > 0


def many_draws(bench):
    return StreamBench(bench.world, replace(bench.stream, draws=6), 3, 4)


@pytest.fixture
def processor_time(monkeypatch):
    """The clock counts what one thread of this process computes, whatever else runs beside the tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("processor_time")
@pytest.mark.parametrize("name", ["punica", "continuous_batching", "hf_peft_mixed"])
def test_windows_predict_a_whole_stream_on_a_clock(name):
    """Of a model large enough that its times follow its steps; the best of three, since caches are shared."""
    model = replace(TINY, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=8)
    world = World(model, "cpu", Limits(max_batch_size=8, max_len=256), rank=16)
    stream = StreamConf("released", 24, 256, draws=6, pieces=6, steps=8)
    off = []
    while len(off) < 3 and min(off, default=1) > 0.03:
        found = whole_stream(StreamBench(world, stream, 2, 3), name, "Distinct")
        ratio = next(reading.value for reading in found if reading.metric == "prediction_over_stream")
        off.append(abs(ratio - 1))
    assert min(off) <= 0.03, off
