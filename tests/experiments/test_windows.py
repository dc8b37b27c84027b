"""Replays of admission rules, and windows of them: drawn to agree with the stream, run as the stream runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_world, values

from experiments.facts.systems import FIG11, FIG12, names_in
from experiments.harness.experiment import CheckFailed
from experiments.systems import hugging_face
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.serving import Step, built
from experiments.systems.stream import Timeline, paper_stream, timeline_of
from experiments.systems.windows import AGREEMENT, AGREEMENT_OF_OTHERS, draw_windows
from experiments.workload import RequestLengths, popularity, released_lengths, stated_lengths
from experiments.workload.popularity import PAPER_WORKLOADS

WINDOWED = sorted({*names_in(FIG11), *names_in(FIG12)})
PROMPTS, OUTPUTS, ADAPTERS = [3, 2, 5, 1], [4, 2, 1, 3], [1, 1, 2, 2]


@pytest.fixture(scope="module")
def world():
    return tiny_world(96)


@pytest.fixture(scope="module")
def bench(world) -> StreamBench:
    return StreamBench(world, StreamConf("released", 60, 96, draws=3, pieces=3, steps=4, slow_steps=3), (3, 4))


def timeline(policy, repeat=1, slots=None):
    lengths = RequestLengths(np.array(PROMPTS * repeat), np.array(OUTPUTS * repeat))
    return Timeline(lengths, ADAPTERS * repeat, policy, 2, slots)


def of_many(workload, policy="fcfs", lengths=released_lengths, count=300):
    return Timeline(lengths(count), popularity(workload).requests(count).tolist(), policy, 32)


@pytest.mark.parametrize(
    ("policy", "slots", "batches"),
    [
        ("fcfs", None, "0 01 01 02 3 3 3"),
        ("fcfs", 1, "0 01 01 0 2 3 3 3"),
        ("single_adapter", None, "0 01 01 0 2 3 3 3"),
        ("static", None, "01 01 01 01 23 23 23"),
        ("static_mixed", None, "01 01 01 01 23 23 23"),
    ],
)
def test_batches_step_by_step(policy, slots, batches):
    line = timeline(policy, slots=slots)
    members = ["".join(str(request) for request, _ in line.at(step).members) for step in range(line.steps)]
    assert " ".join(members) == batches
    for step in (-1, line.steps):
        with pytest.raises(ValueError, match="step must be in"):
            line.at(step)


def test_features_are_tokens_rows_context_adapters_and_what_of_it_prompts_are():
    # steps of fcfs: 0 prefilled; 1 joins; both decode; 2 joins 0; 3 prefilled; 3 decodes twice
    assert timeline("fcfs").features().tolist() == [
        [3 + 1, 1, 3, 1, 3, 1],
        [2 + 2, 2, (3 + 1) + 2, 1, 2, 1],
        [2, 2, (3 + 2) + (2 + 1), 1, 0, 0],
        [5 + 2, 2, (3 + 3) + 5, 2, 5, 1],
        [1 + 1, 1, 1, 1, 1, 1],
        [1, 1, 2, 1, 0, 0],
        [1, 1, 3, 1, 0, 0],
    ]
    # a static batch: request 1 is done after two steps and keeps the two tokens that it attended to last
    static = [[5 + 2, 2, 3 + 2, 1, 5, 1], [2, 2, 4 + 3, 1, 0, 0], [1, 2, 5 + 3, 1, 0, 0], [1, 2, 6 + 3, 1, 0, 0]]
    assert timeline("static_mixed").features()[:4].tolist() == static


def cost(features):
    """A step's time as a CPU has it: weights once, then by rows, context, adapters and tokens of prompts."""
    _, rows, context, adapters, prompts, prefills = features.T
    return 30.0 + 0.4 * rows + 2e-3 * context + 0.2 * adapters + 0.3 * prompts + 8.0 * prefills


