"""Client of OpenAI's API with adapters by model name: greedy completions as token ids, loading and unloading."""

import re
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import APIError, AsyncOpenAI

from experiments.conformance.expected import BASE, Tokens, World
from experiments.harness.schema import ConfigError
from experiments.servers.client import address

KEY_VARIABLE = "CONFORMANCE_API_KEY"


@dataclass
class Answer:
    """Text that came, and the kind and words of an error on its way: one does not take the other away."""

    text: str = ""
    fault: str = ""
    detail: str = ""

    @property
    def tokens(self) -> Tokens:
        return tuple(map(int, re.findall(r"w(\d+)", self.text)))


class Server:
    """One server. `base`: its name of the base model; `prefix`: the text before an adapter's name."""

    def __init__(
        self, url: str, prefix: str = "", base: str = BASE, key: str | None = None, timeout: float = 60
    ) -> None:
        self.url, self.prefix, self.base, self.takes_ids = address(url, "url"), prefix, base, False
        # idle connections end before the server's do; a proxy of the environment is not what is tested
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        http, where = httpx2.AsyncClient(limits=limits, trust_env=False), f"{self.url}/v1"
        self.api = AsyncOpenAI(api_key=key or "none", base_url=where, max_retries=0, timeout=timeout, http_client=http)

    async def check(self, world: World) -> None:
        """Find out whether prompts may be token ids. `ConfigError`: the server does not answer as every model."""
        prompt = world.prompts[0]
        for model in world.models:
            answer = await self.ask(model, prompt.text, 1)
            if not answer.tokens:
                raise ConfigError(
                    f"url={self.url} does not answer as {self._name(model)} ({answer.fault} {answer.detail}): give "
                    f"http://HOST:PORT of a server that was started as make={world.folder} prints, its key as "
                    f"{KEY_VARIABLE}, and base= and prefix= where models have other names there"
                )
        self.takes_ids = bool((await self.ask(BASE, list(prompt.ids), 1)).tokens)

    async def ask(
        self, model: str, prompt: str | list[int], count: int, stream: bool = False, leave_after: int | None = None
    ) -> Answer:
        """Ask for `count` greedy tokens; with `leave_after`, close the stream after so many chunks."""
        answer, create = Answer(), self.api.completions.create
        body: Any = {"model": self._name(model), "prompt": prompt, "max_tokens": count, "temperature": 0}
        try:
            if not stream:
                answer.text = (await create(**body)).choices[0].text
                return answer
            async with await create(**body, stream=True) as chunks:
                seen = 0
                while seen != leave_after and (chunk := await anext(chunks, None)):
                    answer.text, seen = answer.text + "".join(one.text or "" for one in chunk.choices), seen + 1
        except (APIError, httpx2.HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
            status = getattr(error, "status_code", "")  # others have no form of OpenAI's API
            answer.fault, answer.detail = f"{type(error).__name__} {status}".strip(), str(error)[:200]
        return answer

    async def change(self, path: str, **fields: Any) -> int:
        """Post to `load_lora_adapter` or `unload_lora_adapter`, below `/v1` or not; return the status."""
        status = 0
        for where in (f"{self.url}/v1/{path}", f"{self.url}/{path}"):
            try:
                await self.api.post(where, body=fields, cast_to=httpx2.Response)
                return 200
            except APIError as error:
                status = int(getattr(error, "status_code", 0))
                if status not in (404, 405):
                    break
        return status

    def _name(self, model: str) -> str:
        return self.base if model == BASE else f"{self.prefix}{model}"
