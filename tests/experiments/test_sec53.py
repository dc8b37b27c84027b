"""Section 5.3: what is moved arrives, what is recomputed is what was there, and the rows of both."""

import pytest
import torch
from fakes import measured, points_of

from experiments.benches.migration import COPY, COPY_HOST, Blocks, Migration, Route, check_moved, check_recomputed
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ConfigError, model_conf
from experiments.measure import environment
from experiments.sec53_migration import EXPERIMENT
from punica.engine.runner import ModelRunner

LINKS = ["ethernet 25G", "ethernet 100G", "infiniband 400G"]


@pytest.fixture(scope="module")
def migration() -> Migration:
    return Migration(model_conf("llama-tiny"), rank=4, batch_size=2, longest=40, device="cpu")


def systems(tmp_path, *overrides) -> list[str]:
    return list(dict.fromkeys(point.system for point in points_of(tmp_path, EXPERIMENT, *overrides)))


def test_a_machine_has_the_ways_that_its_devices_allow(tmp_path, monkeypatch):
    assert systems(tmp_path) == ["recompute", "copy", *LINKS]
    for gpus, more in ((1, ["copy_host"]), (2, ["copy_host", "copy_peer"])):
        monkeypatch.setattr(environment, "gpu_query", lambda *_, gpus=gpus: [{"index": str(i)} for i in range(gpus)])
        assert systems(tmp_path, "hardware=h200") == ["recompute", "copy", *more, *LINKS]


def test_one_gpu_has_no_peer_and_a_link_needs_a_bandwidth(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "gpu_query", lambda *_: [{"index": "0"}])
    with pytest.raises(ConfigError, match="system=copy_peer needs two GPUs"):
        systems(tmp_path, "hardware=h200", "system=copy_peer")
    with pytest.raises(ConfigError, match=r"links_gb_s.ethernet 25G=0.0 must be greater than 0"):
        systems(tmp_path, "figure.links_gb_s={ethernet 25G: 0.0}")


@pytest.mark.parametrize("name", [COPY, COPY_HOST])
@pytest.mark.parametrize("context", [1, 16, 40])
def test_copied_blocks_arrive_where_they_should_and_nowhere_else(migration, name, context):
    route = migration.route(name, context)
    parts = migration._targets["cpu"]
    everything = Blocks(parts, range(len(parts[0])))
    everything.scatter(torch.zeros_like(everything.content()))
    route.move()
    assert route.target.content().equal(route.source.content())
    moved = everything.content().any(-1).any(0)
    assert int(moved.sum()) == -(-context // 16)


def test_a_copy_that_goes_elsewhere_is_refused(migration):
    class Elsewhere(Route):
        def move(self) -> None:
            super().move()
            self.target.scatter(self.target.content().roll(1, dims=1))

    with pytest.raises(CheckFailed, match="copy: keys and values do not arrive"):
        check_moved(Elsewhere(**vars(migration.route(COPY, 40))), COPY)


@pytest.mark.parametrize("place", [3, 18], ids=["first-block", "last-token"])
def test_what_is_recomputed_is_compared_with_what_was_there(migration, monkeypatch, place):
    launch = ModelRunner.launch

    def spoilt(runner, layout, before=None):
        in_flight = launch(runner, layout, before)
        if layout.num_prefill_rows > 12:  # the second request, not the first one's prompt
            runner.attention.cache.keys[1][layout.spans[0].block_table[place // 16] * 16 + place % 16] += 1
        return in_flight

    check_recomputed(migration.steps.engine)
    monkeypatch.setattr(ModelRunner, "launch", spoilt)
    with pytest.raises(CheckFailed, match="a prefill of all tokens differs"):
        check_recomputed(migration.steps.engine)


def test_rows_of_both_ways(tmp_path):
    outcome, rows = measured(tmp_path, EXPERIMENT, "figure.contexts=[20]")
    assert outcome.measured == 5
    value = {(row.system, row.metric): row.value for row in rows if row.statistic in ("value", "median")}
    kinds = {row.system: row.kind for row in rows}
    nbytes = 32 * 4 * model_conf("llama-tiny").kv_elements()  # two blocks
    assert value["copy", "bytes"] == value["recompute", "bytes"] == value["ethernet 25G", "bytes"] == nbytes
    assert value["ethernet 25G", "migration_latency"] == pytest.approx(nbytes / 3.125e9 * 1e3)
    assert kinds == {"recompute": "measured", "copy": "measured", **dict.fromkeys(LINKS, "datasheet")}
    milliseconds = value["recompute", "migration_latency"]
    assert value["recompute", "break_even_bandwidth"] == pytest.approx(nbytes / milliseconds / 1e6)
    steps = milliseconds / value["recompute", "decode_step_latency"]
    assert value["recompute", "decode_steps"] == pytest.approx(steps)
