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

from experiments.conformance.expected import BASE, COUNT, WARMER, Prompt, Tokens, World
from experiments.conformance.weights import MAX_LEN, POISONS
from experiments.harness.schema import ConfigError
from experiments.servers.client import address

PASS, FAIL, UNJUDGED, NOT_OFFERED = "pass", "FAIL", "unjudged", "not offered"
"""Verdicts by tokens alone; unjudged: all that came were right, and some answers had none."""
SHORT, LONG = "an answer of fewer tokens than max_tokens, right so far", "an answer of more tokens than max_tokens"
SWAPPED = "swapped"  # name that different adapters are loaded under
CLOSED = (403, 404, 405)  # statuses of a server that does not let requests load adapters
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


class Ask(NamedTuple):
    """One request: the model whose tokens are right, and the name that it is served under where that is another."""

    model: str
    prompt: Prompt
    name: str = ""

    @property
    def right(self) -> Tokens:
        return self.prompt.answers[self.model]


@dataclass
class Result:
    """Outcome of a case: findings are of tokens, and faults of the protocol are counted apart."""

    case: str
    answers: int = 0
    judged: int = 0  # answers with tokens to judge
    findings: Counter[str] = field(default_factory=Counter)
    protocol: Counter[str] = field(default_factory=Counter)
    is_offered: bool = True

    @property
    def status(self) -> str:
        """Verdict by tokens alone."""
        right = PASS if self.judged == self.answers else UNJUDGED
        return FAIL if self.findings else right if self.is_offered else NOT_OFFERED


class Run:
    """One server under test."""

    def __init__(self, server: Server, world: World) -> None:
        self.server, self.world, self.models, self.adapters = server, world, world.models, world.models[1:]
        about = {tenant.name: f"{tenant.name} (rank {tenant.rank}, {tenant.subset})" for tenant in world.tenants}
        self._about = {BASE: "the base model", **about}
        self._owners = {tokens: model for prompt in world.prompts for model, tokens in prompt.answers.items()}
        self._turns = {model: itertools.cycle(world.sure(model)) for model in self.models}
        self._numbers = {model: itertools.count(place) for place, model in enumerate(self.models)}

    def asks(self, models: Iterable[str]) -> list[Ask]:
        """Build a request for each name, with the model's next prompt."""
        return [Ask(model, next(self._turns[model])) for model in models]

    async def wave(self, result: Result, asks: Sequence[Ask]) -> list[Tokens]:
        """Send requests at once, every other one streamed, every third as text, and judge them; return the tokens."""
        sent, tokens = [], []
        for ask, number in ((ask, next(self._numbers[ask.model])) for ask in asks):
            prompt = list(ask.prompt.ids) if self.server.takes_ids and number % 3 else ask.prompt.text
            sent.append(self.server.ask(ask.name or ask.model, prompt, COUNT, number % 2 == 0))
        for place, (ask, answer) in enumerate(zip(asks, await asyncio.gather(*sent), strict=True)):
            got = answer.tokens[:COUNT]
            is_wrong, is_right = got != ask.right[: len(got)], got == ask.right
            fault = answer.fault or (LONG if answer.tokens != got else "" if is_wrong or is_right else SHORT)
            result.protocol.update([fault] * bool(fault))
            result.answers, result.judged = result.answers + 1, result.judged + (is_wrong or is_right)
            if is_wrong:
                owner = self._owner(ask, got, [*asks[:place], *asks[place + 1 :]])
                result.findings[f"{self.label(ask)} got {owner}"] += 1
            tokens.append(got)
        return tokens

    def label(self, ask: Ask) -> str:
        return f"{ask.name}, now {self._about[ask.model]}" if ask.name else self._about[ask.model]

    def _owner(self, ask: Ask, got: Tokens, beside: Sequence[Ask]) -> str:
        """Describe whose tokens a wrong answer has: the first that fits, from the same prompt to any other."""
        owners = {tokens: f"the tokens of {self._about[model]}" for model, tokens in ask.prompt.answers.items()}
        leaked = ask.prompt.leaked.get(ask.model, ())
        owners.setdefault(leaked, f"its own tokens over the cached prefix of {self._about[WARMER]}")
        for other in beside:
            owners.setdefault(other.right, f"the tokens of {self.label(other)} in a request beside it")
            # at least two tokens are the other's, and all that are not its own
            foreign = [one == their for one, own, their in zip(got, ask.right, other.right, strict=False) if one != own]
            if len(foreign) >= 2 and all(foreign):
                owners.setdefault(got, f"tokens of {self.label(other)} in a request beside it, between its own")
        if got in self._owners:
            owners.setdefault(got, f"the tokens of {self._about[self._owners[got]]} for another prompt")
        return owners.get(got, f"{len(got)} tokens of no known model")

    async def load(self, model: str, name: str = SWAPPED, in_place: bool = False) -> int:
        """Have the server load an adapter, in place of one of that name where it may; return the status."""
        fields = {"lora_name": name, "lora_path": str(self.world.adapter(model))}
        return await self.server.change("load_lora_adapter", **fields, **({"load_inplace": True} if in_place else {}))

    async def unload(self, name: str = SWAPPED) -> int:
        return await self.server.change("unload_lora_adapter", lora_name=name)


