"""Runners of a tiny random Llama with adapters on disk, and the tokens of a single engine for the same requests."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import LlamaConfig

from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster.dispatcher import Dispatcher, EndedStep
from punica.cluster.runner import Runner, StepCommand, random_engine
from punica.engine import Engine, EngineConfig, Request, RequestState, SamplingParams
from tests.world import SIZES, reading_beside

MODEL = LlamaConfig(**SIZES)
RANKS = {1: 4, 2: 16, 3: 8}


def write_adapters(home: Path) -> dict[int, LoRARequest]:
    return {
        i: LoRARequest(f"adapter-{i}", i, str(write_random_adapter(home / f"adapter-{i}", MODEL, rank, i)))
        for i, rank in RANKS.items()
    }


def factory(max_batch_size: int = 4, num_blocks: int | None = 64, **fields) -> partial[Engine]:
    """Build a factory of runners' engines, for `RayCluster` or for this process."""
    config = EngineConfig(max_batch_size, 4, 64, num_blocks, **fields)
    return partial(random_engine, MODEL, config.lora_config(16), config, seed=3)


def requests(adapters: dict[int, LoRARequest], count: int, seed: int = 0, seeded: bool = False) -> list[Request]:
    """Build greedy and sampled requests; unless ``seeded``, tokens of some depend on the number of requests before."""
    chance = np.random.Generator(np.random.PCG64(seed))
    made = []
    for i in range(count):
        prompt = chance.integers(0, MODEL.vocab_size, chance.integers(1, 20)).tolist()
        new = int(chance.integers(1, 24))
        params = (
            SamplingParams(new),
            SamplingParams(new, temperature=1.0, seed=i),
            SamplingParams(new, temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=i if seeded else None),
        )[i % 3]
        made.append(Request(f"request-{i}", prompt, params, adapters.get(i % (len(adapters) + 1))))
    return made


def undisturbed(asked: list[Request]) -> dict[str, list[int]]:
    engine = factory(num_blocks=None)()
    for request in asked:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while engine.has_unfinished():
        for name, token in engine.step().tokens.items():
            tokens[name].append(token)
    return tokens


@dataclass
class LocalRunners:
    dispatcher: Dispatcher
    runners: dict[str, Runner]

    @classmethod
    def of(cls, count: int, **engine) -> "LocalRunners":
        runners = {f"runner-{i}": new_runner(**engine) for i in range(count)}
        dispatcher = Dispatcher(runners["runner-0"].describe())
        for uuid, runner in runners.items():
            dispatcher.join(uuid, runner.describe())
        return cls(dispatcher, runners)

    def step(self, uuid: str, command: StepCommand | None = None) -> EndedStep:
        """Run a step of a runner, this one or its next."""
        return self.dispatcher.end(uuid, self.runners[uuid].step(command or self.dispatcher.begin(uuid)))

    def replace(self, uuid: str, **engine) -> None:
        """Add a new runner in place of one that died."""
        self.runners[uuid] = new_runner(**engine)
        self.dispatcher.join(uuid, self.runners[uuid].describe())


def run(world: LocalRunners) -> dict[str, str | None]:
    """Run to the end; return errors of requests that failed."""
    failed = {}
    while world.dispatcher.startable:
        uuid = max(world.dispatcher.startable)
        command = world.dispatcher.begin(uuid)
        if command is not None:
            ended = world.step(uuid, command)
            failed |= {state.request_id: state.error for state in ended.failed}
    return failed


class Disturbed:
    """Random events around local runners: steps that end in any order, crashes inside of a step, restarts, aborts.

    Runners crash on a request named poison once it has ``poison_at`` tokens, and ``most_crashes`` times by chance.
    """

    def __init__(self, seed: int, count: int = 3, poison_at: int = 10**9, most_crashes: int = 0, **engine) -> None:
        self.random, self.engine = random.Random(seed), engine
        self.poison_at, self.most_crashes = poison_at, most_crashes
        self.world = LocalRunners.of(count, **engine)
        self.dispatcher = self.world.dispatcher
        self.in_flight: dict[str, StepCommand] = {}
        self.unfinished: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.failed: list[RequestState] = []
        self.evictions = self.crashes = self.most_quarantined = 0

    def run(self, asked: Sequence[Request], aborts: float = 0.0) -> None:
        todo = list(asked)
        while todo or self.dispatcher.num_unfinished:
            if todo and self.random.random() < 0.4:
                self.add(todo.pop(0))
            self.begin_all()
            if self.random.random() < aborts:
                self.abort()
            if self.in_flight:
                self.end_one()
            if self.crashes < self.most_crashes and self.random.random() < 0.015 * self.most_crashes:
                self.crash(self.random.choice(sorted(self.world.runners)))

    def add(self, request: Request) -> None:
        self.dispatcher.add(request)
        self.unfinished[request.request_id] = request
        self.tokens[request.request_id] = []

    def abort(self) -> None:
        """Take a request back, in a step perhaps, and ask for it again: its name is free."""
        if self.unfinished:
            request = self.random.choice(list(self.unfinished.values()))
            state = self.dispatcher.abort(request.request_id)
            assert (state.finish_reason, state.output_token_ids) == ("aborted", self.tokens[request.request_id])
            self.add(request)

    def begin_all(self) -> None:
        while self.dispatcher.startable:
            uuid = self.random.choice(sorted(self.dispatcher.startable))
            waiting = self.dispatcher.policy.num_queued
            command = self.dispatcher.begin(uuid)
            self.evictions += self.dispatcher.policy.num_queued > waiting
            if command is not None:
                self.in_flight[uuid] = command
            for gpu in self.dispatcher.policy.gpus.values():
                quarantined = sum(member.quarantined for member in gpu.members.values())
                assert not quarantined or gpu.working_set == 1
                self.most_quarantined = max(self.most_quarantined, quarantined)

    def end_one(self) -> None:
        uuid = self.random.choice(sorted(self.in_flight))
        if self.is_poisoned(uuid):
            self.crash(uuid)
            return
        ended = self.world.step(uuid, self.in_flight.pop(uuid))
        for name, token in ended.tokens.items():
            self.tokens[name].append(token)
        assert not ended.failed
        for state in ended.finished:
            del self.unfinished[state.request_id]
            self.ended[state.request_id] += 1

    def is_poisoned(self, uuid: str) -> bool:
        """Tell if the step in flight of a runner has the poison in it, with so many tokens."""
        states, joins = self.world.runners[uuid].engine._requests, self.in_flight[uuid].joins
        counts = [state.num_generated for name, state in states.items() if "poison" in name]
        counts += [len(joins.generated)] if joins is not None and "poison" in joins.request.request_id else []
        return max(counts, default=-1) >= self.poison_at

    def crash(self, uuid: str) -> None:
        """Crash a runner whose step may have run: its reply is lost either way. Another runner joins."""
        command = self.in_flight.pop(uuid, None)
        if command is not None and self.random.random() < 0.5:
            self.world.runners[uuid].step(command)
        self.crashes += 1
        for state in self.dispatcher.died(uuid, f"death {self.crashes}"):
            del self.unfinished[state.request_id]
            self.failed.append(state)
        self.world.replace(uuid, **self.engine)


def new_runner(files: dict | None = None, beside: bool = False, **engine) -> Runner:
    """Build a runner that fetches adapters from ``files``; ``beside``: they are read during steps, as on a GPU."""
    build = factory(**engine)
    return Runner(lambda: reading_beside(build()) if beside else build(), fetch=lambda key: (files or {})[key])
