"""Decode steps of Hugging Face: which ways there are, that each is right, and that launches are counted."""

import pytest
from fakes import composed
from tiny import TINY, tiny_world

from experiments.benches.step_parts import Kernel, Launches, counted
from experiments.ext_hf_baselines import EXPERIMENT
from experiments.harness import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows
from experiments.measure.timing import Protocol
from experiments.systems.hf_systems import WAYS, HfBench
from experiments.systems.hugging_face import Decoding
from experiments.systems.weights import Limits
from experiments.systems.world import World

NAME = EXPERIMENT.name
PROTOCOL = Protocol("host_clock", "cpu", warmup=1, repeats=3, min_repeats=2, seconds=0.0, flush_mib=0)


@pytest.fixture(scope="module")
def bench() -> HfBench:
    return HfBench(tiny_world())


def points(tmp_path, *overrides):
    return EXPERIMENT.points(settle(composed(tmp_path, *overrides, name=NAME), EXPERIMENT))


def test_steps_are_rows_and_a_cpu_counts_no_launches(tmp_path):
    outcome = run(composed(tmp_path, "system=merged", "engine.max_batch_size=3", name=NAME), EXPERIMENT)
    assert (outcome.measured, outcome.failed) == (2, [])
    assert {(row.metric, row.batch_size) for row in read_rows(outcome.rows_file)} == {
        ("step_latency", 1),
        ("step_latency", 3),
    }


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_timed_behind_its_context(way, bench, monkeypatch):
    seen, step = [], Decoding.step
    monkeypatch.setattr(Decoding, "step", lambda self: seen.append(self._width + self._done) or step(self))
    timed = bench.measure(way, 3, 20, PROTOCOL)
    assert seen == [21, 22, 23]  # a step to warm up, and as many as the protocol asks for at least
    assert (len(timed.steps), timed.launches) == (2, None)


def test_a_way_with_other_logits_is_not_timed(bench, monkeypatch):
    forced = Decoding.forced
    monkeypatch.setattr(Decoding, "forced", lambda self, tokens: 1.1 * forced(self, tokens))
    monkeypatch.setattr(bench, "_checked", set())
    with pytest.raises(CheckFailed, match=r"merged gives logits that differ from the reference by 1\.00e-01"):
        bench.measure("merged", 1, 20, PROTOCOL)
    without = HfBench(World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8, alpha=1e-9))
    monkeypatch.undo()
    with pytest.raises(CheckFailed, match=r"left out differs by \d.*e-"):
        without.measure("mixed", 2, 20, PROTOCOL)


EVENTS = [
    (Kernel("gemm", 1.0, 3.0), True), (Kernel("Memcpy DtoH", 2.0, 4.0), True), (Kernel("gemm", 6.0, 7.0), True),
    (Kernel("cudaLaunchKernel", 0.0, 0.1), False), (Kernel("cuLaunchKernelEx", 0.1, 0.2), False),
    (Kernel("cudaMemcpyAsync", 0.2, 0.3), False), (Kernel("cudaGraphLaunch", 0.2, 0.3), False),
    (Kernel("cudaStreamSynchronize", 0.3, 7.0), False), (Kernel("cudaEventRecord", 0.3, 0.4), False),
]  # fmt: skip


def test_launches_are_counted_and_the_device_is_busy_once():
    assert counted(EVENTS) == Launches(launches=4, kernels=3, busy=4.0)
    for kept in (EVENTS[:3], EVENTS[3:]):
        with pytest.raises(CheckFailed, match="the profiler saw"):
            counted(kept)
