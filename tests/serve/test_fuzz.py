"""Random requests over the server's own OpenAPI schema: each is served, or refused in OpenAI's form; none is a 5xx."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")

from tests.serve.random_requests import Server, fault_of, send, started
from tests.serve.world import state_of


@pytest.fixture(scope="module")
def server(world: Any) -> Iterator[tuple[Any, Server]]:
    engine, app = world.app(3, {"max_model_len": 32}, roots=[world.checkpoint])
    with started(app) as made:
        yield engine, made


@pytest.mark.slow
def test_random_requests_are_served_or_refused(server: Any) -> None:
    """A tenth of what the trial `api_bodies` of `tests/reliability` sends."""
    engine, client = server
    before = state_of(engine)
    faults: list[str] = []
    statuses = send(client, 100, 0, lambda held, note: held or faults.append(note))
    assert faults == []
    assert {200, 400, 404} <= set(statuses)
    assert {**state_of(engine), "adapters": set()} == {**before, "adapters": set()}


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (500, b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'),
        (400, b'{"error": {"message": "m"}}'),
        (404, b'{"error": {"message": "", "type": "t", "param": null, "code": null}}'),
        (200, b"data: {}\n\n"),
        (200, b'data: {"error":{"type":"server_error"}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_wrong_answers_are_told(status: int, content: bytes) -> None:
    assert fault_of(status, content)
