"""Interface of a serving system, and its reports."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch

from experiments.facts.systems import SYSTEMS, System
from experiments.systems.stream import Job
from experiments.systems.timeline import Timeline
from experiments.systems.world import World

WARM_STEPS = 1
"""Untimed steps before those of `run_steps`, which leave caches and slots as in the middle of a stream."""


@dataclass(frozen=True)
class Served:
    """A served stream.

    `tokens`: generated tokens per job, in the order of the jobs. `steps`: model invocations. `rows`: places in the
    batch summed over all steps, `idle_rows` of them held by finished requests (static batches). `seconds`: wall time of
    serving; `phases`: parts of it, as far as the system tells them.
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
        """Prompt and new tokens per second, as the paper plots them (D13)."""
        return (self.prompt_tokens + self.new_tokens) / self.seconds


class Step(NamedTuple):
    """One model invocation in a stream: seconds, tokens of prompts and new ones, requests that got a token; seconds of
    the model alone, where the system tells them.
    """

    seconds: float
    tokens: int
    live: int
    model_seconds: float | None = None


class ServingSystem(ABC):
    """One way to serve a stream, on a `World` that systems share; `facts`: its entry in `SYSTEMS`."""

    def __init__(self, world: World, facts: System) -> None:
        self.world, self.facts = world, facts

    @abstractmethod
    def serve(self, jobs: Sequence[Job]) -> Served:
        """Serve `jobs`, all waiting from the start, to the end. May be called again."""

    @abstractmethod
    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        """Run `count` consecutive steps of serving `jobs`, from step `start` of `timeline` on, the replay of this
        system's admission rule.

        Keys and values of earlier steps are noise. Up to `WARM_STEPS` steps before run untimed.
        """

    @abstractmethod
    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return logits of every job, `[its tokens, vocabulary]` in float32 on the host, continued by `tokens`
        (teacher forcing).
        """


def class_of(name: str) -> type[ServingSystem]:
    """Import the class of the system called `name`. ValueError lists the known names."""
    module, _, kind = SYSTEMS.get(name).served_by.rpartition(".")
    found: type[ServingSystem] = getattr(import_module(module), kind)
    return found


def built(name: str, world: World) -> ServingSystem:
    """Build the system called `name` on `world`."""
    return class_of(name)(world, SYSTEMS.get(name))
