"""Runners of a tiny random Llama with adapters on disk, and the tokens of a single engine for the same requests."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import LlamaConfig

from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster.dispatcher import Dispatcher, EndedStep
from punica.cluster.runner import Runner, StepCommand, random_engine
from punica.engine import Engine, EngineConfig, Request, SamplingParams
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


def requests(
    adapters: dict[int, LoRARequest], count: int, seed: int = 0, longest: int = 24, seeded: bool = False
) -> list[Request]:
    """Build greedy and sampled requests; unless ``seeded``, tokens of some depend on the number of requests before."""
    random = np.random.Generator(np.random.PCG64(seed))
    made = []
    for i in range(count):
        prompt = random.integers(0, MODEL.vocab_size, random.integers(1, 20)).tolist()
        new = int(random.integers(1, longest))
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


def new_runner(files: dict | None = None, beside: bool = False, **engine) -> Runner:
    """Build a runner that fetches adapters from ``files``; ``beside``: they are read during steps, as on a GPU."""
    build = factory(**engine)
    return Runner(lambda: reading_beside(build()) if beside else build(), fetch=lambda key: (files or {})[key])
