"""The engine's process and the server's: neither outlives the other unnoticed, and answers under way may end."""

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest
import torch

from punica.engine import Engine, Request
from punica.serve.app import Settings, make_app
from punica.serve.backend import Call
from punica.serve.process import EngineProcess, portable, send
from punica.serve.stepper import EngineStepper
from tests.serve.engines import Peculiar, builder, ending, refusing, threads
from tests.serve.world import LONG, World, check_stop, events, get, metric, post, python, served, wait_until

LIMIT_S = 600
"""For processes that import torch on a busy machine."""


def test_calls_of_a_process_that_dies_get_one_clear_error(world, tmp_path, monkeypatch) -> None:
    """Nor does the server itself ask for a GPU: it would take memory on it."""
    for name in ("_lazy_init", "init", "is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, partial(pytest.fail, f"torch.cuda.{name} in the server's process"))
    with (
        EngineProcess(builder(world, tmp_path / "failures")) as process, ThreadPoolExecutor(4) as pool,
        served(make_app(process, Settings("tiny", world.adapters[:2]))) as url,
    ):  # fmt: skip
        whole = [pool.submit(post, url, **LONG, n=4) for _ in range(2)]
        stream = pool.submit(post, url, **LONG, stream=True)
        wait_until(lambda: metric(url, "punica_requests_running") == 8)
        assert process._process.pid is not None
        os.kill(process._process.pid, signal.SIGKILL)
        for answer in [one.result(60) for one in whole]:
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
            assert "ended by SIGKILL, perhaps for want of memory; restart the server" in answer.text
        assert "SIGKILL" in events(stream.result(60).text)[-1]["error"]["message"]
        later = post(url, **LONG)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_stopped")
        assert get(url, "/health").status_code == 503
        assert (get(url, "/metrics").status_code, "steps" in get(url, "/steps").json()) == (200, False)
        assert metric(url, "punica_requests_running") == 0


@pytest.mark.slow
def test_stopping_ends_what_is_unfinished_and_what_has_ended_stays(world: World, tmp_path: Path) -> None:
    with EngineProcess(builder(world, tmp_path / "failures")) as process:
        asyncio.run(check_stop(process))
        assert process._process.exitcode == 0


def test_orders_that_a_hanging_process_does_not_take_leave_the_event_loop_free(world: World, tmp_path: Path) -> None:
    async def scenario(process: EngineProcess, number: int) -> None:
        process.start()
        calls = [Call([Request(str(index), range(1000, 60_000), 1)], False) for index in range(16)]
        os.kill(number, signal.SIGSTOP)
        woken = threading.Timer(60, os.kill, (number, signal.SIGCONT))
        woken.start()
        try:
            refused = asyncio.gather(*map(process.submit, calls), return_exceptions=True)
            await asyncio.sleep(0)
            assert woken.is_alive()  # nothing waited for it
        finally:
            woken.cancel()
            os.kill(number, signal.SIGCONT)
        assert [type(error) for error in await refused] == [ValueError] * 16

    with EngineProcess(builder(world, tmp_path / "failures")) as process:
        assert process._process.pid is not None
        asyncio.run(scenario(process, process._process.pid))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(ending, 3), "process ended with exit code 3 before the engine was ready; see its output above"),
        (refusing, "Peculiar: max_loras is above 3"),  # an error that does not pickle
        (partial(Engine.from_pretrained, "/nowhere"), "model folder '/nowhere' does not exist"),
    ],
)
@pytest.mark.slow
def test_an_engine_that_is_not_built_is_an_error_of_the_server(build: Any, message: str) -> None:
    with pytest.raises((RuntimeError, FileNotFoundError), match=message):
        EngineProcess(build)


def test_errors_travel_with_their_message() -> None:
    for error in (FileNotFoundError(2, "gone", "x"), ValueError("a\nb"), UnicodeDecodeError("utf-8", b"x", 0, 1, "no")):
        assert portable(error) is error
    found = portable(Peculiar("x", 1))
    assert (type(found), str(found)) == (RuntimeError, "Peculiar: x is above 1")


