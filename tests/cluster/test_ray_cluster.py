"""Cluster on Ray: real processes. All slow: Ray takes half a minute to start. `tests/serve/test_ray.py` kills some."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from punica.cluster import ray_runners
from punica.cluster.ray_cluster import LostRunner, RayCluster
from punica.cluster.ray_runners import RunnerResources, Timeouts, connect, import_ray
from punica.engine import Request
from tests.cluster.runner_world import factory, requests, undisturbed

ray = pytest.importorskip("ray", reason="the optional extra 'cluster' is not installed")


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray for all tests of this file."""
    assert connect(None, 4, 0)
    yield
    import_ray().shutdown()


@pytest.fixture(scope="module")
def two_runners(ray_here: None) -> Iterator[RayCluster]:
    with RayCluster(factory(), 2) as cluster:
        yield cluster


@pytest.fixture
def pair(two_runners: RayCluster) -> RayCluster:
    """Two runners shared by the tests that leave them alive; steps of the test before have ended."""
    while two_runners._pending:
        two_runners.step()
    return two_runners


@pytest.mark.slow
def test_generate_serves_more_requests_than_have_room(pair, adapters) -> None:
    asked = requests(adapters, 20, seed=2, seeded=True)
    for request in asked[:12]:  # eight on the runners, four wait
        pair.add_request(request)
    for request in asked[:12]:
        assert pair.abort_request(request.request_id).finish_reason == "aborted"
    assert not pair.has_unfinished()
    prompts, params = [list(one.prompt_token_ids) for one in asked], [one.params for one in asked]
    results = pair.generate(prompts, [one.adapter for one in asked], params)
    assert [result.token_ids for result in results] == list(undisturbed(asked).values())


@pytest.mark.slow
def test_steps_are_accounted_for_and_signals_shown(pair) -> None:
    steps = []
    for i in range(3):
        pair.add_request(Request(f"r{i}", [1, 2], 5))
    assert pair.working_sets == {"runner-0000": 0, "runner-0001": 3}  # the paper's rule
    assert not pair.scale_signal.add_gpu
    assert pair.scale_signal.release == ()  # it would be asked for again at once
    while pair.has_unfinished():
        steps += pair.step().steps
    assert sum(step.work.decodes for step in steps) == 12
    assert sum(step.work.prefill_tokens for step in steps) == 6
    assert sum(step.work.kv_tokens for step in steps) == 3 * (3 + 4 + 5 + 6)
    assert all(0 < step.seconds < step.end_s - step.begin_s for step in steps)
    assert pair.step(timeout_s=0.01).tokens == {}


@pytest.mark.slow
def test_runners_come_and_go(ray_here, adapters) -> None:
    asked = requests(adapters, 16, seed=8)
    with RayCluster(factory(), 1) as cluster:
        for request in asked[:6]:
            cluster.add_request(request)
        cluster.step()
        assert cluster.scale_signal.add_gpu
        added = cluster.add_runner()
        joined: tuple[str, ...] = ()
        while not joined:
            joined = cluster.step().joined
        assert joined == (added,)
        cluster.remove_runner("runner-0000")
        states = [cluster.add_request(request) for request in asked[6:]]
        while cluster.has_unfinished():
            cluster.step()
        tokens = {state.request_id: state.output_token_ids for state in states}
        assert list(cluster.working_sets) == [added]
        assert tokens == {name: row for name, row in undisturbed(asked).items() if name in tokens}
        cluster.remove_runner(added)
        cluster.add_request(asked[0])
        with pytest.raises(RuntimeError, match="1 requests wait, and none of the 0 runners"):
            cluster.step()


@pytest.mark.slow
def test_what_cannot_start_says_why(ray_here) -> None:
    with pytest.raises(RuntimeError, match="runner-0000 could not be started: ValueError: the engine has 5 KV blocks"):
        RayCluster(factory(num_blocks=5), 1)
    with pytest.raises(ValueError, match=r"the runners need 1000 CPUs, the Ray cluster has"):
        RayCluster(factory(), 1000)
    with pytest.raises(ValueError, match="this process is in a Ray cluster"):
        RayCluster(factory(), 1, address="10.0.0.1:6379")
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_busy_cluster_is_waited_for_a_while_and_named(pair) -> None:
    """A runner without a place, built or added, is given up; the error names wanted and free resources."""
    total = ray.cluster_resources()["CPU"]
    busy = ray.util.placement_group([{"CPU": total - len(pair.runners) - 1}])
    ray.get(busy.ready())
    said = rf"within 1 s for 2 CPUs \(1 of {total:g} are free\)"
    try:
        with pytest.raises(RuntimeError, match=rf"runner-0000 could not be started: no place in .* {said}"):
            RayCluster(factory(), 1, resources=RunnerResources(num_cpus=2), timeouts=Timeouts(place_s=1))
        said = rf"within 10 s for 1 CPUs \(0 of {total:g} are free\)"
        timeouts = Timeouts(place_s=10)  # a busy machine's Ray takes seconds to give one
        with RayCluster(factory(), 1, timeouts=timeouts) as cluster:
            added = cluster.add_runner()
            lost: list[LostRunner] = []
            assert serve_until_lost(cluster, lost).runner == added
            assert re.search(said, lost[0].reason)
            assert cluster.generate([[1, 2]], None, 4)[0].finish_reason == "length"
            cluster.remove_runner("runner-0000")
            cluster.add_request(Request("r", [1, 2], 4))
            cluster.add_runner()  # there is room again
            while cluster.has_unfinished():
                assert not cluster.step().lost
    finally:
        ray.util.remove_placement_group(busy)


def serve_until_lost(cluster: RayCluster, lost: list[LostRunner]) -> LostRunner:
    while not lost:
        lost += cluster.step().lost
    return lost[0]


TOO_SLOW = "The current node timed out during startup."


@pytest.mark.parametrize(
    ("address", "failures", "message", "starts", "gpus"),
    [(None, 2, TOO_SLOW, 3, 4), (None, 3, TOO_SLOW, 3, 0), (None, 1, "no room", 1, 0), ("host:1", 1, TOO_SLOW, 1, 0)],
)
def test_a_start_that_had_too_little_time_is_tried_again(monkeypatch, address, failures, message, starts, gpus) -> None:
    """A Ray that is started here is told the GPUs that engines will find."""
    started = []

    def init(**settings: object) -> None:
        started.append(settings)
        if len(started) <= failures:
            raise Exception(message)

    there = {"CPU": 4.0, "GPU": 4.0}
    fake = SimpleNamespace(is_initialized=lambda: False, init=init, cluster_resources=lambda: there)
    monkeypatch.setattr(ray_runners, "import_ray", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if failures < starts:
        assert connect(address, 2, gpus)
    else:
        where = "at host:1" if address else "on this machine"
        with pytest.raises(RuntimeError, match=rf"{where} \({message}\)"):
            connect(address, 2, gpus)
    assert [settings.get("num_gpus") for settings in started] == [gpus or None] * starts
