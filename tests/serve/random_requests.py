"""Random requests to the server's API, over its own OpenAPI schema, and what is wrong with an answer."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CHUNK = 10
"""Calls of one example: Hypothesis takes longer to begin an example than the server to refuse a call."""
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


@contextmanager
def started(app: FastAPI) -> Iterator[Server]:
    """Start an application on a loop of its own; it is shut down with the block."""
    server, lifespan = Server(app), app.router.lifespan_context(app)
    server.loop.run_until_complete(lifespan.__aenter__())
    try:
        yield server
    finally:
        server.loop.run_until_complete(lifespan.__aexit__(None, None, None))
        server.loop.close()


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
    simple: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.integers(-2, 300), "number": st.floats(-2, 3), "boolean": st.booleans(), "null": st.none(),
        "string": st.text(max_size=12),
    }  # fmt: skip
    return simple.get(str(kind), JSON)


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
            paths = st.text(max_size=9).map(partial(path.replace, "{name}"))
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


def fault_of(status: int, content: bytes) -> str:
    """Return what is wrong with an answer: a server error, no error in OpenAI's form, a broken stream; else empty."""
    if not 200 <= status < 500:
        return f"status {status}: {content!r}"
    if status >= 400:
        error = json.loads(content)["error"]
        whole = set(error) == {"message", "type", "param", "code"} and error["message"]
        return "" if whole else f"an error of another form: {content!r}"
    if content.startswith(b"data: ") and not content.endswith(b"data: [DONE]\n\n"):
        return f"a stream without an end: {content!r}"
    return f"an error in a stream: {content!r}" if b'"type":"server_error"' in content else ""


def send(server: Server, count: int, first: int, expect: Callable[[bool, str], object]) -> Counter[int]:
    """Send ``count`` random calls, drawn from seed ``first``; ``expect`` gets each with its fault, if any.

    Returns the number of answers by status.
    """
    statuses: Counter[int] = Counter()

    @seed(first)
    @settings(max_examples=max(1, count // CHUNK), deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(requests_of(server.app), min_size=CHUNK, max_size=CHUNK))
    def run(calls: list[Any]) -> None:
        for method, path, body, headers in calls:
            status, content = server.call(method, path, body, headers)
            statuses[status] += 1
            fault = fault_of(status, content)
            expect(not fault, f"{method} {path} {body!r}: {fault}")

    run()
    return statuses
