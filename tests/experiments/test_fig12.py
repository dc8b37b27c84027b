"""Figure 12: what bytes allow, the model that fits, the ranks that stay, and one cell on two of them."""

import psutil
import pytest
import torch
from fakes import composed, points_of
from tiny import TINY, values

from experiments.fig12_textgen_70b import EXPERIMENT, Fig12, adapter_share, bytes_ratio
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError, model_conf
from experiments.harness.settings import fitting_model, ranks_here
from experiments.measure import environment
from experiments.measure.records import read_rows
from experiments.systems.bench import StreamConf
from experiments.systems.ranks import BenchOnRanks, RankBench, Ranks
from experiments.systems.weights import Limits
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from punica.parallel import get_tensor_model_parallel_rank, init_tensor_parallel
from tests.parallel.thread_ranks import on_threads


@pytest.mark.parametrize("size", [3, 128])
def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path, size):
    with pytest.raises(ConfigError, match=f"figure.tp_size={size} must"):
        points_of(tmp_path, EXPERIMENT, f"figure.tp_size={size}")


def test_what_bytes_allow_of_the_papers_model():
    """The 44 % of an adapter that each of 8 ranks reads, and 0.76; worked out apart from this code."""
    model = model_conf("llama2-70b")
    assert adapter_share(model, 8) == pytest.approx(0.435, abs=1e-3)
    assert bytes_ratio(model, 16, 8, 32, 1000) == pytest.approx(0.762, abs=1e-3)
    assert adapter_share(model, 1) == 1


def test_shares_of_adapters_are_those_of_the_slots():
    """Beside the slots of the engine: the elements alone, as a slot also notes its rank."""
    wide = TINY.model_copy(update={"hidden_size": 256, "intermediate_size": 512})

    def slot_bytes() -> int:
        from experiments.benches.model_steps import llama_config

        model = LlamaForCausalLM(llama_config(wide), torch.float32)
        model.init_random_weights(0)
        config = EngineConfig(max_batch_size=2, max_model_len=32)
        return Engine(model, config.lora_config(16, target_modules=list(LLAMA_LORA_MODULES)), config).memory.slot_bytes

    whole = slot_bytes()
    assert whole == pytest.approx(4 * wide.lora_parameters(16), rel=1e-3)
    for found in on_threads(2, lambda _: slot_bytes()):
        assert found / whole == pytest.approx(adapter_share(wide, 2), rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "mib", "size", "name"),
    [
        (1, 143771, 1, "llama2-13b"), (3, 143771, 2, "llama2-70b"), (8, 40960, 8, "llama2-70b"),
        (1, 24576, 1, "llama2-7b"),
    ],
)  # fmt: skip
def test_the_largest_model_that_fits_all_gpus_together(monkeypatch, gpus, mib, size, name):
    found = [{"index": str(i), "memory.total": f"{mib} MiB"} for i in range(gpus)]
    monkeypatch.setattr(environment, "gpu_query", lambda *_: found)
    fitting_model.cache_clear()
    assert ranks_here("cuda") == size
    assert fitting_model("cuda", "gpu") == name
    assert fitting_model("cuda", "smoke") == fitting_model("cpu", "laptop") == "llama-tiny"
    monkeypatch.setattr(environment, "gpu_query", lambda *_: [])
    assert fitting_model("cuda", "paper") == "llama2-7b"
    fitting_model.cache_clear()


def test_one_rank_alone_measures_what_the_bench_does(tmp_path):
    place = {"backend": "gloo", "init_method": (tmp_path / "store").as_uri(), "rank": 0, "world_size": 1}
    stream, adapters = StreamConf("released", 8, 20, 1, 2, 64, 64), {"rank": 4, "sets": 3}
    with init_tensor_parallel(**place):
        bench = RankBench(TINY, "cpu", Limits(4, 20), stream, (3, 5), 1, adapters)
        found = values(bench.measure("punica_sharded", "Distinct", 0))
    assert found["throughput"] > 0
    assert found["token_agreement"] == 1.0
    assert found["collective_share"] == 0
    assert found["adapter_memory"] > 4 * 4 * TINY.lora_parameters(4) > 0


def test_memory_is_that_of_the_fullest_rank_and_collectives_their_mean(monkeypatch):
    names, units = ("throughput", "adapter_memory", "collective_share"), ("token/s", "byte", "ratio")
    ranks = (7.0, 5.0, 0.1), (9.0, 6.0, 0.3)
    readings = [[Reading(*one) for one in zip(names, rank, units, strict=True)] for rank in ranks]
    monkeypatch.setattr(BenchOnRanks, "call", lambda *_: readings)
    found = object.__new__(BenchOnRanks).measure("punica", "Distinct", 0)  # which starts nothing
    assert [one.value for one in found] == [7.0, 6.0, pytest.approx(0.2)]


class Worker:
    """Of a rank: knows its place, refuses, breaks."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def place(self, factor: int) -> int:
        return self.offset + factor * get_tensor_model_parallel_rank()

    def refuse(self) -> None:
        raise CheckFailed("not right")

    def break_down(self) -> None:
        raise KeyError("broken")


@pytest.mark.slow
def test_ranks_answer_in_their_order_refuse_and_go_on_until_one_breaks():
    ranks = Ranks(Worker, (10,), 2, "gloo")
    assert ranks.call("place", 5) == [10, 15]
    with pytest.raises(CheckFailed, match="not right"):
        ranks.call("refuse")
    assert ranks.call("place", 1) == [10, 11]
    with pytest.raises(RuntimeError, match=r"the ranks have ended: KeyError.'broken'"):
        ranks.call("break_down")
    ranks.close()
    assert not any(map(psutil.pid_exists, ranks._pids))


@pytest.mark.parametrize(
    "hardware", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("auto", marks=pytest.mark.multi_gpu)]
)
def test_a_cell_on_two_ranks_and_its_figure(tmp_path, hardware):
    sizes = ("engine.max_batch_size=4", "workload.names=[Distinct,Identical]", "draw=true", "figure.tp_size=2")
    config = composed(tmp_path, *sizes, f"hardware={hardware}", name=EXPERIMENT.name)
    outcome = run(config, Fig12())
    assert (outcome.measured, outcome.failed) == (6, [])
    rows = read_rows(outcome.rows_file)
    value = {(row.system, row.workload, row.metric): row.value for row in rows}
    for system in ("punica", "punica_sharded", "continuous_batching"):
        assert value[system, "Distinct", "token_agreement"] == 1.0
        assert 0 < value[system, "Distinct", "collective_share"] < 1
    memory = [value[system, "Distinct", "adapter_memory"] for system in ("punica_sharded", "punica")]
    assert memory[0] < memory[1]
    assert len(outcome.figures) == 2
    assert run(config, Fig12()).measured == 0
