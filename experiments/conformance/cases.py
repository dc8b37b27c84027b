"""The cases: requests over many adapters, each wave sent at once, every answer compared with the right tokens; and the
client that sends them by OpenAI's API, with adapters by model name.
"""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx2
from openai import APIError, AsyncOpenAI

from experiments.conformance.world import BASE, COUNT, MAX_LEN, POISONS, WARMER, Prompt, Tokens, World
from experiments.harness.schema import ConfigError
from experiments.servers.client import address

PASS, FAIL, UNJUDGED, NOT_OFFERED = "pass", "FAIL", "unjudged", "not offered"
"""Verdicts by tokens alone; unjudged: all that came were right, and some answers had none."""
SWAPPED = "swapped"  # name that different adapters are loaded under
CLOSED = (403, 404, 405)  # statuses of a server that does not let requests load adapters
KEY_VARIABLE = "CONFORMANCE_API_KEY"


class Ask(NamedTuple):
    """One request: the model whose tokens are right, and the name that it is served under where that is another."""

    model: str
    prompt: Prompt
    name: str = ""


@dataclass
class Result:
    """Outcome of a case: findings are of tokens; faults of the protocol, such as short answers, are counted apart."""

    case: str
    answers: int = 0
    judged: int = 0  # answers with tokens to judge
    findings: Counter[str] = field(default_factory=Counter)
    protocol: Counter[str] = field(default_factory=Counter)
    is_offered: bool = True

    @property
    def status(self) -> str:
        right = PASS if self.judged == self.answers else UNJUDGED
        return FAIL if self.findings else right if self.is_offered else NOT_OFFERED


