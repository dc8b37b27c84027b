"""The API over several runners without Ray: right tokens whatever dies, nothing kept, one clear error at worst."""

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from punica.adapters import LoRARequest
from punica.cluster import ray_runners
from punica.cluster.adapter_files import StoredFiles
from punica.cluster.ray_cluster import ClusterOutput, LostRunner, RayCluster
from punica.cluster.ray_runners import Timeouts
from punica.engine import Request, SamplingParams, StepStatistics
from punica.serve import runners
from punica.serve.app import Settings, make_app
from punica.serve.backend import Call
from punica.serve.runners import RunnerMetrics, RunnersThread
from tests.serve.runners_world import build_of, local, use_local_runners
from tests.serve.world import check_stop, events, state_of, text_of, wait_until

LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 60}


@pytest.fixture
def cluster(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    use_local_runners(monkeypatch)
    monkeypatch.setattr(runners, "TEND_S", 0.05)
    with RayCluster(build_of(world, 3), 2) as made:
        yield made


@pytest.fixture
def client(cluster: RayCluster, world: Any, tmp_path: Path) -> Iterator[Any]:
    app = make_app(RunnersThread(cluster), Settings("tiny", world.adapters[:3], roots=[tmp_path], max_queue=4))
    with TestClient(app) as made:
        yield made


@pytest.fixture
def poet(world: Any, tmp_path: Path) -> dict[str, str]:
    """The body that loads a copy of an adapter."""
    return {"lora_name": "poet", "lora_path": str(shutil.copytree(world.adapters[3].absolute_path, tmp_path / "poet"))}


def complete(client: Any, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"model": "tenant-0", **LONG, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def streamed(client: Any, **fields: Any) -> str:
    """Joined text of a stream; an error is an AssertionError."""
    chunks = events(client.post("/v1/completions", json={"model": "tenant-0", **LONG, "stream": True, **fields}).text)
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def texts_of(alone: Any, world: Any) -> list[str]:
    """Texts of one engine for three adapters."""
    params = SamplingParams(60, ignore_eos=True)
    return [alone.generate(["hello"], adapter, params)[0].text for adapter in world.adapters[:3]]


def value(client: Any, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_every_parameter_is_served_as_by_one_engine(client: Any, world: Any) -> None:
    one_app = world.app(3)[1]
    options: list[dict[str, Any]] = [
        {"model": "tenant-2", "logprobs": 2}, {"prompt": ["a", "b c"], "n": 2, "temperature": 1.0, "seed": 5},
        {"presence_penalty": 1.0, "logit_bias": {"3": 5.0}, "stop": ["e", "l"], "max_tokens": 30},
    ]  # fmt: skip
    with TestClient(one_app) as one:
        for option in options:
            assert complete(client, **{"max_tokens": 12, **option}) == complete(one, **{"max_tokens": 12, **option})


def test_calls_at_once_are_spread_and_streamed(client: Any, cluster: RayCluster, alone: Any, world: Any) -> None:
    expected = [text_of(alone, "hello", adapter, 30) for adapter in world.adapters[:3]]
    with ThreadPoolExecutor(10) as pool:
        names = [f"tenant-{number % 3}" for number in range(10)]
        found = list(pool.map(lambda name: streamed(client, model=name, max_tokens=30, ignore_eos=False), names))
    assert found == [expected[number % 3] for number in range(10)]
    by_runner = [value(client, f'punica_runner_generated_tokens_total{{runner="runner-000{n}"}}') for n in (0, 1)]
    assert sum(by_runner) == value(client, "punica_generated_tokens_total")
    assert min(by_runner) > 0
    steps = [value(client, f'punica_runner_steps_total{{runner="runner-000{n}"}}') for n in (0, 1)]
    assert sum(steps) == value(client, "punica_steps_total") > 0
    assert value(client, "punica_requests_running") == value(client, "punica_requests_waiting") == 0
    assert value(client, "punica_runners_ready") == value(client, "punica_runners_wanted") == 2


def test_a_cancelled_call_leaves_its_runner_at_once(cluster: RayCluster, world: Any) -> None:
    engines = [local(cluster, number).runner.engine for number in (0, 1)]
    before = [state_of(engine) for engine in engines]

    async def scenario() -> None:
        thread = RunnersThread(cluster)
        runners.TEND_S = 60  # no probe takes it out
        thread.start()
        params = SamplingParams(120, ignore_eos=True)
        call = Call([Request(f"r{n}", [1, 2], params, world.adapters[0]) for n in range(12)], streams=True)
        await thread.submit(call)
        await anext(call.batches())
        assert [state_of(engine) for engine in engines] != before
        thread.abort(call)
        while [state_of(engine) for engine in engines] != before:
            await asyncio.sleep(0.001)
        await thread.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not cluster.has_unfinished()


def test_stopping_ends_what_is_unfinished_and_leaves_the_cluster(cluster: RayCluster) -> None:
    asyncio.run(asyncio.wait_for(check_stop(RunnersThread(cluster)), 60))
    assert not cluster.has_unfinished()
    assert cluster.generate([[1, 2]], None, 3)[0].finish_reason == "length"


def test_a_runner_that_dies_neither_loses_nor_repeats_a_token(client, cluster, alone, world) -> None:
    expected = texts_of(alone, world)
    with ThreadPoolExecutor(9) as pool:
        found = [pool.submit(streamed, client, model=f"tenant-{number % 3}") for number in range(9)]
        wait_until(lambda: min(cluster.working_sets.values()) >= 3)
        local(cluster, 0).dies = True
        wait_until(lambda: value_of_losses(client) == 1)
        wait_until(lambda: len(cluster.working_sets) == 2)
        local(cluster, 1).dies = True
        assert [future.result(60) for future in found] == [expected[number % 3] for number in range(9)]
    assert value_of_losses(client) == 2
    assert value(client, 'punica_requests_total{reason="length"}') == 9
    assert client.get("/health").json() == {"status": "ok"}


def value_of_losses(client: Any) -> float:
    return value(client, "punica_runner_losses_total")


def test_an_idle_runner_that_dies_is_noticed_and_replaced(client: Any, cluster: RayCluster) -> None:
    victim = local(cluster, 1)
    victim.starts, victim.dies = None, True  # its replacement takes its time
    wait_until(lambda: client.get("/health").json() == {"status": "degraded"})
    assert client.get("/health").status_code == 200
    assert len(complete(client)) == 1
    assert value(client, "punica_runners_ready") == 1
    assert 'punica_runner_requests{runner="runner-0001"}' not in client.get("/metrics").text
    assert value(client, 'vllm:num_requests_waiting{engine="0",model_name="tiny"}') == 0
    assert client.get("/steps").json().items() >= {"num_running": 0, "num_waiting": 0, "model": "tiny"}.items()


def test_a_runner_that_hangs_is_killed_and_its_requests_continue(client, cluster, alone, world) -> None:
    cluster._timeouts = Timeouts(step_s=0.1)
    expected = texts_of(alone, world)
    victim = local(cluster, 0)
    victim.starts = None  # its replacement takes its time
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(streamed, client, model=f"tenant-{number % 3}") for number in range(8)]
        wait_until(lambda: min(cluster.working_sets.values()) == 4)
        victim.hangs = True
        assert [future.result(60) for future in found] == [expected[number % 3] for number in range(8)]
    assert victim.runner is None, "it is killed"
    assert value_of_losses(client) == 1
    assert value(client, 'punica_requests_total{reason="length"}') == 8
    assert client.get("/health").json() == {"status": "degraded"}


def test_a_reply_that_is_collected_late_is_no_loss(cluster: RayCluster) -> None:
    cluster._timeouts = Timeouts(step_s=0.01)
    cluster.add_request(Request("r", [1, 2], 3))
    while cluster.has_unfinished():
        assert cluster.step(0.0).lost == ()
        time.sleep(0.02)


def test_without_any_runner_calls_end_with_one_error_until_one_is_back(client, cluster, monkeypatch) -> None:
    add_runner = cluster.add_runner

    def refuse() -> str:
        raise RuntimeError("no machine")

    monkeypatch.setattr(cluster, "add_runner", refuse)
    for number in (0, 1):
        local(cluster, number).starts, local(cluster, number).dies = False, True
    answer = client.post("/v1/completions", json={"model": "tenant-0", **LONG})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert "no memory for the model" in answer.json()["error"]["message"]
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    monkeypatch.setattr(cluster, "add_runner", add_runner)
    wait_until(lambda: client.get("/health").json() == {"status": "ok"})
    assert len(complete(client)) == 1
    assert sorted(cluster.runners) == ["runner-0002", "runner-0003"]


def test_a_runner_that_contradicts_the_scheduler_fails_what_is_served_and_is_replaced(client, cluster) -> None:
    first = complete(client)
    liars = [local(cluster, number) for number in (0, 1)]
    before = [liar.runner for liar in liars]
    for liar in liars:
        liar.lies = True
    texts = []
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/completions", json={"model": "tenant-0", **LONG}), range(6)))
    for answer in answers:
        if answer.status_code == 200:
            texts.append(answer.json()["choices"])
            continue
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "fault of the library" in answer.json()["error"]["message"]
    assert len(texts) < 6
    assert all(choices == first for choices in texts)
    wait_until(lambda: all(liar.runner not in (None, old) for liar, old in zip(liars, before, strict=True)))
    wait_until(lambda: client.get("/health").json() == {"status": "ok"})
    assert complete(client) == first
    assert not cluster.has_unfinished()


def test_a_full_server_counts_over_all_runners(client: Any) -> None:
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1, "n": 13})
    assert "this server takes 12" in answer.json()["error"]["message"]  # two batches of four, and four that wait
    assert len(complete(client, n=12, temperature=1.0, max_tokens=1)) == 12


