"""Client of OpenAI's API with adapters by model name: greedy completions as token ids, loading and unloading."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from experiments.conformance.expected import Tokens, World
from experiments.conformance.oracle import BASE
from experiments.harness.schema import ConfigError
from experiments.http_load.protocol import BrokenStream, ErrorInStream, address, chunks, headers_of

KEY_VARIABLE = "CONFORMANCE_API_KEY"
"""Environment variable with the API key."""
TRIES, PAUSE_S = 60, 0.5
"""A full server (429) is asked again so often, after such pauses."""
_WORD = re.compile(r"w(\d+)")


@dataclass(frozen=True)
class Answer:
    """Token ids of an answer, or the error that came in its place; ids before an error in a stream are kept."""

    tokens: Tokens
    error: str = ""


class Server:
    """One server. `prefix` comes before the names of adapters, `base` is the base model's name there."""

    def __init__(
        self, url: str, prefix: str = "", base: str = BASE, key: str | None = None, timeout: float = 60
    ) -> None:
        # idle connections end before the server's do; a proxy of the environment is not what is tested
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        self.url, self.prefix, self._base = address(url, "url"), prefix, base
        self.takes_ids = False
        self._http = httpx2.AsyncClient(headers=headers_of(key or ""), limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def served(self, model: str) -> str:
        """Return a model's name on this server."""
        return self._base if model == BASE else self.prefix + model

    async def check(self, world: World) -> None:
        """Ask for the list of models and two completions, and find out whether prompts may be token ids.

        Raises `ConfigError` where this is no such server, or it does not serve the world's models.
        """
        listed = await self._listed()
        missing = [name for name in world.models if self.served(name) not in listed]
        if missing and not self.prefix:
            raise ConfigError(
                f"url={self.url} serves {_some(listed)}, but not {_some(missing)}: start it as make={world.folder} "
                "prints; servers that list no adapters need prefix=, another base model's name base="
            )
        prompt = world.prompts[0]
        for model in (BASE, world.tenants[0].name):
            answer = await self.ask(model, prompt.text, 1)
            if answer.error:
                raise ConfigError(f"url={self.url} does not answer as model {self.served(model)!r}: {answer.error}")
        self.takes_ids = not (await self.ask(BASE, list(prompt.ids), 1)).error

    async def _listed(self) -> list[str]:
        """Return the names in `/v1/models`, none where a server with `prefix` has no such list."""
        try:
            answer = await self._http.get(f"{self.url}/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            text = str(error) or type(error).__name__
            raise ConfigError(f"url={self.url} cannot be reached ({text}): give http://HOST:PORT of a server") from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"url={self.url} wants an API key (HTTP {answer.status_code}): set {KEY_VARIABLE}")
        if answer.status_code == 404 and self.prefix:
            return []
        try:
            return [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            status = answer.status_code
            raise ConfigError(f"url={self.url} is no server of OpenAI's API: /v1/models gave HTTP {status}") from None

    async def ask(
        self, model: str, prompt: str | list[int], count: int, stream: bool = False, leave_after: int | None = None
    ) -> Answer:
        """Ask for `count` greedy tokens; with `leave_after`, close the stream after so many chunks."""
        body = {"model": self.served(model), "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": stream}
        try:
            for _ in range(TRIES):
                answer = await self._ask(body, leave_after)
                if not answer.error.startswith("HTTP 429"):
                    break
                await asyncio.sleep(PAUSE_S)
            return answer
        except (httpx2.HTTPError, httpx2.SSEError) as error:
            return Answer((), f"{type(error).__name__} {error}".strip())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return Answer((), f"no completion of OpenAI's form: {type(error).__name__} {error}")

    async def _ask(self, body: Mapping[str, Any], leave_after: int | None) -> Answer:
        async with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return Answer((), _refusal(answer.status_code, await answer.aread()))
            if not body["stream"]:
                await answer.aread()
                return Answer(_tokens(answer.json()["choices"][0]["text"]))
            text, seen = "", 0
            if leave_after == 0:
                return Answer(())
            try:
                async for chunk in chunks(answer):
                    text, seen = text + "".join(choice["text"] for choice in chunk["choices"]), seen + 1
                    if seen == leave_after:
                        break
            except ErrorInStream as error:
                return Answer(_tokens(text), f"error in the stream: {error}")
            except BrokenStream as error:
                return Answer(_tokens(text), str(error))
            return Answer(_tokens(text))

    async def change(self, path: str, **fields: Any) -> tuple[int, str]:
        """Post to `load_lora_adapter` or `unload_lora_adapter`, below `/v1` or not; status and text of the answer."""
        status, text = 404, ""
        for where in (f"{self.url}/v1/{path}", f"{self.url}/{path}"):
            try:
                answer = await self._http.post(where, json=fields)
            except httpx2.HTTPError as error:
                return 0, f"{type(error).__name__} {error}"
            status, text = answer.status_code, answer.text
            if status not in (404, 405):
                break
        return status, text[:300]


def _tokens(text: str) -> Tokens:
    return tuple(map(int, _WORD.findall(text)))


def _refusal(status: int, body: bytes) -> str:
    """Word an answer that is no completion."""
    try:
        content = json.loads(body)
        error = content.get("error", content)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return f"HTTP {status}: {text[:200]}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no model"
