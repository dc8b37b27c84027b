"""Random requests over the server's own OpenAPI schema: each is served, or refused in OpenAI's form; none is a 5xx."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serve.world import state_of

CHUNK = 10
"""Requests of one example: Hypothesis takes longer to begin an example than the server to refuse a request."""
OPTIONS: dict[str, Any] = {
    "deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
LIKELY = {
    "model": st.sampled_from(["tiny", "tenant-0", "tenant-2", "nobody"]), "max_tokens": st.integers(1, 3),
    "max_completion_tokens": st.integers(1, 3),
    "lora_path": st.sampled_from(["/", "..", "/etc", "~", "a\0b", "x" * 999]),
    "lora_name": st.sampled_from(["tenant-2", "new", "tiny", "a b"]), "n": st.integers(1, 3),
    "prompt": st.text(max_size=9) | st.lists(st.integers(0, 300), min_size=1, max_size=4), "stream": st.booleans(),
    "role": st.sampled_from(["user", "assistant", "system"]), "temperature": st.floats(0, 2),
    "seed": st.integers(0, 1 << 64), "content": st.text(max_size=9), "logprobs": st.booleans() | st.integers(0, 5),
}  # fmt: skip


class Server:
    """ASGI application on an event loop of its own, called without sockets."""

    def __init__(self, app: Any) -> None:
        self.app, self.loop = app, asyncio.new_event_loop()

    def call(self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        """Status and body of the answer."""
        return self.loop.run_until_complete(self._call(method, path, body, headers))

    async def _call(self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, "app": self.app,
            "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("y", 1), "root_path": "",
        }  # fmt: skip
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 0, []

        async def receive() -> Any:
            return incoming.pop() if incoming else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await asyncio.wait_for(self.app(scope, receive, send), 60)
        return status, b"".join(parts)


@pytest.fixture(scope="module")
def server(world: Any) -> Iterator[tuple[Any, Server]]:
    engine, app = world.app(3, {"max_model_len": 32}, roots=[world.checkpoint])
    made = Server(app)
    lifespan = app.router.lifespan_context(app)
    made.loop.run_until_complete(lifespan.__aenter__())
    yield engine, made
    made.loop.run_until_complete(lifespan.__aexit__(None, None, None))
    made.loop.close()


def values(schema: dict[str, Any], known: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Values that a schema allows, most of them within the ranges of ``LIKELY``."""
    if "$ref" in schema:
        return values(known[schema["$ref"].rpartition("/")[2]], known, name)
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of(*(values(one, known, name) for one in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {key: field(key, one, known) for key, one in schema["properties"].items()}
        needed = {key: fields.pop(key) for key in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=fields)
    if kind == "object":
        return st.dictionaries(st.text(max_size=4) | st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), known), min_size=schema.get("minItems", 0), max_size=4)
    simple = {
        "integer": st.integers(-2, 300), "number": st.floats(-2, 3), "boolean": st.booleans(), "null": st.none(),
        "string": st.text(max_size=12),
    }  # fmt: skip
    return simple.get(kind, JSON)


def field(name: str, schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a field: three in four likely where that is known, others by the schema or of any kind."""
    allowed = values(schema, known, name)
    likely = LIKELY.get(name, allowed)
    return st.integers(0, 15).flatmap(lambda draw: likely if draw < 12 else (allowed if draw < 15 else JSON))


def requests_of(app: Any) -> st.SearchStrategy[tuple[str, str, bytes, list[tuple[bytes, bytes]]]]:
    """Requests to all routes: method, path, body, headers."""
    schema = app.openapi()
    known, found = schema["components"]["schemas"], []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            bodies = st.just(b"") if content is None else values(content["schema"], known).map(encoded)
            mostly = bodies if content is None else st.one_of(bodies, bodies, bodies, JSON.map(encoded), st.binary())
            paths = st.text(max_size=9).map(lambda name, path=path: path.replace("{name}", name))
            one = st.tuples(st.just(method.upper()), paths, mostly, headers())
            found += [one] * (8 if content is not None and "lora" not in path else 1)
    return st.one_of(*found)


def headers() -> st.SearchStrategy[list[tuple[bytes, bytes]]]:
    json_type = (b"content-type", b"application/json")
    others = st.tuples(st.sampled_from([b"authorization", b"content-type", b"content-length"]), st.binary(max_size=9))
    return st.sampled_from([[json_type]] * 9 + [[]]).flatmap(lambda known: st.lists(others, max_size=1).map(
        lambda more: known + more if more and more[0][0] != b"content-type" else known or more
    ))  # fmt: skip


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def check(answer: tuple[int, bytes], path: str) -> None:
    status, content = answer
    assert 200 <= status < 500, (path, status, content)
    if status >= 400:
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif content.startswith(b"data: "):
        assert content.endswith(b"data: [DONE]\n\n")
        assert b'"type":"server_error"' not in content


def fuzz(server: Any, count: int) -> dict[int, int]:
    """Send ``count`` requests; the number of answers by status."""
    engine, client = server
    before, statuses = state_of(engine), {}

    @settings(max_examples=count // CHUNK, **OPTIONS)
    @given(st.lists(requests_of(client.app), min_size=CHUNK, max_size=CHUNK))
    def run(requests: list[Any]) -> None:
        for method, path, body, sent in requests:
            answer = client.call(method, path, body, sent)
            statuses[answer[0]] = statuses.get(answer[0], 0) + 1
            check(answer, path)

    run()
    after = state_of(engine)
    assert {**after, "adapters": set()} == {**before, "adapters": set()}
    assert sum(statuses.values()) >= count
    return statuses


def test_some_random_requests_are_served_or_refused(server: Any) -> None:
    statuses = fuzz(server, 100)
    assert {200, 400, 404} <= set(statuses)


@pytest.mark.slow
def test_ten_thousand_random_requests_are_served_or_refused(server: Any) -> None:
    statuses = fuzz(server, 10_000)
    print(statuses)
    assert statuses[200] > 1000
    assert statuses[400] > 1000
