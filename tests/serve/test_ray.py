"""The API over two runners on Ray: real processes, real deaths. All slow: Ray takes up to half a minute to start."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the optional extra 'cluster' is not installed")

import ray

from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import Timeouts, connect
from punica.engine import SamplingParams
from punica.serve import launch
from punica.serve.cli import parse
from tests.serve.world import ROOT, events, get, make_world, post, python, served, wait_until

ADAPTERS, CALLS, NEW = 8, 64, 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """World, cluster and address of a server with two runners, started from a command line."""
    home = tmp_path_factory.mktemp("ray")
    world = make_world(home, ADAPTERS, words=True)
    adapters = [f"--adapter={one.lora_name}={one.absolute_path}" for one in world.adapters[: ADAPTERS - 1]]
    options = parse([
        str(world.checkpoint), "--ray=2", *adapters, "--max-batch-size=8", "--max-lora-rank=8", "--max-model-len=128",
        "--dtype=float32", f"--allow-folder={home}",
    ])  # fmt: skip
    found: list[RayCluster] = []
    assert connect(None, 3, 0)  # a place for the runner of another server
    cluster_of = launch.cluster_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "cluster_of", lambda *given: found.append(cluster_of(*given)) or found[0])
        with launch.opened(options, launch.settings_of(options)) as app, served(app) as url:
            yield world, found[0], url
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(running: Any) -> Any:
    return running[0].engine(ADAPTERS)


def load_last(world: Any, url: str) -> None:
    """Load the adapter that the command line leaves out, also where another test has."""
    body = {"lora_name": "tenant-7", "lora_path": world.adapters[7].absolute_path, "load_inplace": True}
    assert post(url, "load_lora_adapter", **body).status_code == 200


def texts(url: str, number: int) -> str:
    """Streamed text of one call of the 64; adapter and prompt follow from its number. Errors fail the test."""
    body = {
        "model": f"tenant-{number % ADAPTERS}", "prompt": prompt(number), "max_tokens": NEW, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    *chunks, usage = events(post(url, **body).text)
    assert usage["usage"]["completion_tokens"] == NEW, usage
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def prompt(number: int) -> str:
    return " ".join(f"w{word}" for word in range(number, number + 3 + number % 5))


def health(url: str) -> Any:
    return get(url, "/health").json()["status"]


def test_64_calls_over_8_adapters_survive_a_killed_runner(running: Any, alone: Any) -> None:
    """Each gets the tokens of one engine, once, whether it was on the runner that died or not."""
    world, cluster, url = running
    load_last(world, url)
    params = SamplingParams(NEW, ignore_eos=True)
    prompts = [prompt(number) for number in range(CALLS)]
    results = alone.generate(prompts, [world.adapters[number % ADAPTERS] for number in range(CALLS)], params)
    expected = [result.text for result in results]
    assert len(set(expected)) > CALLS // 2
    with ThreadPoolExecutor(CALLS) as pool:
        assert list(pool.map(lambda number: texts(url, number), range(CALLS))) == expected
        again = [pool.submit(texts, url, number) for number in range(CALLS)]
        wait_until(lambda: min(cluster.working_sets.values()) == 8)
        victim = cluster.runners["runner-0001"].actor
        os.kill(ray.get(victim.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        assert [future.result() for future in again] == expected
    assert "punica_runner_losses_total 1.0" in get(url, "/metrics").text
    wait_until(lambda: health(url) == "ok", 120)
    assert f'punica_requests_total{{reason="length"}} {2 * CALLS}.0' in get(url, "/metrics").text


def test_a_runner_that_hangs_in_a_step_is_replaced(running: Any, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by a signal, it neither dies nor replies."""
    world, cluster, url = running
    wait_until(lambda: health(url) == "ok")
    load_last(world, url)
    monkeypatch.setattr(cluster, "_timeouts", Timeouts(step_s=3.0))
    adapters = [world.adapters[number % ADAPTERS] for number in range(12)]
    results = alone.generate([prompt(number) for number in range(12)], adapters, SamplingParams(NEW, ignore_eos=True))
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(texts, url, number) for number in range(12)]
        wait_until(lambda: cluster.working_sets["runner-0000"] > 0)
        victim = cluster.runners["runner-0000"].actor
        stopped = ray.get(victim.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: health(url) == "degraded", 60)
        assert [call.result() for call in calls] == [result.text for result in results]
    wait_until(lambda: health(url) == "ok", 120)
    assert not Path(f"/proc/{stopped}").exists()


def test_the_command_line_serves_and_ends(running: Any) -> None:
    """A server in a process of its own, in the Ray of this one."""
    world, _, _ = running
    command = [
        "-m", "punica.serve", world.checkpoint, "--ray=1", "--port=0", "--max-batch-size=2",
        "--ray-address", ray.get_runtime_context().gcs_address, "--max-model-len=64",
    ]  # fmt: skip
    with python(*command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Uvicorn running on" in line:
                url = line.partition("running on ")[2].split()[0]
                assert post(url, model="tiny", prompt="w1", max_tokens=3).status_code == 200
                assert health(url) == "ok"
                process.send_signal(signal.SIGTERM)
        assert process.wait() in (-signal.SIGTERM, signal.SIGTERM), "".join(lines)  # uvicorn's way, Ray's way
    assert any("Application shutdown complete" in line for line in lines)
