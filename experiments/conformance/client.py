"""Client of OpenAI's API with adapters by model name: greedy completions as token ids, loading and unloading."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from experiments.conformance.expected import Tokens, World
from experiments.conformance.oracle import BASE
from experiments.harness.schema import ConfigError
from experiments.http_load.protocol import address, headers_of

KEY_VARIABLE = "CONFORMANCE_API_KEY"
"""Environment variable with the API key."""
TRIES, PAUSE_S = 60, 0.5
"""A full server (429) is asked again so often, after such pauses."""
_WORD = re.compile(r"w(\d+)")
_CHANGING = re.compile(r"[0-9a-f]{8}[0-9a-f-]*|(?<!HTTP )(?<!\d)\d+")


@dataclass
class Answer:
    """Text that came, and departures from the protocol on its way: one does not take the other away."""

    text: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        """Token ids of the text."""
        return tuple(map(int, _WORD.findall(self.text)))


class Server:
    """One server, and the names of the world's models on it: `base`, `prefix` and the adapter's name, else as listed.

    An adapter without `prefix` is the listed name that has its own as a word: ``org/tenant-1``, ``base:tenant-1``.
    """

    def __init__(
        self, url: str, prefix: str | None = None, base: str | None = None, key: str | None = None, timeout: float = 60
    ) -> None:
        # idle connections end before the server's do; a proxy of the environment is not what is tested
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        self.url, self.prefix, self._base = address(url, "url"), prefix, base
        self.takes_ids = False
        self._names: dict[str, str] = {}
        self._around = (prefix or "", "")
        self._http = httpx2.AsyncClient(headers=headers_of(key or ""), limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def served(self, model: str) -> str:
        """Return a model's name on this server; a later one's has the same text around as the first adapter's."""
        before, after = self._around
        return self._names.get(model, f"{before}{model}{after}")

    async def check(self, world: World) -> dict[str, str]:
        """Find the models' names and whether prompts may be token ids; return the errors of models that are absent.

        Raises `ConfigError` where this is no such server, or it serves fewer than two adapters or not the base model.
        """
        listed = await self._listed()
        self._find(world, listed)
        prompt, absent = world.prompts[0], {}
        for model in world.models:
            answer = await self.ask(model, prompt.text, 1)
            if not answer.tokens:
                absent[model] = ", ".join(answer.faults) or "no tokens"
        if BASE in absent or len(world.models) - len(absent) < 3:
            names, why = [self.served(model) for model in absent], next(iter(absent.values()))
            raise ConfigError(
                f"url={self.url} lists {some(listed)}, and does not answer as {some(names)} ({why}): start it as "
                f"make={world.folder} prints, or give its names: base= of the base model, prefix= before adapters'"
            )
        self.takes_ids = bool((await self.ask(BASE, list(prompt.ids), 1)).tokens)
        return absent

    def _find(self, world: World, listed: Sequence[str]) -> None:
        left = [*listed]
        for tenant in world.tenants if self.prefix is None else ():
            word = re.compile(rf"(?<![\w-]){re.escape(tenant.name)}(?![\w-])")
            found = [name for name in listed if name == tenant.name] or [name for name in listed if word.search(name)]
            if len(found) > 1:
                raise ConfigError(f"url={self.url} lists {some(found)}: give prefix=, the text before {tenant.name}")
            if found:
                self._names[tenant.name] = found[0]
                left.remove(found[0])
        for own, name in list(self._names.items())[:1]:
            self._around = (name.partition(own)[0], name.partition(own)[2])
        self._names[BASE] = self._base or (left[0] if len(left) == 1 and BASE not in left else BASE)

    async def _listed(self) -> list[str]:
        """Return the names in `/v1/models`, none where a server with `prefix` has no such list."""
        try:
            answer = await self._http.get(f"{self.url}/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            text = str(error) or type(error).__name__
            raise ConfigError(f"url={self.url} cannot be reached ({text}): give http://HOST:PORT of a server") from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"url={self.url} wants an API key (HTTP {answer.status_code}): set {KEY_VARIABLE}")
        if answer.status_code == 404 and self.prefix is not None:
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
        name = self.served(model)
        body = {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": stream}
        for _ in range(TRIES):
            answer = Answer()
            try:
                await self._ask(body, leave_after, answer)
            except httpx2.HTTPError as error:
                answer.faults.append(f"{type(error).__name__} {error}".strip())
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                answer.faults.append(f"no completion of OpenAI's form: {type(error).__name__} {error}")
            if not any(fault.startswith("HTTP 429") for fault in answer.faults):
                break
            await asyncio.sleep(PAUSE_S)
        answer.faults = [_CHANGING.sub("#", fault.replace(name, "MODEL")) for fault in answer.faults]
        return answer

    async def _ask(self, body: Mapping[str, Any], leave_after: int | None, answer: Answer) -> None:
        """Read into `answer`, whose text stays when the rest cannot be read."""
        async with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.faults.append(_refusal(response.status_code, await response.aread()))
            elif not body["stream"] or "json" in response.headers.get("content-type", ""):
                answer.faults += ["a whole answer in place of a stream"] * body["stream"]
                await response.aread()
                answer.text = response.json()["choices"][0]["text"]
            elif leave_after != 0:
                await _read_stream(response, leave_after, answer)

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


async def _read_stream(response: httpx2.Response, leave_after: int | None, answer: Answer) -> None:
    """Add the chunks of a stream, line by line: neither a wrong type nor an odd event keeps the text from the judge."""
    kind = response.headers.get("content-type", "none").partition(";")[0]
    if kind != "text/event-stream":
        answer.faults.append(f"a stream of content type {kind}")
    seen = 0
    async for line in response.aiter_lines():
        name, _, data = line.partition(":")
        data = data.strip()
        if name != "data" or not data:
            continue
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
            answer.text += "".join(choice["text"] or "" for choice in chunk["choices"])
        except (ValueError, KeyError, TypeError):
            kind = "error in the stream" if "error" in data else "an event that is no chunk"
            answer.faults.append(f"{kind}: {data[:200]}")
        seen += 1
        if seen == leave_after:
            return
    answer.faults.append("the stream ended without [DONE]")


def _refusal(status: int, body: bytes) -> str:
    """Word an answer that is no completion."""
    try:
        content = json.loads(body)
        error = content.get("error", content.get("detail", content))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return f"HTTP {status}: {text[:200]}"


def some(names: Sequence[str], most: int = 5) -> str:
    """Join the first names; say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no model"
