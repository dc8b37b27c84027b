"""The server around the application: clients that do not read, its end in steps, its port while it loads."""

import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest
from fastapi import FastAPI
from starlette.responses import Response

from punica.engine import StepOutput, StepStatistics
from punica.serve.server import Connection, Server, listen
from tests.serve.world import LONG, World, events, get, post, python, served, serving, wait_until


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# --- clients that do not read -----------------------------------------------------------------------------------------


@contextmanager
def unread(url: str, **fields: Any) -> Iterator[socket.socket]:
    """A request whose client has room for little of the answer, and reads none of it."""
    body = json.dumps({**LONG, **fields}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(300)
        client.connect(("127.0.0.1", port_of(url)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length"
        client.sendall(f"{head}: {len(body)}\r\n\r\n".encode() + body)
        yield client


def rest_of(client: socket.socket) -> bytes:
    """Read until the server closes its end of the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 1}], ids=str)
def test_a_client_that_reads_nothing_is_cut_and_its_places_are_free(world, fields, caplog) -> None:
    """The kernel took whole answers of megabytes: then no limit began, and the connection stayed for ever."""
    _, app = world.app(1, max_queue=0)
    with served(app, send_timeout_s=1.0) as url:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        with unread(url, **{"n": 8, "logprobs": 5, **fields}) as client:
            wait_until(lambda: "took nothing of its answer for 1 s" in caplog.text)
            answer = rest_of(client)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"[DONE]" not in answer  # of a stream
        assert b'"usage"' not in answer  # the last field of a whole answer
        assert post(url, **{**LONG, "n": 8, "max_tokens": 1}).status_code == 200  # of eight places


def test_a_client_that_reads_slowly_is_not_cut() -> None:
    left, begun, aborted = [900, 500, 300, 300], [], []
    connection: Any = object.__new__(Connection)
    connection._send_timeout_s = 60.0
    connection.loop = SimpleNamespace(call_later=lambda _, *what: begun.append(what))
    connection.transport = SimpleNamespace(
        get_write_buffer_size=lambda: left[0], abort=lambda: aborted.append(left[0])
    )  # fmt: skip
    connection._look()
    while begun:
        assert not aborted
        (look, before), left[:1] = begun.pop(), []
        look(before)
    assert aborted == [300]


def test_an_answer_of_megabytes_reaches_a_client_that_reads() -> None:
    app, body = FastAPI(), bytes(range(256)) * (1 << 15)
    app.get("/")(lambda: Response(body))
    with served(app, send_timeout_s=300.0) as url:
        assert get(url, "/").content == body


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(world: World) -> Iterator[Any]:
    """A server whose engine makes no tokens until ``go`` is set, and clients."""
    engine, app = world.app(1)
    step, go = engine.step, threading.Event()
    nothing = StepOutput({}, (), StepStatistics())
    engine.step = lambda: step() if go.wait(0.01) else nothing  # type: ignore[method-assign]

    @contextmanager
    def served_with(**fields: Any) -> Iterator[tuple[Server, str]]:
        with serving(app, **fields) as found:
            try:
                yield found
            finally:
                go.set()

    with ThreadPoolExecutor(2) as clients:
        yield SimpleNamespace(engine=engine, serving=served_with, go=go, submit=clients.submit)


def test_sigterm_refuses_first_and_lets_answers_end(held: Any) -> None:
    with held.serving(drain_s=600, grace_s=600) as (server, url):
        running = [held.submit(post, url, **LONG, stream=stream) for stream in (True, False)]
        wait_until(lambda: len(held.engine._requests) == 2)
        with httpx2.Client(trust_env=False, timeout=300) as kept:
            assert kept.get(f"{url}/health").status_code == 200
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: kept.get(f"{url}/health").status_code == 503)
            assert kept.get(f"{url}/health").json() == {"status": "stopping"}
            for method, path in (("GET", "models"), ("POST", "completions"), ("POST", "load_lora_adapter")):
                # a GET's body is not read: the close then resets the connection, at times before the answer is
                refused = kept.request(method, f"{url}/v1/{path}", json=LONG if method == "POST" else None)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["connection"] == "close"
            assert get(url, "/metrics").status_code == 200
        held.go.set()
        stream, whole = (one.result(300) for one in running)
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in stream.text
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: not is_open(port_of(url)))
        assert not server.force_exit


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_what_has_not_ended_in_time_ends_with_an_error(held: Any) -> None:
    with held.serving(drain_s=600, grace_s=0) as (server, url):
        running = [held.submit(post, url, **LONG, stream=stream, n=2) for stream in (True, False)]
        wait_until(lambda: len(held.engine._requests) == 4)
        server.handle_exit(signal.SIGINT, None)
        stream, whole = (one.result(300) for one in running)
        held.go.set()
    assert (whole.status_code, whole.json()) == (503, events(stream.text)[-1])
    assert whole.json()["error"]["code"] == "server_stopping"
    assert int(whole.headers["retry-after"]) >= 1
    assert not held.engine.has_unfinished()


# --- the port ---------------------------------------------------------------------------------------------------------


def test_every_address_of_a_host_has_the_same_port() -> None:
    found = listen("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in found}) == 1
        with pytest.raises(OSError, match=r"localhost:.*in use"):
            listen("localhost", found[0].getsockname()[1])
    finally:
        for one in found:
            one.close()


@pytest.mark.slow
def test_a_server_has_its_port_while_it_loads_and_ends_its_streams_with_an_error(world: World, tmp_path: Path) -> None:
    (probe,) = listen("127.0.0.1", 0)
    port, log = probe.getsockname()[1], tmp_path / "log.txt"
    probe.close()
    url = f"http://127.0.0.1:{port}"
    words = [world.checkpoint, "--max-model-len=128", f"--port={port}", "--drain=600", "--grace=0"]
    with log.open("wb") as output:
        server = python("-m", "punica.serve", *words, stdout=output, stderr=output)
    try:
        wait_until(lambda: is_open(port) or server.poll() is not None)
        assert "Uvicorn running" not in log.read_text()
        assert get(url, "/health").status_code == 200  # asked while it loaded
        said = log.read_text()
        assert f"Uvicorn running on {url} " in said
        assert "tiny: no adapter slots, dtype: float32, device: CPU" in said
        (engine,) = [one for one in psutil.Process(server.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        body = {**LONG, "model": "tiny", "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=300) as answer:
            lines = (line for line in answer.iter_lines() if line)
            found = [next(lines)]
            engine.suspend()
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: get(url, "/health").status_code == 503)
            server.send_signal(signal.SIGTERM)
            found += lines
        engine.resume()
        assert found[-1] == "data: [DONE]"
        if '"length"' not in found[-2]:  # it had all of its tokens before
            assert json.loads(found[-2][6:])["error"]["code"] == "server_stopping"
        assert server.wait(300) == -signal.SIGTERM
    finally:
        server.kill()
        server.wait()
