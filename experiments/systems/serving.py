"""What a serving system is, and what it reports."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from experiments.systems.stream import Job
from experiments.systems.world import World
from punica.registry import Registry
from punica.workload import Timeline

WARM_STEPS = 1
"""Steps that run untimed before those of `run_steps`, which leave caches and slots as in the middle of a stream."""


@dataclass(frozen=True)
class Served:
    """A served stream.

    `tokens`: generated tokens per job, in the order of the jobs. `steps`: model invocations. `rows`: places in the
    batch summed over all steps, `idle_rows` of them held by requests that were done (static batches). `seconds`: wall
    time of serving, and `phases` how much of it went where, as far as the system can tell.
    """

    jobs: Sequence[Job]
    tokens: Sequence[Sequence[int]]
    steps: int
    rows: int
    idle_rows: int
    seconds: float
    phases: Mapping[str, float]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def new_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def throughput(self) -> float:
        """Prompt and new tokens per second: what the paper plots (D13)."""
        return (self.prompt_tokens + self.new_tokens) / self.seconds


class Step(NamedTuple):
    """One model invocation inside of a stream: its seconds, tokens of prompts and new ones, requests that got one; and
    how many of the seconds the model itself took, where the system can tell.
    """

    seconds: float
    tokens: int
    live: int
    model_seconds: float | None = None


class ServingSystem(ABC):
    """One way to serve a stream; built for one cell of the figure, on a `World` that it shares with the others.

    `admission`: the engine's rule that describes its batches. `lora`: whether it applies adapters. `exact`: whether
    every request is computed with its own adapter (only the released index rule is not). `slow`: whether its steps take
    so many times as long as those of others that its windows are shorter.
    """

    admission: ClassVar[str]
    lora: ClassVar[bool]
    exact: ClassVar[bool] = True
    slow: ClassVar[bool] = False

    def __init__(self, world: World) -> None:
        self.world = world

    @abstractmethod
    def serve(self, jobs: Sequence[Job]) -> Served:
        """Serve `jobs`, all waiting from the start, to the end. May be called again."""

    @abstractmethod
    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        """`count` consecutive steps of serving `jobs`, from step `start` of `timeline` on, the replay of this system's
        admission rule on them.

        Keys and values of what lies before are noise. `WARM_STEPS` steps before run untimed, as far as there are any.
        """

    @abstractmethod
    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits of every job, `[its tokens, vocabulary]` in float32 on the host, when it goes on with `tokens`,
        whatever the system would choose (teacher forcing).
        """


SYSTEMS: Registry[type[ServingSystem]] = Registry("serving system")
