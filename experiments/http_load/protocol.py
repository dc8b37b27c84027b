"""Address, key and streams of OpenAI's API."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx2

from experiments.harness.schema import ConfigError

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it reports every request


class BrokenStream(Exception):
    """Error for a stream that ends without ``[DONE]``, or has another thing than JSON objects."""


class ErrorInStream(Exception):
    """Error that a server sent in place of a chunk."""


def address(url: str, option: str) -> str:
    """Return `url` without a final slash and /v1. `ConfigError`: not http, or with a password, which would be stored.

    `option`: name of the command line's option, for the message.
    """
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address of IPv6, or a port that is no number
        is_whole = False
    if not is_whole:
        raise ConfigError(f"{option}={url!r} must be an address like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError(f"{option} has a user or a password in it: give the key by the environment instead")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def headers_of(key: str) -> dict[str, str]:
    """Return the headers that carry an API key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def chunks(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer to its end. `BrokenStream`, `ErrorInStream`, and httpx2's errors."""
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            return
        try:
            chunk = json.loads(event.data)
        except ValueError:
            raise BrokenStream(event.data) from None
        if not isinstance(chunk, dict):
            raise BrokenStream(event.data)
        if chunk.get("error"):
            raise ErrorInStream(event.data)
        yield chunk
    raise BrokenStream("the stream ended without [DONE]")
