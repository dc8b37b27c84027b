"""The cases: requests over many adapters, each wave sent at once, every answer compared with the right tokens."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.conformance.client import Answer, Server
from experiments.conformance.expected import COUNT, World
from experiments.conformance.oracle import BASE
from experiments.conformance.verdict import EMPTY, Ask, Judge, Result
from experiments.conformance.weights import MAX_LEN, POISONS, WARMER

SWAPPED = "swapped"
"""Name that different adapters are loaded under."""
CLOSED = (403, 404, 405)
"""Statuses of a server that does not let requests load adapters."""
LONG = MAX_LEN // 4
"""Tokens of requests whose clients leave."""


class Run:
    """One server under test. `absent`: errors of models that it does not serve, which are left out."""

    def __init__(self, server: Server, world: World, absent: Mapping[str, str] | None = None) -> None:
        self.server, self.judge, self.absent = server, Judge(world), absent or {}
        self.world = replace(world, tenants=[one for one in world.tenants if one.name not in self.absent])
        self._turns = {model: itertools.cycle(world.sure(model)) for model in self.world.models}
        self._numbers = {model: itertools.count(place) for place, model in enumerate(self.world.models)}

    @property
    def tenants(self) -> list[str]:
        """Names of the adapters."""
        return self.world.models[1:]

    def asks(self, models: Iterable[str]) -> list[Ask]:
        """Build a request for each name, with the model's next prompt."""
        return [self.form(Ask(model, next(self._turns[model]))) for model in models]

    def form(self, ask: Ask) -> Ask:
        """Choose by turn: every other request of a model streams, every third is text where token ids are taken."""
        number = next(self._numbers[ask.model])
        return Ask(ask.model, ask.prompt, number % 2 == 0, self.server.takes_ids and number % 3 != 0, ask.name)

    async def send(self, ask: Ask) -> Answer:
        """Send one request."""
        prompt = list(ask.prompt.ids) if ask.as_ids else ask.prompt.text
        return await self.server.ask(ask.asked, prompt, COUNT, ask.stream)

    async def wave(self, result: Result, asks: Sequence[Ask]) -> None:
        """Send requests at once and judge their answers."""
        self.judge.judge(result, asks, await asyncio.gather(*map(self.send, asks)))


Case = Callable[[Run, Result], Awaitable[None]]


def waves(models: Callable[[Run], Iterable[Iterable[str]]]) -> Case:
    """Return the case of one wave after another, each of requests of these models."""

    async def sent(run: Run, result: Result) -> None:
        for wave in models(run):
            await run.wave(result, run.asks(wave))

    return sent


def batch(size: int) -> Case:
    """Return the case of `size` requests at once, over all models."""
    return waves(lambda run: [itertools.islice(itertools.cycle(run.world.models), size)])


def _by_rank(run: Run) -> Iterator[list[str]]:
    """Yield an adapter of each rank, in rising and falling order, at once."""
    order = [name for _, name in sorted({tenant.rank: tenant.name for tenant in run.world.tenants}.items())]
    for _ in range(2):
        yield [*order, *reversed(order)] * 2


def _many(run: Run) -> Iterator[list[str]]:
    """Yield all adapters, alone and at once, forwards and backwards: where slots are fewer, each loses its own."""
    for order in (run.tenants, run.tenants[::-1], run.tenants):
        yield from ([name] for name in order)
        yield order


alone = waves(lambda run: ([model] for model in run.world.models for _ in range(2)))
mixed = waves(lambda run: [run.world.models * 2])
ranks = waves(_by_rank)
subsets = waves(lambda run: [[*{tenant.subset: tenant.name for tenant in run.world.tenants}.values()] * 4])
base_between = waves(lambda run: [[name for tenant in run.tenants for name in (tenant, BASE)]])
many = waves(_many)


async def repeated(run: Run, result: Result) -> None:
    """Send one wave three times, and find answers that change, right or wrong."""
    asks = run.asks(run.world.models * 2)
    runs = [await asyncio.gather(*map(run.send, asks)) for _ in range(3)]
    for ask, *answers in zip(asks, *runs, strict=True):
        found = {run.judge.tokens(result, ask, answer) for answer in answers}
        if len({tokens for tokens in found if len(tokens) == COUNT}) > 1:
            result.findings[f"{run.judge.label(ask)} got other tokens from run to run"] += 1


async def shared_prefix(run: Run, result: Result) -> None:
    """Send prompts with one long prefix: an adapter's, then all others', which must not get its blocks."""
    if WARMER in run.absent:
        result.not_offered(f"{WARMER} is absent")
        return
    turns = {model: run.world.sharing(model) for model in run.world.models}
    for prompt in turns[WARMER][:2]:
        await run.wave(result, [run.form(Ask(WARMER, prompt))])
    for model, prompts in turns.items():
        await run.wave(result, [run.form(Ask(model, prompts[0]))])
    await run.wave(result, [run.form(Ask(model, prompt)) for model, prompts in turns.items() for prompt in prompts[:3]])


async def same_prompt(run: Run, result: Result) -> None:
    """Send one prompt to all models that are sure of it, at once and in turn."""
    for prompt in sorted(run.world.prompts, key=lambda prompt: -len(prompt.sure))[:2]:
        asks = [run.form(Ask(model, prompt)) for model in run.world.models if model in prompt.sure]
        await run.wave(result, asks)
        for ask in asks:
            await run.wave(result, [ask])