@contextmanager
def script(text: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program that starts an engine's process."""
    with python("-c", START + text, *arguments, stdout=subprocess.PIPE, start_new_session=True) as program:
        try:
            yield program
        finally:
            end_session(program)


def end_session(program: subprocess.Popen[bytes]) -> None:
    """Kill a program and whatever it left in its session, as it would be after a time-out."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


START = """
import sys
from functools import partial
from pathlib import Path
from punica.serve.process import EngineProcess
from tests.serve.engines import Hangs, hanging, plain
"""


def has_ended(process: psutil.Process) -> bool:
    """Tell so also of one that its new parent has not waited for."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("build", ["partial(hanging, Path(sys.argv[1]))", "Hangs(Path(sys.argv[1]))"])
def test_an_engine_that_hangs_with_the_interpreter_ends_with_a_killed_server(build: str, tmp_path: Path) -> None:
    """While it loads, and before that, while its libraries are imported."""
    file = tmp_path / "number"
    with script(f"EngineProcess({build})", file) as server:
        wait_until(lambda: file.exists() or server.poll() is not None, LIMIT_S)
        engine = psutil.Process(int(file.read_text()))
        assert not has_ended(engine)
        server.kill()
        wait_until(lambda: has_ended(engine), LIMIT_S)


@pytest.mark.slow
def test_a_process_whose_parent_ended_before_the_kernel_knew_ends(tmp_path: Path) -> None:
    file = tmp_path / "number"
    with script(ORPHAN, file) as parent:
        wait_until(lambda: file.exists() or parent.poll() is not None, LIMIT_S)
        child = psutil.Process(int(file.read_text()))
        parent.kill()
        wait_until(lambda: has_ended(child), LIMIT_S)


ORPHAN = """
import multiprocessing, os, time
from punica.processes import end_with_parent
file = Path(sys.argv[1])
def late():
    parent = os.getppid()
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
    while os.getppid() == parent:
        time.sleep(0.01)
    end_with_parent()
    time.sleep(3600)
multiprocessing.get_context("fork").Process(target=late).start()
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, (1, "10000")), ({"OMP_NUM_THREADS": "2"}, (2, "10000")), ({"OMP_WAIT_POLICY": "passive"}, (1, None))],
)
@pytest.mark.slow
def test_a_small_model_has_one_thread_unless_the_user_says_otherwise(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: Any
) -> None:
    async def scenario(process: EngineProcess) -> Any:
        process.start()
        return await process.order(threads)

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with EngineProcess(builder(world, tmp_path / "failures")) as process:
        assert asyncio.run(scenario(process)) == found


@pytest.mark.slow
def test_an_engine_that_is_not_closed_ends_with_its_program() -> None:
    with script("process = EngineProcess(plain); print(process._process.pid, flush=True)") as program:
        output, _ = program.communicate(timeout=LIMIT_S)
        assert program.returncode == 0
        assert not psutil.pid_exists(int(output))


@pytest.fixture
def command_line(world: World, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process, str]]:
    """A server of the command line in a process group of its own, its engine's process, and its address."""
    adapter, log = world.adapters[0], tmp_path / "log.txt"
    words = ["-m", "punica.serve", world.checkpoint, "--port=0", "--max-model-len=128"]
    words += [f"--adapter={adapter.lora_name}={adapter.absolute_path}"]
    with log.open("wb") as output:
        server = python(*words, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(lambda: server.poll() is not None or "Uvicorn running on" in log.read_text())
        assert server.poll() is None, log.read_text()
        (address,) = re.findall(r"Uvicorn running on (http://\S+)", log.read_text())
        (engine,) = [one for one in psutil.Process(server.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        yield server, engine, address
    finally:
        end_session(server)
    wait_until(lambda: not engine.is_running())


def test_outputs_of_one_prompt_are_sent_with_one_copy_of_it() -> None:
    prompt = tuple(range(1000, 6000))
    requests = [Request(f"request-{i}", prompt, 4) for i in range(16)]
    assert len(pickle.dumps(requests)) < 2 * len(pickle.dumps(requests[:1]))


def test_messages_of_a_step_do_not_repeat_the_prompt(world: World) -> None:
    engine, sizes = world.engine(0), []
    for number, length in enumerate((1, 100)):
        sent: list[bytes] = []
        stepper = EngineStepper(engine)
        stepper.send = partial(send, SimpleNamespace(send_bytes=sent.append))
        stepper.add(number, [Request(f"request-{number}", [*range(length)], 4)], True)
        while stepper._unfinished:
            stepper._step()
        *_, last = [piece for message in sent for _, piece in pickle.loads(message).pieces]
        assert (last.result.num_prompt, last.result.num_generated) == (length, 4)
        sizes.append(sum(map(len, sent)))
    assert abs(sizes[1] - sizes[0]) < 64  # texts differ


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_lets_answers_end(command_line: Any, number: int) -> None:
    server, engine, url = command_line
    with httpx2.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, trust_env=False) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = next(lines)
        os.killpg(server.pid, number)
        found = [first, *lines]
    assert found[-1] == "data: [DONE]"
    assert json.loads(found[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert not any('"error"' in line for line in found)
    assert server.wait(600) in (0, -number, 130)
    wait_until(lambda: not engine.is_running())


@pytest.mark.slow
def test_a_server_that_is_interrupted_while_the_engine_loads_leaves_none(world: World, tmp_path: Path) -> None:
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    with (tmp_path / "log.txt").open("wb") as output:
        words = ["-m", "punica.serve", world.checkpoint, "--port=0"]
        server = python(*words, stdout=output, stderr=output, preexec_fn=default)
    parent = psutil.Process(server.pid)
    wait_until(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in parent.children()))
    children = parent.children()
    server.send_signal(signal.SIGINT)
    assert server.wait(600) != 0
    wait_until(lambda: not any(child.is_running() for child in children))