@pytest.mark.parametrize(
    ("lengths", "workload", "policy"),
    [
        (released_lengths, "Distinct", "fcfs"), (released_lengths, "Skewed", "single_adapter"),
        (stated_lengths, "Distinct", "static_mixed"), (stated_lengths, "Skewed", "fcfs"),
    ],
)  # fmt: skip
def test_draws_agree_with_the_stream_and_together_predict_its_time_within_3_percent(lengths, workload, policy):
    line = of_many(workload, policy, lengths)
    features, predicted = line.features(), []
    draws = draw_windows(line, 10, 4, 8)
    assert len({draw.starts for draw in draws}) == 10
    for draw in draws:
        steps = np.concatenate([features[start : start + draw.length] for start in draw.starts])
        assert len(steps) == draw.steps == 32
        assert (np.diff(draw.starts) >= draw.length).all()
        assert (draw.tokens, sum(draw.weights)) == (steps[:, 0].sum(), pytest.approx(1))
        assert draw.means["prefills"] == pytest.approx(line.means["prefills"])
        assert draw.means["tokens"] == pytest.approx(draw.mean(steps[:, 0]))
        assert draw.means["tokens"] == pytest.approx(line.means["tokens"], rel=AGREEMENT)
        for other in ("prompts", "context", "adapters"):
            assert draw.means[other] == pytest.approx(line.means[other], rel=AGREEMENT_OF_OTHERS)
        predicted.append(draw.mean(cost(steps)))
    assert predicted == pytest.approx([cost(features).mean()] * 10, rel=0.06)
    assert np.mean(predicted) == pytest.approx(cost(features).mean(), rel=0.03)


def test_a_draw_that_one_stream_refuses_is_drawn_again_for_all():
    lines = {name: of_many(name, count=120) for name in PAPER_WORKLOADS}
    assert len({tuple(draw.starts for draw in draw_windows(line, 12, 2, 40)) for line in lines.values()}) > 1
    compared = [lines["Distinct"].with_adapters(line.adapters) for line in lines.values()]
    assert [other.means for other in compared] == [line.means for line in lines.values()]
    found = {name: draw_windows(line, 12, 2, 40, compared=compared) for name, line in lines.items()}
    assert len({tuple(draw.starts for draw in draws) for draws in found.values()}) == 1


def test_popularities_and_rules_that_form_the_same_batches_have_the_same_draws(bench):
    """Contexts and requests of a repeat are equal, so that ratios compare the same steps."""
    cells = [*(("punica", name) for name in PAPER_WORKLOADS), ("punica_last_admitted", "Skewed"),
             ("continuous_batching", "Identical")]  # fmt: skip
    drawn = [bench.drawn(*cell) for cell in cells]
    for repeat in range(3):
        windows = [one.windows[repeat] for one in drawn]
        assert len({(window.starts, window.means["context"], window.tokens) for window in windows}) == 1
    assert len({one.windows[0].means["adapters"] for one in drawn}) > 1
    assert bench.drawn("continuous_batching", "Distinct").timeline.steps > drawn[0].timeline.steps
    slow = {name: bench.drawn(name, "Distinct").windows[0].steps for name in ("hf_peft_mixed", "punica_static")}
    assert slow == {"hf_peft_mixed": 9, "punica_static": 12}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("workload", ["Skewed", "Identical"])