def test_adapters_are_loaded_for_all_runners_and_unloaded(client, cluster, world, alone, tmp_path) -> None:
    def post(action: str, **body: Any) -> Any:
        return client.post(f"/v1/{action}_lora_adapter", json={"lora_name": "poet", **body})

    folder = tmp_path / "poet"
    shutil.copytree(world.adapters[3].absolute_path, folder)
    expected = text_of(alone, "hello", world.adapters[3], 20)
    assert post("load", lora_path=str(folder)).status_code == 200
    shutil.rmtree(folder)  # all runners have what was checked
    choices = complete(client, model="poet", prompt=["hello"] * 8, max_tokens=20, ignore_eos=False)
    assert [choice["text"] for choice in choices] == [expected] * 8
    assert all(local(cluster, number).runner.folders for number in (0, 1))
    shutil.copytree(world.adapters[1].absolute_path, folder)
    assert post("load", lora_path=str(folder), load_inplace=True).status_code == 200
    assert complete(client, model="poet", max_tokens=9)[0]["text"] == text_of(alone, "hello", world.adapters[1], 9)
    assert [adapter.lora_int_id for adapter, _ in cluster._stored.values()] == [5]  # not the one before
    assert post("unload").status_code == 200
    assert not cluster._stored
    with pytest.raises(ValueError, match=r"\(id 1\) is not in the object store; there are ids \[\]"):
        cluster.drop_adapter(world.adapters[0])
    (folder / "adapter_config.json").write_text("{")
    refused = post("load", lora_path=str(folder))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    assert post("load", lora_path=str(tmp_path / "none")).status_code == 404
    assert not cluster._stored
    assert client.post("/v1/completions", json={"model": "poet", "prompt": "a"}).status_code == 404


