"""Clients that leave, a server that is full, an engine that fails: nothing is kept, others are served."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from punica.engine import Request, SamplingParams
from punica.serve.backend import Call
from punica.serve.errors import ApiError
from tests.serve.world import EngineThread, served, state_of, wait_until


@pytest.fixture(scope="module")
def running(world: Any) -> Iterator[Any]:
    """Engine and address of a real server with room for four generations, two of them in a step."""
    engine, app = world.app(2, {"max_batch_size": 2}, max_queue=2)
    with served(app) as url:
        yield engine, url


def ask(url: str, **fields: Any) -> socket.socket:
    """Send a completion that takes the whole context; its connection."""
    body = json.dumps({"model": "tenant-0", "prompt": "a", "ignore_eos": True, "max_tokens": 120, **fields}).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + body)
    return connection


def in_engine(engine: Any) -> int:
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_running_or_waiting(running: Any, stream: bool) -> None:
    engine, url = running
    before = state_of(engine)
    connections = [ask(url, stream=stream) for _ in range(4)]
    wait_until(lambda: in_engine(engine) == 4)
    for connection in connections:
        connection.close()
    wait_until(lambda: state_of(engine) == before)
    metrics = httpx2.get(f"{url}/metrics").text
    assert 'punica_requests_total{reason="aborted"}' in metrics
    assert "\npunica_requests_running 0.0\n" in metrics


def test_a_client_that_leaves_in_the_middle_of_its_body(running: Any) -> None:
    engine, url = running
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert in_engine(engine) == 0


def test_a_full_server_answers_429_until_there_is_room(running: Any) -> None:
    engine, url = running
    connections = [ask(url, stream=True) for _ in range(3)]
    wait_until(lambda: in_engine(engine) == 3)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "n": 2}
    answer = httpx2.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 'punica_rejected_total{status="429"}' in httpx2.get(f"{url}/metrics").text
    for connection in connections:
        connection.close()
    wait_until(lambda: httpx2.post(f"{url}/v1/completions", json=body).status_code == 200)
    assert httpx2.post(f"{url}/v1/completions", json={**body, "n": 5}).json()["error"]["param"] == "n"


@pytest.mark.parametrize("given_up", [False, True], ids=["its client leaves", "the engine is given up"])
def test_a_request_that_the_engine_lost_does_not_end_the_server(world: Any, given_up: bool) -> None:
    """It failed in a step that raised, so the engine has let it go and the thread still counts it."""
    engine = world.engine(2)

    async def run() -> None:
        thread = EngineThread(engine)
        params = SamplingParams(6, ignore_eos=True)
        lost, kept = (Call([Request(name, [1], params)], False) for name in ("lost", "kept"))
        step, raised = engine.step, []

        def losing() -> Any:
            if not raised:
                engine.abort_request("lost")  # gone, without a result that the thread sees
            if not raised or (given_up and len(raised) < 2):
                raised.append(True)
                raise RuntimeError("injected")
            return step()

        engine.step = losing
        thread.start()
        try:
            await asyncio.gather(thread.submit(lost), thread.submit(kept))
            if given_up:
                for call in (lost, kept):
                    with pytest.raises(ApiError, match="the engine failed: RuntimeError: injected"):
                        [piece async for pieces in call.batches() for piece in pieces]
            else:
                while not raised:  # an abort before the first step would take it out of the engine itself
                    await asyncio.sleep(0.001)
                thread.abort(lost)
                pieces = [piece async for batch in kept.batches() for piece in batch]
                assert len(pieces[-1].token_ids) == 6
            later = Call([Request("lost", [1], SamplingParams(3, ignore_eos=True))], False)  # its name is free
            await thread.submit(later)
            assert [len(piece.token_ids) async for batch in later.batches() for piece in batch] == [3]
            assert thread.health == "ok"
        finally:
            await thread.stop()

    try:
        asyncio.run(run())
    finally:
        del engine.step
    assert not engine.has_unfinished()