def test_systems_run_the_steps_of_the_replay_wherever_a_window_begins(name, workload, world):
    system, jobs = built(name, world), paper_stream(workload, 11, 96, 256)
    line = timeline_of(jobs, system.facts.admission, 4)
    features = line.features()
    for start in (0, line.steps // 3, line.steps // 2 + 1, line.steps - 5):
        steps = system.run_steps(jobs, line, start, 5)
        assert [step.tokens for step in steps] == features[start : start + 5, 0].astype(int).tolist()
        assert all(step.seconds > 0 for step in steps)
    if hasattr(system, "engine"):
        assert not system.engine.has_unfinished()
        assert system.engine.blocks.num_free == system.engine.blocks.num_blocks


@pytest.mark.parametrize("name", ["punica", "continuous_batching", "punica_static", "punica_last_admitted"])
def test_an_engine_lays_a_window_out_as_the_stream_does_in_shapes_captured_before(name, world, monkeypatch):
    """Spans, positions, and rows of each adapter; not slots, which depend on all that was served before."""
    system, jobs = built(name, world), paper_stream("Skewed", 9, 96, 256)
    line = timeline_of(jobs, system.facts.admission, 4)
    seen, shapes, captured = [], set(), set()
    launch = system.engine.runner.launch

    def noted(layout, before=None):
        rows = Counter[int]()
        for slot, length in layout.segments:
            rows[slot] += length
        spans = sorted((span.length, span.kv_length) for span in layout.spans)
        seen.append((spans, layout.num_prefill_rows, sorted(rows.values())))
        sampled = zip(layout.sampled_slots, layout.spans, strict=True)
        slots = [slot for slot, span in sampled if span.start >= layout.num_prefill_rows]
        shapes.add((layout.num_prefill_rows, len(slots), len({*slots} - {-1})))
        return launch(layout, before)

    def capture(prompt_rows, decode_rows, adapters, uses_lora):
        captured.add((prompt_rows, decode_rows, adapters if uses_lora else 0))

    monkeypatch.setattr(system.engine.runner, "launch", noted)
    monkeypatch.setattr(system.engine, "capture_step", capture)
    system.serve(jobs)
    whole, seen[:] = list(seen), []
    assert (len(whole), shapes) == (line.steps, captured)
    shapes.clear()
    captured.clear()
    start = line.steps // 2
    system.run_steps(jobs, line, start, 8)
    assert (seen, shapes) == (whole[start - 1 : start + 8], captured)


def test_a_graph_captured_inside_a_window_costs_its_row(world, monkeypatch):
    system, counts = built("punica", world), iter(range(9))
    jobs = paper_stream("Skewed", 9, 96, 256)
    monkeypatch.setattr(system, "_graphs", lambda: next(counts))
    for run in (lambda: system.run_steps(jobs, timeline_of(jobs, "fcfs", 4), 5, 3), lambda: system.serve(jobs)):
        with pytest.raises(CheckFailed, match="punica captured a CUDA graph while it was timed"):
            run()
        assert not system.engine.has_unfinished()


def test_engines_share_cache_and_adapters_and_slots_hold_what_was_used_last(world):
    jobs, systems = paper_stream("Distinct", 9, 96, 256), [built(name, world) for name in ("punica", "punica_static")]
    for system in systems:
        system.serve(jobs)
    first, second = (system.engine.manager.list_adapters() for system in systems)
    assert sorted(first) == sorted(second) == list(range(1, 10))
    assert all(first[i].loras is second[i].loras is world.registered[False, (i - 1) % 4].loras for i in first)
    assert {system.engine.runner.attention.cache for system in systems} == {world.kv_cache}
    used = [replace(job, adapter_id=i) for job, i in zip(jobs, [1, 2, 3, 2, 4, 5, 6], strict=False)]
    assert systems[0]._in_slots([4, 2], used[:5]) == [4, 2, 3, 1]
    assert systems[0]._in_slots([4, 2], used) == [4, 2, 6, 5, 3]  # a batch of four, and one slot more


@pytest.mark.parametrize("name", ["hf_peft", "hf_peft_mixed"])
def test_hugging_face_attends_to_as_many_tokens_as_in_the_whole_batch(name, world, monkeypatch):
    jobs, system, seen = paper_stream("Identical", 4, 96, 256), built(name, world), []
    line, logits = timeline_of(jobs, system.facts.admission, 4), hugging_face.Decoding.logits

    def noted(self):
        found = logits(self)
        seen.append(self._cache.get_seq_length())
        return found

    monkeypatch.setattr(hugging_face.Decoding, "logits", noted)
    system.serve(jobs)
    whole, seen[:] = list(seen), []
    start = line.steps // 2
    system.run_steps(jobs, line, start, 3)
    assert seen == whole[start - 1 : start + 3]


def test_a_system_that_leaves_its_replay_gets_no_row(bench, monkeypatch):
    monkeypatch.setattr(bench.system("punica"), "run_steps", lambda *_: [Step(0.0, 1.0, 1, 0)] * 4)
    with pytest.raises(CheckFailed, match="12 steps with 12 tokens ran where the replay has 12 steps with"):
        bench.measure("punica", "Distinct", 0)


def test_readings_of_a_window_are_the_streams_at_its_speed(bench):
    readings = bench.measure("punica", "Skewed", 1)
    mean, *_, count = (one.value for one in readings if one.metric == "step_latency")
    found = values(readings)
    stream = found["total_tokens"] / found["steps"]
    assert found["stream_tokens_per_step"] == pytest.approx(stream)
    assert found["throughput"] == pytest.approx(1e3 * stream / mean)
    assert (found["window_steps"], count, found["token_agreement"]) == (12, 12, 1)
    assert 0 < found["mean_batch_size"] <= 4