Case = Callable[[Run, Result], Awaitable[None]]


def waves(models: Callable[[Run], Iterable[Iterable[str]]]) -> Case:
    """Return the case of one wave after another, each of requests of these models."""

    async def sent(run: Run, result: Result) -> None:
        for wave in models(run):
            await run.wave(result, run.asks(wave))

    return sent


def _mixed(run: Run) -> Iterable[list[str]]:
    """Yield all models twice, an adapter of each rank and of each subset of layers, and the base between adapters."""
    yield run.models * 2
    for quality in ("rank", "subset"):
        each = [*{getattr(tenant, quality): tenant.name for tenant in run.world.tenants}.values()]
        yield [*each, *each[::-1]] * 2
    yield [name for adapter in run.adapters for name in (adapter, BASE)]


def _at_once(size: int, run: Run) -> list[list[str]]:
    return [(run.models * size)[:size]]


def _many(run: Run) -> Iterable[list[str]]:
    """Yield all adapters, alone and at once, forwards and backwards: where slots are fewer, each loses its own."""
    for order in (run.adapters, run.adapters[::-1], run.adapters):
        yield from ([name] for name in order)
        yield order


async def repeated(run: Run, result: Result) -> None:
    """Send one wave three times, and find answers that change, right or wrong."""
    asks = run.asks(run.models * 2)
    for ask, *answers in zip(asks, *[await run.wave(result, asks) for _ in range(3)], strict=True):
        if len({tokens for tokens in answers if len(tokens) == COUNT}) > 1:
            result.findings[f"{run.label(ask)} got other tokens from run to run"] += 1


async def shared_prefix(run: Run, result: Result) -> None:
    """Send prompts with one long prefix: an adapter's, then all others', which must not get its blocks."""
    sharing = {model: run.world.sure(model, shares=True)[:3] for model in run.models}
    for model in (WARMER, *run.models):
        await run.wave(result, [Ask(model, sharing[model][0])])
    await run.wave(result, [Ask(model, prompt) for model, prompts in sharing.items() for prompt in prompts])


async def poisoned(run: Run, result: Result) -> None:
    """Requests of adapters of NaN, inf and huge weights beside others, then others alone, which alone are judged."""
    for name in POISONS:
        if await run.load(name, name) in CLOSED and not run.server.prefix:
            result.is_offered = False
            return
        spoil = [run.server.ask(name, run.world.prompts[0].text, 4 * COUNT, stream) for stream in (True, False) * 2]
        await asyncio.gather(*spoil, run.wave(result, run.asks(run.models)))
        await run.wave(result, run.asks(run.models))
        await run.unload(name)


async def cancelled(run: Run, result: Result) -> None:
    """Leave streams in the middle beside others that stay, and send requests after them."""
    for _ in range(2):
        leaving = [
            run.server.ask(ask.model, ask.prompt.text, MAX_LEN // 4, True, leave_after=number % 4)
            for number, ask in enumerate(run.asks(run.models))
        ]
        await asyncio.gather(*leaving, run.wave(result, run.asks(run.models)))
    await run.wave(result, run.asks(run.models * 2))


async def reloaded(run: Run, result: Result, in_place: bool = False) -> None:
    """Load two adapters in turn under one name, beside others, after unloading or in place; then unload the last."""
    pairs = itertools.combinations(run.adapters, 2)
    common = {pair: [one for one in run.world.prompts if not one.leaked and {*pair} <= {*one.sure}] for pair in pairs}
    pair = max(common, key=lambda pair: len(common[pair]))
    for place, model in enumerate(pair * 2):
        status = await run.unload() if place and not in_place else 200
        if status == 200:
            status = await run.load(model, in_place=in_place and place > 0)
        if status != 200:
            result.is_offered = not in_place and (status not in CLOSED or place > 0)
            result.protocol.update([f"a reload gave HTTP {status}"] * result.is_offered)
            return
        swapped = [Ask(model, prompt, SWAPPED) for prompt in (common[pair] or run.world.sure(model))[:4]]
        for wave in (*([ask] for ask in swapped), [*swapped, *run.asks(run.models)]):
            await run.wave(result, wave)
    await run.unload()
    answer = await run.server.ask(SWAPPED, run.world.prompts[0].text, COUNT)
    result.findings.update([f"{SWAPPED}, unloaded, got tokens"] * bool(answer.tokens))


def cases(batches: Sequence[int]) -> dict[str, Case]:
    """Return the cases by name, in their order: the prefix cache is tried before its prompts were seen."""
    large = {f"batch of {size}": waves(partial(_at_once, size)) for size in batches}
    return {
        "shared prefix": shared_prefix, "each alone": waves(lambda run: ([model] for model in run.models * 2)),
        "mixed batches": waves(_mixed), "many adapters": waves(_many), "repeated runs": repeated, **large,
        "cancellation": cancelled, "hot reload": reloaded, "reload in place": partial(reloaded, in_place=True),
        "poisoned": poisoned,
    }  # fmt: skip