async def poisoned(run: Run, result: Result) -> None:
    """Send requests of adapters of NaN, inf and huge weights beside all others, and then others alone.

    To refuse one, at its load or its request, is right; what a poisoned adapter answers does not count.
    """
    notes = []
    for name in POISONS:
        status, _ = await _load(run, name, name)
        if status in CLOSED and not run.server.prefix:
            result.not_offered(f"load_lora_adapter: HTTP {status}")
            return
        spoil = [run.server.ask(name, run.world.prompts[0].text, 4 * COUNT, stream) for stream in (True, False) * 2]
        said, _ = await asyncio.gather(asyncio.gather(*spoil), run.wave(result, run.asks(run.world.models)))
        await run.wave(result, run.asks(run.world.models))
        await _unload(run, name)
        notes.append(f"{name} {'served' if any(answer.text for answer in said) else 'failed'}")
    result.note = ", ".join(notes)


async def cancelled(run: Run, result: Result) -> None:
    """Leave streams in the middle beside others that stay, and send requests after them."""
    models = run.world.models
    for _ in range(2):
        leaving = [
            run.server.ask(model, ask.prompt.text, LONG, True, leave_after=number % 4)
            for number, (model, ask) in enumerate(zip(models, run.asks(models), strict=True))
        ]
        await asyncio.gather(*leaving, run.wave(result, run.asks(models)))
    await run.wave(result, run.asks(models * 2))


async def reloaded(run: Run, result: Result) -> None:
    """Unload an adapter and load another under its name, beside others; at last the name is unknown."""
    first, second = _two(run)
    status, text = await _load(run, first)
    if status in CLOSED:
        result.not_offered(f"load_lora_adapter: HTTP {status}")
        return
    if status != 200:
        result.fault(SWAPPED, f"load_lora_adapter gave HTTP {status}: {text}")
        return
    await run.wave(result, [*_swapped(run, first), *run.asks(run.world.models)])
    for model in (second, first, second):
        for step, (status, text) in (("unload", await _unload(run)), ("load", await _load(run, model))):
            if status != 200:
                result.fault(SWAPPED, f"{step}_lora_adapter gave HTTP {status}: {text}")
                return
        for ask in _swapped(run, model):
            await run.wave(result, [ask])
        await run.wave(result, [*_swapped(run, model), *run.asks(run.world.models)])
    await _unload(run)
    answer = await run.server.ask(SWAPPED, run.world.prompts[0].text, COUNT)
    if answer.tokens:
        result.findings[f"{SWAPPED}, unloaded, got tokens"] += 1
    elif not any(fault.startswith("HTTP 404") for fault in answer.faults):
        result.fault(SWAPPED, f"a name that was unloaded gave {answer.faults or EMPTY} instead of HTTP 404")


async def replaced(run: Run, result: Result) -> None:
    """Load another adapter in place of one that is loaded (`load_inplace`, as vLLM names it)."""
    first, second = _two(run)
    if (await _load(run, first))[0] != 200:
        result.not_offered("load_lora_adapter is refused")
        return
    await run.wave(result, _swapped(run, first))
    for model in (second, first):
        status, _ = await _load(run, model, load_inplace=True)
        if status != 200:
            result.not_offered(f"load_inplace: HTTP {status}")
            break
        await run.wave(result, [*_swapped(run, model), *run.asks(run.tenants)])
    await _unload(run)


def _two(run: Run) -> tuple[str, str]:
    """Choose the two adapters that have most prompts in common."""
    tenants = run.tenants
    pairs = ((a, b) for place, a in enumerate(tenants) for b in tenants[place + 1 :])
    return max(pairs, key=lambda pair: sum(pair[0] in p.sure and pair[1] in p.sure for p in run.world.sure(pair[0])))


def _swapped(run: Run, model: str) -> list[Ask]:
    """Build requests with the name `SWAPPED`, whose right tokens are `model`'s, for the prompts that both can have."""
    both = [prompt for prompt in run.world.sure(model) if prompt.sure.issuperset(_two(run))] or run.world.sure(model)
    return [run.form(Ask(model, prompt, name=SWAPPED)) for prompt in both[:4]]


async def _load(run: Run, model: str, name: str = SWAPPED, **more: bool) -> tuple[int, str]:
    path = str(run.world.adapter(model))
    return await run.server.change("load_lora_adapter", lora_name=name, lora_path=path, **more)


async def _unload(run: Run, name: str = SWAPPED) -> tuple[int, str]:
    return await run.server.change("unload_lora_adapter", lora_name=name)


def cases(batches: Sequence[int]) -> dict[str, Case]:
    """Return the cases by name, in their order: the prefix cache is tried before its prompts were seen."""
    return {
        "shared prefix": shared_prefix, "each alone": alone, "mixed batch": mixed, "mixed ranks": ranks,
        "layer subsets": subsets, "base between": base_between, "same prompt": same_prompt, "many adapters": many,
        "repeated runs": repeated, **{f"batch of {size}": batch(size) for size in batches}, "cancellation": cancelled,
        "hot reload": reloaded, "reload in place": replaced, "poisoned": poisoned,
    }  # fmt: skip


async def run_cases(run: Run, batches: Sequence[int], said: Callable[[Result], None]) -> list[Result]:
    """Run every case, and call `said` after each."""
    results = [Result("models", len(run.world.models) + len(run.absent), len(run.world.models))]
    for model, why in run.absent.items():
        results[0].fault(model, f"absent: {why}")
    said(results[0])
    for name, case in cases(batches).items():
        result = Result(name)
        await case(run, result)
        said(result)
        results.append(result)
    return results
