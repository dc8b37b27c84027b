"""Ids of requests on answers of every kind: whole, streamed, refused, failed."""

import logging
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from fastapi.testclient import TestClient

from punica.serve import app as app_module

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CALLS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "whole": ("POST", "/v1/completions", {"json": BODY}, 200),
    "stream": ("POST", "/v1/completions", {"json": {**BODY, "stream": True}}, 200),
    "refused": ("POST", "/v1/completions", {"json": {**BODY, "n": 0}}, 400),
    "too large": ("POST", "/v1/completions", {"json": {**BODY, "prompt": "a" * (1 << 21)}}, 413),
    "no JSON": ("POST", "/v1/completions", {"content": "{", "headers": {"content-type": "application/json"}}, 400),
    "no model": ("POST", "/v1/completions", {"json": {**BODY, "model": "none"}}, 404),
    "no route": ("GET", "/nothing", {}, 404), "no method": ("GET", "/v1/completions", {}, 405),
    "load": ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "x", "lora_path": "/y"}}, 403),
    "health": ("GET", "/health", {}, 200), "head": ("HEAD", "/version", {}, 200),
    "metrics": ("GET", "/metrics", {}, 200),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_the_clients_id_comes_back(client: Any, kind: str) -> None:
    method, path, options, status = CALLS[kind]
    options = {**options, "headers": {**options.get("headers", {}), "X-Request-ID": "its/own-id_7"}}
    response = client.request(method, path, **options)
    assert response.status_code == status, response.text
    assert response.headers.get_list("x-request-id") == ["its/own-id_7"]


@pytest.mark.parametrize("given", [None, "", " ", "two words", "größe".encode(), b"a\x7f", "a" * 129], ids=repr)
def test_another_id_is_made_where_none_or_no_valid_one_comes(client: Any, given: Any) -> None:
    headers = {} if given is None else {"x-request-id": given}
    found = {client.get("/health", headers=headers).headers["x-request-id"] for _ in range(3)}
    assert len(found) == 3
    assert all(one.isalnum() and len(one) == 32 for one in found)
    assert client.get("/health", headers={"x-request-id": "a" * 128}).headers["x-request-id"] == "a" * 128


def test_an_internal_error_has_the_id_that_the_log_names(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app_module, "check_supported", fails)
    with TestClient(world.app(1)[1], raise_server_exceptions=False) as client, caplog.at_level(logging.ERROR):
        response = client.post("/v1/completions", json=BODY, headers={"x-request-id": "seven"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "seven")
    assert response.json()["error"]["type"] == "server_error"
    assert "request seven failed" in caplog.text