def test_an_adapter_is_checked_by_a_runner_that_lives(client, cluster, poet, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "probe", lambda: None)  # the deaths are not noticed
    local(cluster, 0).dies = True
    assert client.post("/v1/load_lora_adapter", json=poet).status_code == 200
    assert local(cluster, 1).checked == ["poet"]
    local(cluster, 1).dies = True
    answer = client.post("/v1/load_lora_adapter", json={**poet, "lora_name": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_runner")


def test_a_check_that_hangs_stops_no_others_and_is_made_by_another_runner(client, cluster, poet, monkeypatch) -> None:
    probe, hung = cluster.probe, local(cluster, 0)
    monkeypatch.setattr(cluster, "probe", lambda: None)
    hung.hangs = True
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lambda: client.post("/v1/load_lora_adapter", json=poet))
        wait_until(lambda: hung.is_checking)
        assert len(complete(client)) == 1  # the other runner is the first to get requests
        cluster._timeouts = Timeouts(step_s=0.1)
        monkeypatch.setattr(cluster, "probe", probe)
        assert loading.result(30).status_code == 200
    assert local(cluster, 1).checked == ["poet"]


def test_a_check_that_is_cancelled_keeps_no_files(cluster: RayCluster, world: Any) -> None:
    for number in (0, 1):
        local(cluster, number).hangs = True

    async def scenario() -> None:
        thread = RunnersThread(cluster)
        thread.start()
        loading = asyncio.create_task(thread.admit(world.adapters[3]))
        while not local(cluster, 0).is_checking:
            await asyncio.sleep(0.001)
        assert cluster._stored
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not cluster._stored
        local(cluster, 0).kill()  # frees the waiting thread
        await thread.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_files_are_read_beside_the_thread_that_relays_tokens(client, poet, monkeypatch) -> None:
    answered, store_adapter = threading.Event(), ray_runners.store_adapter

    def slow(adapter: LoRARequest) -> StoredFiles:
        assert answered.wait(30), "no call was answered while files were read"
        return store_adapter(adapter)

    monkeypatch.setattr(ray_runners, "store_adapter", slow)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lambda: client.post("/v1/load_lora_adapter", json=poet))
        complete(client)
        answered.set()
        assert loading.result(30).status_code == 200


def test_a_lost_runner_leaves_no_series() -> None:
    metrics = RunnerMetrics(2)
    before = metrics.exposition().decode().count("\n")
    for number in range(20):
        metrics.note_runners(ClusterOutput((), (), StepStatistics()), 0, {f"runner-{number}": 3}, 0)
        lost = LostRunner(f"runner-{number}", "died"), LostRunner("new", "no place")
        metrics.note_runners(ClusterOutput((), (), StepStatistics(), lost=lost), 0, {}, 0)
    found = metrics.exposition().decode()
    assert found.count("\n") == before
    assert "punica_runner_losses_total 40.0" in found
