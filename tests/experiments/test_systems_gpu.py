"""The serving systems of Figure 11 on a GPU: CUDA graphs, one pool of keys and values, the steps of the replay."""

import pytest
from tiny import TINY, values

from experiments.facts.systems import FIG11, names_in
from experiments.harness.schema import DType
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.serving import World, built
from experiments.systems.stream import shortened
from experiments.systems.weights import Limits

pytestmark = pytest.mark.gpu
HALF = TINY.model_copy(update={"hidden_size": 256, "intermediate_size": 688, "vocab_size": 512, "dtype": DType.float16})
STREAM = StreamConf("released", 16, 96, draws=2, pieces=2, steps=16, slow_steps=8)


@pytest.fixture(scope="module")
def bench() -> StreamBench:
    return StreamBench(World(HALF, "cuda", Limits(4, 96), rank=8), STREAM, (3, 6))


@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
@pytest.mark.parametrize("name", names_in(FIG11))
def test_every_system_is_checked_and_timed_with_its_graphs_captured_before(bench, name, workload):
    for draw in range(2):
        found = values(bench.measure(name, workload, draw))
        assert found["tokens_per_step"] == pytest.approx(found["stream_tokens_per_step"], rel=0.03)
        assert found["throughput"] > 0
        assert found["token_agreement"] >= 0.9
        assert found["logit_error"] < 0.02
    system = bench.system(name)
    if hasattr(system, "engine"):
        assert system._graphs() > 0
        assert system.engine.runner.attention.cache is bench.world.kv_cache


def test_a_whole_stream_is_served_without_capturing_in_between(bench, monkeypatch):
    monkeypatch.setattr("experiments.systems.bench.WHOLE_DRAWS", STREAM.draws)
    found = values(bench.whole("punica", "Distinct"))
    assert found["stream_throughput"] > 0


def test_adapters_are_registered_once_in_page_locked_memory(bench):
    jobs = shortened(bench.jobs("Distinct"), 5, 2)
    built("punica", bench.world).serve(jobs)
    assert len(bench.world.registered) <= 4
    assert bench.world.registered.keys() >= {(False, bench.world.adapter_set(job.adapter_id)) for job in jobs}
    assert all(adapter.image.is_pinned() for adapter in bench.world.registered.values())