class Run:
    """One server under test. ``base``: its name of the base model; ``prefix``: the text before an adapter's name."""

    def __init__(
        self, world: World, url: str, prefix: str = "", base: str = BASE, key: str | None = None, timeout: float = 60
    ) -> None:
        self.world, self.url, self.prefix, self.base = world, address(url, "url"), prefix, base
        self.models = world.models
        # idle connections end before the server's do; a proxy of the environment is not what is tested
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        http, where = httpx2.AsyncClient(limits=limits, trust_env=False), f"{self.url}/v1"
        self.api = AsyncOpenAI(api_key=key or "none", base_url=where, max_retries=0, timeout=timeout, http_client=http)
        self._turns = {model: itertools.cycle(world.sure(model)) for model in self.models}
        self._numbers = {model: itertools.count(place) for place, model in enumerate(self.models)}

    async def check(self) -> None:
        """Raise `ConfigError` where the server does not answer as every model."""
        for model in self.models:
            tokens, fault = await self.ask(model, self.world.prompts[0].text, 1)
            if not tokens:
                raise ConfigError(
                    f"url={self.url} does not answer as {self._name(model)} ({fault}): give http://HOST:PORT of a "
                    f"server that was started as make={self.world.folder} prints, its key as {KEY_VARIABLE}, and base= "
                    "and prefix= where models have other names there"
                )

    async def ask(
        self, model: str, prompt: str, count: int, stream: bool = False, leave_after: int | None = None
    ) -> tuple[Tokens, str]:
        """Ask for `count` greedy tokens; return what came, and the error on its way: kind, colon, words. With
        `leave_after`, close the stream after so many chunks.
        """
        text, fault, create = "", "", self.api.completions.create
        body: Any = {"model": self._name(model), "prompt": prompt, "max_tokens": count, "temperature": 0}
        try:
            if stream:
                async with await create(**body, stream=True) as chunks:
                    seen = 0
                    while seen != leave_after and (chunk := await anext(chunks, None)):
                        text, seen = text + "".join(one.text or "" for one in chunk.choices), seen + 1
            else:
                text = (await create(**body)).choices[0].text
        except (APIError, httpx2.HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
            kind = f"{type(error).__name__} {getattr(error, 'status_code', '')}"  # others have no form of OpenAI's API
            fault = f"{kind.strip()}: {str(error)[:200]}"
        return tuple(map(int, re.findall(r"w(\d+)", text or ""))), fault

    async def load(self, model: str, name: str = SWAPPED, in_place: bool = False) -> int:
        """Have the server load an adapter, in place of one of that name where it may; return the status."""
        fields = {"lora_name": name, "lora_path": str(self.world.adapter(model))}
        return await self._change("load_lora_adapter", fields | ({"load_inplace": True} if in_place else {}))

    async def unload(self, name: str = SWAPPED) -> int:
        return await self._change("unload_lora_adapter", {"lora_name": name})

    async def _change(self, path: str, fields: dict[str, Any]) -> int:
        """Post below `/v1` or not; return the status."""
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

    def asks(self, models: Iterable[str]) -> list[Ask]:
        return [Ask(model, next(self._turns[model])) for model in models]

    async def wave(self, result: Result, asks: Sequence[Ask]) -> None:
        """Send requests at once, every other one streamed, and judge them."""
        streamed = [next(self._numbers[ask.model]) % 2 == 0 for ask in asks]
        pairs = zip(asks, streamed, strict=True)
        sent = [self.ask(ask.name or ask.model, ask.prompt.text, COUNT, stream) for ask, stream in pairs]
        for ask, (tokens, error) in zip(asks, await asyncio.gather(*sent), strict=True):
            got, right = tokens[:COUNT], ask.prompt.answers[ask.model]
            is_wrong = got != right[: len(got)]
            length = f"an answer of {len(tokens)} tokens, not max_tokens" if len(tokens) != COUNT else ""
            fault = error.partition(":")[0] or length
            result.protocol.update([fault] * bool(fault))
            result.answers, result.judged = result.answers + 1, result.judged + (is_wrong or got == right)
            if is_wrong:
                owners = {tokens: model for model, tokens in ask.prompt.answers.items()}
                asked = f"{ask.name}, now {ask.model}" if ask.name else ask.model
                result.findings[f"{asked} got the tokens of {owners.get(got, 'no model')}"] += 1


Case = Callable[[Run, Result], Awaitable[None]]


def waves(models: Sequence[Sequence[str]]) -> Case:
    """Return the case of one wave after another, each of requests of these models."""

    async def sent(run: Run, result: Result) -> None:
        for wave in models:
            await run.wave(result, run.asks(wave))

    return sent


async def shared_prefix(run: Run, result: Result) -> None:
    """Send prompts with one long prefix: an adapter's, then all others', which must not get its blocks."""
    sharing = {model: run.world.sure(model, shares=True)[:3] for model in run.models}
    for model in (WARMER, *run.models):
        await run.wave(result, [Ask(model, sharing[model][0])])
    await run.wave(result, [Ask(model, prompt) for model, prompts in sharing.items() for prompt in prompts])


async def poisoned(run: Run, result: Result) -> None:
    """Requests of adapters of NaN, inf and huge weights beside others, then others alone, which alone are judged."""
    for name in POISONS:
        if await run.load(name, name) in CLOSED and not run.prefix:
            result.is_offered = False
            return
        spoil = [run.ask(name, run.world.prompts[0].text, 4 * COUNT, stream) for stream in (True, False) * 2]
        await asyncio.gather(*spoil, run.wave(result, run.asks(run.models)))
        await run.wave(result, run.asks(run.models))
        await run.unload(name)


async def cancelled(run: Run, result: Result) -> None:
    """Leave streams in the middle beside others that stay, and send requests after them."""
    for _ in range(2):
        leaving = [
            run.ask(ask.model, ask.prompt.text, MAX_LEN // 4, True, leave_after=number % 4)
            for number, ask in enumerate(run.asks(run.models))
        ]
        await asyncio.gather(*leaving, run.wave(result, run.asks(run.models)))
    await run.wave(result, run.asks(run.models * 2))


async def reloaded(run: Run, result: Result, in_place: bool = False) -> None:
    """Load two adapters in turn under one name, beside others, after unloading or in place; then unload the last."""
    pair = max(itertools.combinations(run.models[1:], 2), key=lambda pair: len(run.world.sure(*pair)))
    for place, model in enumerate(pair * 2):
        status = await run.unload() if place and not in_place else 200
        if status == 200:
            status = await run.load(model, in_place=in_place and place > 0)
        if status != 200:
            result.is_offered = not in_place and (status not in CLOSED or place > 0)
            result.protocol.update([f"a reload gave HTTP {status}"] * result.is_offered)
            return
        swapped = [Ask(model, prompt, SWAPPED) for prompt in (run.world.sure(*pair) or run.world.sure(model))[:4]]
        for wave in (*([ask] for ask in swapped), [*swapped, *run.asks(run.models)]):
            await run.wave(result, wave)
    await run.unload()
    tokens, _ = await run.ask(SWAPPED, run.world.prompts[0].text, COUNT)
    result.findings.update([f"{SWAPPED}, unloaded, got tokens"] * bool(tokens))


def cases(world: World, batches: Sequence[int]) -> dict[str, Case]:
    """Return the cases by name, in their order: the prefix cache is tried before its prompts were seen. With many
    adapters, where slots are fewer, each loses its own.
    """
    models, adapters = world.models, world.models[1:]
    few = adapters[:4]  # of other ranks and layers each
    orders = (adapters, adapters[::-1], adapters)
    return {
        "shared prefix": shared_prefix,
        "each alone": waves([[model] for model in models * 2]),
        "mixed batches": waves([
            models * 2, [*few, *few[::-1]] * 2, [name for one in adapters for name in (one, BASE)],
        ]),
        "many adapters": waves([wave for order in orders for wave in (*([name] for name in order), order)]),
        **{f"batch of {size}": waves([(models * size)[:size]]) for size in batches},
        "cancellation": cancelled,
        "hot reload": reloaded,
        "reload in place": partial(reloaded, in_place=True),
        "poisoned": poisoned,
    }  # fmt: skip
