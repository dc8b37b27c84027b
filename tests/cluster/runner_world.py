"""Runners of a tiny random Llama with adapters on disk, and what a single engine makes of the same requests."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import LlamaConfig

from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster.dispatch import Dispatcher
from punica.cluster.runner import Runner, random_engine
from punica.engine import Engine, EngineConfig, Request, SamplingParams
from tests.engine.beside_world import reading_beside

MODEL = LlamaConfig(
    hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=128, initializer_range=0.15,
)  # fmt: skip
RANKS = {1: 4, 2: 16, 3: 8}


def write_adapters(home: Path) -> dict[int, LoRARequest]:
    """Adapters of several ranks, by id."""
    return {
        i: LoRARequest(f"adapter-{i}", i, str(write_random_adapter(home / f"adapter-{i}", MODEL, rank, i)))
        for i, rank in RANKS.items()
    }


def factory(max_batch_size: int = 4, num_blocks: int | None = 64, **fields) -> partial[Engine]:
    """Of a runner's engine, for `RayCluster` or for this process."""
    config = EngineConfig(max_batch_size, 4, 64, num_blocks, **fields)
    return partial(random_engine, MODEL, config.lora_config(16), config, seed=3)


def requests(
    adapters: dict[int, LoRARequest], count: int, seed: int = 0, longest: int = 24, seeded: bool = False
) -> list[Request]:
    """Greedy and sampled ones, of several adapters or none; unless ``seeded``, some without a seed of their own, whose
    tokens depend on how many requests came before.
    """
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
    """Tokens of each request from one engine that has room for all."""
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
    """The dispatcher and runners in this process; each `turn` makes a step of one of them."""

    desk: Dispatcher
    runners: dict[str, Runner]

    @classmethod
    def of(cls, count: int, max_queued: int = 1000, rule: str = "punica", **engine) -> "LocalRunners":
        runners = {f"runner-{i}": new_runner(**engine) for i in range(count)}
        desk = Dispatcher(runners["runner-0"].describe(), rule, max_queued)
        for uuid, runner in runners.items():
            desk.join(uuid, runner.describe())
        return cls(desk, runners)

    def replace(self, uuid: str, **engine) -> None:
        """A new runner in place of one that died."""
        self.runners[uuid] = new_runner(**engine)
        self.desk.join(uuid, self.runners[uuid].describe())


def run(world: LocalRunners) -> dict[str, str | None]:
    """To the end; errors of requests that failed."""
    failed = {}
    while world.desk.startable:
        uuid = max(world.desk.startable)
        command = world.desk.begin(uuid)
        if command is not None:
            ended = world.desk.end(uuid, world.runners[uuid].step(command))
            failed |= {state.request_id: state.error for state in ended.failed}
    return failed


def new_runner(files: dict | None = None, beside: bool = False, **engine) -> Runner:
    """One whose adapters' files are in ``files``; ``beside``: they are read beside the steps, as on a GPU."""
    build = factory(**engine)
    return Runner(lambda: reading_beside(build()) if beside else build(), fetch=lambda key: (files or {})[key])
