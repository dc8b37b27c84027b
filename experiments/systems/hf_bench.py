"""Decode steps of Hugging Face's model with one adapter or many, in every way that it offers (`ext_hf_baselines`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from experiments.benches.launches import Launches, launches_of
from experiments.benches.model_steps import TOLERANCE, difference
from experiments.harness.experiment import CheckFailed
from experiments.systems.hf_backend import SameProduct
from experiments.systems.hf_decoding import Decoding
from experiments.systems.stream import Job
from experiments.systems.world import World
from punica.measure.timing import Protocol, time_side_by_side


@dataclass(frozen=True)
class Way:
    """One way to decode a batch: adapter merged into the weights, steps captured as graphs, an adapter for each row."""

    merged: bool = False
    graphs: bool = False
    mixed: bool = False


WAYS = {
    "unmerged": Way(),
    "merged": Way(merged=True),
    "unmerged, graphs": Way(graphs=True),
    "merged, graphs": Way(merged=True, graphs=True),
    "mixed": Way(mixed=True),
}
"""System -> its way. Figure 11's `hf_peft` is `merged, graphs` (on a CPU `merged`), its `hf_peft_mixed` is `mixed`."""


@dataclass(frozen=True)
class Timed:
    """Seconds of every timed step; launches of one (None on a CPU); the product, ours or torch's."""

    steps: list[float]
    launches: Launches | None
    ours: bool


class HfBench:
    """Ways to decode on a shared `world`, each checked against the reference before it is timed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._checked: set[str] = set()

    def measure(self, name: str, batch: int, context: int, protocol: Protocol) -> Timed:
        """Time steps of `batch` rows behind `context` tokens each, on a GPU with the faster product."""
        if name not in self._checked:
            self._check(name)
            self._checked.add(name)
        kinds = (SameProduct,) if self.world.device == "cpu" else (SameProduct, nn.Linear)
        found = [self._timed(WAYS[name], batch, context, protocol, kind) for kind in kinds]
        return min(found, key=lambda timed: median(timed.steps))

    def _timed(self, way: Way, batch: int, context: int, protocol: Protocol, kind: type[nn.Linear]) -> Timed:
        steps = protocol.warmup + max(protocol.repeats, protocol.min_repeats) + 1
        prompts, adapters = batch * [context * [1]], _adapters(way, batch)
        with self._decoding(way, prompts, adapters, steps + 1, done=1, kind=kind) as decoding:
            seconds = time_side_by_side({"": [decoding.step]}, protocol)[""]
            launches = None if self.world.device == "cpu" else launches_of(decoding.step)
        return Timed(seconds, launches, kind is SameProduct)

    @contextmanager
    def _decoding(
        self, way: Way, prompts: Sequence[Sequence[int]], adapters: Sequence[int], new_tokens: int, done: int,
        kind: type[nn.Linear],
    ) -> Iterator[Decoding]:  # fmt: skip
        backend = self.world.peft
        rows = backend.places(adapters) if way.mixed else None
        one = backend.merged if way.merged else backend.adapter
        with nullcontext() if way.mixed else one(adapters[0]), backend.product(kind):
            yield backend.decoding(prompts, new_tokens, rows, done, way.graphs)

    def _check(self, name: str) -> None:
        """`CheckFailed` unless a way gives the reference's logits for two prompts, one of them padded."""
        way, limit = WAYS[name], TOLERANCE[self.world.dtype]
        prompts, forced = [tuple(range(1, 20)), (5, 6, 7)], [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
        adapters = _adapters(way, 2)
        jobs = [Job(prompt, 6, adapter) for prompt, adapter in zip(prompts, adapters, strict=True)]
        expected = [self.world.reference(job, tokens, lora=True) for job, tokens in zip(jobs, forced, strict=True)]
        plain = self.world.reference(jobs[0], forced[0], lora=False)
        with self._decoding(way, prompts, adapters, 6, done=0, kind=SameProduct) as decoding:
            found = decoding.forced(torch.tensor(forced, device=self.world.device))
        error = max(difference(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        without = difference(plain, expected[0])
        if not error <= limit < without:
            raise CheckFailed(
                f"{name} gives logits that differ from the reference by {error:.2e} (relative), where an adapter that "
                f"is left out differs by {without:.2e}, and {limit:.0e} is allowed"
            )


def _adapters(way: Way, batch: int) -> list[int]:
    """Adapter of each row: different ones in a mixed batch."""
    return list(range(1, batch + 1)) if way.mixed else batch * [1]
