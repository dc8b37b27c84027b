"""Client of OpenAI's API with adapters by model name: greedy completions as token ids, loading and unloading."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai import APIError, APIStatusError, AsyncOpenAI

from experiments.conformance.expected import BASE, Tokens, World
from experiments.harness.schema import ConfigError
from experiments.servers.client import address

KEY_VARIABLE = "CONFORMANCE_API_KEY"
TRIES, PAUSE_S = 60, 0.5  # of a full server (429); the retries of `openai` would hide other errors
_CHANGING = re.compile(r"[0-9a-f]{8}[0-9a-f-]*|(?<!HTTP )(?<!\d)\d+")


@dataclass
class Answer:
    """Text that came, and departures from the protocol on its way: one does not take the other away."""

    text: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        """Token ids of the text."""
        return tuple(map(int, re.findall(r"w(\d+)", self.text)))


class Server:
    """One server, and the names of the world's models on it: `base`, `prefix` and the adapter's name, else as listed.

    An adapter without `prefix` is the listed name that has its own as a word: ``org/tenant-1``, ``base:tenant-1``.
    """

    def __init__(
        self, url: str, prefix: str | None = None, base: str | None = None, key: str | None = None, timeout: float = 60
    ) -> None:
        self.url, self.prefix, self._base, self.takes_ids = address(url, "url"), prefix, base, False
        self._names, self._form = dict[str, str](), (prefix or "") + "{}"
        # idle connections end before the server's do; a proxy of the environment is not what is tested
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        http, where = httpx2.AsyncClient(limits=limits, trust_env=False), f"{self.url}/v1"
        self.api = AsyncOpenAI(api_key=key or "none", base_url=where, max_retries=0, timeout=timeout, http_client=http)

    def served(self, model: str) -> str:
        """Return a model's name on this server; an unlisted one's has the same text around as the first adapter's."""
        return self._names.get(model, self._form.replace("{}", model))

    async def check(self, world: World) -> dict[str, str]:
        """Find the models' names and whether prompts may be token ids; return the errors of models that are absent.

        Raises `ConfigError` where this is no such server, or it serves fewer than two adapters or not the base model.
        """
        listed, absent, prompt = list[str](), {}, world.prompts[0]
        try:
            response = await self.api.models.with_raw_response.list()
            listed = [str(model["id"]) for model in response.http_response.json()["data"]]
        except (APIError, ValueError, KeyError, TypeError) as error:
            status, text = _reason(error)
            if status != 404 or self.prefix is None:  # with `prefix` a server needs no list
                mend = f"give http://HOST:PORT of a server with OpenAI's API, and its key as {KEY_VARIABLE}"
                raise ConfigError(f"url={self.url} does not list its models ({text}): {mend}") from None
        for own in world.models[1:] if self.prefix is None else ():
            word = re.compile(rf"(?<![\w-]){re.escape(own)}(?![\w-])")
            found = [own] if own in listed else [name for name in listed if word.search(name)]
            if len(found) > 1:
                raise ConfigError(f"url={self.url} lists {some(found)}: give prefix=, the text before {own}")
            if found:
                self._form = self._form if self._names else found[0].replace(own, "{}", 1)
                self._names[own] = found[0]
        left = [name for name in listed if name not in self._names.values()]
        self._names[BASE] = self._base or (left[0] if len(left) == 1 else BASE)
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

    async def ask(
        self, model: str, prompt: str | list[int], count: int, stream: bool = False, leave_after: int | None = None
    ) -> Answer:
        """Ask for `count` greedy tokens; with `leave_after`, close the stream after so many chunks."""
        name = self.served(model)
        body = {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": stream}
        for left in reversed(range(TRIES)):
            answer = Answer()
            try:
                await self._ask(body, leave_after, answer)
            except (APIError, httpx2.HTTPError) as error:
                status, text = _reason(error)
                if status == 429 and left:
                    await asyncio.sleep(PAUSE_S)
                    continue
                answer.faults.append(text)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                answer.faults.append(f"no completion of OpenAI's form: {type(error).__name__} {error}")
            break
        answer.faults = [_CHANGING.sub("#", fault.replace(name, "MODEL")) for fault in answer.faults]
        return answer

    async def _ask(self, body: Any, leave_after: int | None, answer: Answer) -> None:
        """Read line by line into `answer`: neither a wrong type nor an odd event keeps other text from the judge."""
        async with self.api.completions.with_streaming_response.create(**body) as response:
            kind = response.headers.get("content-type", "none").partition(";")[0]
            if not body["stream"] or "json" in kind:
                answer.faults += ["a whole answer in place of a stream"] * body["stream"]
                answer.text = str(json.loads(await response.read())["choices"][0]["text"])
                return
            answer.faults += [f"a stream of content type {kind}"] * (kind != "text/event-stream")
            lines = (line.strip() async for line in response.iter_lines())
            events = (line[5:].strip() async for line in lines if line.startswith("data:") and line != "data:")
            seen = 0
            while seen != leave_after:
                data = await anext(events, None)
                if data is None:
                    answer.faults.append("the stream ended without [DONE]")
                if data is None or data == "[DONE]":
                    return
                seen += 1
                try:
                    answer.text += "".join(choice["text"] or "" for choice in json.loads(data)["choices"])
                except (ValueError, KeyError, TypeError):
                    what = "error in the stream" if "error" in data else "an event that is no chunk"
                    answer.faults.append(f"{what}: {data[:200]}")

    async def change(self, path: str, fields: dict[str, Any]) -> tuple[int, str]:
        """Post to `load_lora_adapter` or `unload_lora_adapter`, below `/v1` or not; return status and error."""
        for where in (f"{self.url}/v1/{path}", f"{self.url}/{path}"):
            try:
                await self.api.post(where, body=fields, cast_to=httpx2.Response)
                return 200, ""
            except APIError as error:
                status, text = _reason(error)
                if status not in (404, 405):
                    break
        return status, f"{path} gave {text}"


def _reason(error: Exception) -> tuple[int, str]:
    """Return status (0: no answer came) and text of an error."""
    if not isinstance(error, APIStatusError):
        cause = error.__cause__ or error
        return 0, f"{type(cause).__name__} {cause}".strip()
    body: Any = error.body if isinstance(error.body, dict) else {}
    text = body.get("message") or body.get("detail") or error.response.text
    return error.status_code, f"HTTP {error.status_code}: {str(text)[:200]}"


def some(names: Sequence[str], most: int = 5) -> str:
    """Join the first names; say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no model"
