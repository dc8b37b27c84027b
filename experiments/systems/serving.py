"""Interface of a serving system, its reports, and what all systems share. Device memory of Llama-2 7B and 13B: weights
13.5 and 26.0 GB, keys and values 43 and 68 GB, 32 adapters 2.6 and 4.0 GB for PEFT and for each engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

import torch

from experiments.benches.model_steps import fill_with_noise
from experiments.facts.systems import SYSTEMS, System
from experiments.systems.hugging_face import PeftBackend
from experiments.systems.stream import Job, Timeline
from experiments.systems.weights import Weights
from punica.adapters import LoRAModel
from punica.engine.attention import KVCache

WARM_STEPS = 1
"""Untimed steps before those of `run_steps`, which leave caches and slots as in the middle of a stream."""


class World(Weights):
    """Weights, and Hugging Face's model around them, made when first read."""

    @cached_property
    def peft(self) -> PeftBackend:
        """Hugging Face model with its PEFT adapters: two of the systems, and the reference of the check."""
        return PeftBackend(self, self.kv_cache)

    @cached_property
    def kv_cache(self) -> KVCache:
        """KV cache of all systems, full of noise; a quarter larger than our engine needs, as Hugging Face pads."""
        config = self.limits.engine_config(lora=False)
        kept = KVCache(self._backbone, config.total_blocks * 5 // 4, config.block_size)
        fill_with_noise(kept)
        return kept

    @cached_property
    def registered(self) -> dict[tuple[bool, int], LoRAModel]:
        """(fully sharded, weight set) -> adapter as the first engine registered it; on a GPU in page-locked memory."""
        return {}

    def reference(self, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` (float32, host) of Hugging Face's model for a job alone, by one invocation."""
        with self.peft.adapter(job.adapter_id if lora else None):
            return self.peft.prefill(job.prompt, tokens)


class Step(NamedTuple):
    """One model invocation, by a clock: requests that got a token, and rows of prompts."""

    start: float
    end: float
    live: int
    prompt_rows: int

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        return self.live + self.prompt_rows


@dataclass(frozen=True)
class Served:
    """A served stream: generated tokens per job, in the order of the jobs; model invocations; wall time."""

    jobs: Sequence[Job]
    tokens: Sequence[Sequence[int]]
    steps: Sequence[Step]
    seconds: float

    @property
    def throughput(self) -> float:
        """Prompt and new tokens per second, as the paper plots them (D13)."""
        return (sum(len(job.prompt) for job in self.jobs) + sum(map(len, self.tokens))) / self.seconds


class ServingSystem(ABC):
    """One way to serve a stream, on a `World` that systems share; `facts`: its entry in `SYSTEMS`."""

    def __init__(self, world: World, facts: System) -> None:
        self.world, self.facts = world, facts

    @abstractmethod
    def serve(self, jobs: Sequence[Job]) -> Served:
        """Serve `jobs`, all waiting from the start, to the end. May be called again."""

    @abstractmethod
    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        """Run `count` steps from step `start` of the replay `timeline`, over noise, after `WARM_STEPS` untimed."""

    @abstractmethod
    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits of every job, `[its tokens, vocabulary]` float32 on the host, with forced `tokens`."""


def class_of(name: str) -> type[ServingSystem]:
    """Return the class of the system called `name`. ValueError lists the known names."""
    served_by = SYSTEMS.get(name).served_by
    if isinstance(served_by, str):
        module, _, kind = served_by.rpartition(".")
        served_by = getattr(import_module(module), kind)
    return served_by


def built(name: str, world: World) -> ServingSystem:
    return class_of(name)(world, SYSTEMS.get(name))
