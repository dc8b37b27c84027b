"""Name and version of a server, its base model and its adapters, as it says them itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from experiments.harness.schema import ConfigError
from experiments.http_load.protocol import address, headers_of

PATIENCE_S = 10.0
"""Longest wait for an answer that needs no model."""
VERSIONS = (("/version", "version"), ("/get_server_info", "version"), ("/info", "version"))
"""Paths that tell a version, and its field: vLLM and this server, SGLang, LoRAX."""


@dataclass(frozen=True)
class Server:
    """A server under load; `base` is empty where /v1/models does not say which model has no adapter."""

    url: str
    name: str
    version: str
    base: str
    adapters: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".strip()


def look_up(url: str, key: str, name: str = "", adapters: Sequence[str] = ()) -> Server:
    """Ask the server at `url` for what it serves. `name` and `adapters` are what the user says instead, if anything.

    `ConfigError`: no answer, an error, or no word on which models are adapters.
    """
    url = address(url, "figure.url")
    with httpx2.Client(base_url=url, headers=headers_of(key), timeout=PATIENCE_S, trust_env=False) as client:
        response = _answer(client, "/v1/models")
        served = _models(response, url) if response.status_code != 404 or not adapters else []  # LoRAX has no list
        version = _version(client)
    listed = [str(model["id"]) for model in served]
    if served and (unknown := [one for one in adapters if one not in listed]):
        raise ConfigError(f"figure.adapters has {unknown[0]!r}, which {url} lacks: it lists {', '.join(listed)}")
    owner = str(served[0].get("owned_by") or "") if served else ""
    told = name or owner or response.headers.get("server", "") or "server"
    bases = [one for one in served if not one.get("parent")]
    base = str(bases[0]["id"]) if bases and bases[0]["id"] not in adapters else ""
    return Server(url, told, version, base, tuple(adapters) or _adapters(served, url))


def _answer(client: httpx2.Client, path: str) -> httpx2.Response:
    try:
        return client.get(path)
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        raise ConfigError(f"figure.url={client.base_url} does not answer ({error}): start the server first") from None


def _models(response: httpx2.Response, url: str) -> list[dict[str, Any]]:
    if response.status_code in (401, 403):
        raise ConfigError(f"{url} wants an API key (status {response.status_code}): give it by SERVER_API_KEY=...")
    try:
        found = response.raise_for_status().json()["data"]
        if all(isinstance(one["id"], str) for one in found):
            return list(found)
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{url}/v1/models answers {response.status_code} without a list of models: check figure.url, or name them with "
        "figure.adapters=[...]"
    )


def _adapters(served: Sequence[dict[str, Any]], url: str) -> tuple[str, ...]:
    """Return the models that have a parent."""
    found = tuple(str(one["id"]) for one in served if one.get("parent"))
    if found:
        return found
    names = ", ".join(str(one["id"]) for one in served)
    raise ConfigError(
        f"{url} lists no adapters (models with a parent), but {names or 'nothing'}: load some there, or name models "
        "with figure.adapters=[...]"
    )


def _version(client: httpx2.Client) -> str:
    """Return the version that one of `VERSIONS` tells, an empty text where none does."""
    for path, field in VERSIONS:
        try:
            response = client.get(path)
            found = response.json().get(field) if response.status_code == 200 else None
        except (httpx2.HTTPError, ValueError, AttributeError):
            continue
        if isinstance(found, str) and found:
            return found
    return ""
