"""Random requests over the server's own OpenAPI schema: each is served, or refused in OpenAI's form; none is a 5xx."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")

from experiments.reliability.api import Server, fault_of, send, started
from experiments.reliability.trial import Outcome
from tests.serve.world import state_of


@pytest.fixture(scope="module")
def server(world: Any) -> Iterator[tuple[Any, Server]]:
    engine, app = world.app(3, {"max_model_len": 32}, roots=[world.checkpoint])
    with started(app) as made:
        yield engine, made


def fuzz(server: Any, count: int) -> Counter[int]:
    """Send ``count`` requests; the number of answers by status."""
    engine, client = server
    before, outcome = state_of(engine), Outcome()
    statuses = send(client, count, 0, outcome)
    assert outcome.notes == []
    assert outcome.tried == outcome.survived == sum(statuses.values()) >= count
    after = state_of(engine)
    assert {**after, "adapters": set()} == {**before, "adapters": set()}
    return statuses


@pytest.mark.slow
def test_some_random_requests_are_served_or_refused(server: Any) -> None:
    statuses = fuzz(server, 100)
    assert {200, 400, 404} <= set(statuses)


@pytest.mark.slow
def test_ten_thousand_random_requests_are_served_or_refused(server: Any) -> None:
    statuses = fuzz(server, 10_000)
    print(statuses)
    assert statuses[200] > 1000
    assert statuses[400] > 1000


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
