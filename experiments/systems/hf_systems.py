"""Hugging Face with PEFT: static batches of one adapter, as in the paper, and PEFT's own mixed ones, until their
longest request is done. Timed from the first invocation to the last token, not loading, merging and capturing.
"""

import time
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from experiments.benches.model_steps import TOLERANCE, difference
from experiments.benches.step_parts import Launches, launches_of
from experiments.facts.systems import System
from experiments.harness.experiment import CheckFailed
from experiments.measure import timing
from experiments.systems.hugging_face import SameProduct
from experiments.systems.serving import WARM_STEPS, Served, ServingSystem, Step
from experiments.systems.stream import Job, Timeline
from experiments.systems.world import World


class HfSystem(ServingSystem):
    """Static batches on the shared model: of one adapter, or of any, over which each layer loops (`static_mixed`)."""

    def __init__(self, world: World, facts: System) -> None:
        super().__init__(world, facts)
        self.mixed = facts.admission == "static_mixed"

    def serve(self, jobs: Sequence[Job]) -> Served:
        tokens, steps = list[list[int]](), list[Step]()
        for batch in self._batches(jobs):
            ran, columns = self._run(batch, 0, max(job.new_tokens for job in batch))
            steps += ran
            rows = map(list, zip(*columns, strict=True))
            tokens += [row[: job.new_tokens] for row, job in zip(rows, batch, strict=True)]
        return Served(jobs, tokens, steps, sum(step.seconds for step in steps))

    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        warm = min(WARM_STEPS, start)
        state = timeline.at(start - warm)
        done = max(generated for _, generated in state.members)
        steps: list[Step] = []
        for batch in self._batches(jobs[state.members[0][0] :]):
            steps += self._run(batch, done, count + warm - len(steps))[0]
            done = 0
            if len(steps) == count + warm:
                break
        return steps[warm:]

    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        backend, logits = self.world.peft, list[torch.Tensor]()
        for batch in self._batches(jobs):
            own = [list(row) for row in tokens[len(logits) : len(logits) + len(batch)]]
            longest = max(map(len, own))
            padded = [row + [0] * (longest - len(row)) for row in own]
            forced = torch.tensor(padded, device=self.world.device)
            with backend.applied([job.adapter_id for job in batch], self.mixed) as rows:
                together = backend.decoding([job.prompt for job in batch], longest, rows).forced(forced)
            logits += [row[: len(one)] for row, one in zip(together, own, strict=True)]
        return logits

    def _run(self, batch: Sequence[Job], done: int, count: int) -> tuple[list[Step], list[list[int]]]:
        """Time up to `count` steps of a batch whose rows have generated `done` tokens; return their tokens as well."""
        last = min(max(job.new_tokens for job in batch), done + count)
        backend, steps, columns = self.world.peft, list[Step](), list[list[int]]()
        with backend.applied([job.adapter_id for job in batch], self.mixed) as rows:
            decoding = backend.decoding([job.prompt for job in batch], last, rows, done)
            started = time.perf_counter()
            for index in range(done, last):
                columns.append(decoding.step())
                ended = time.perf_counter()
                live = sum(index < job.new_tokens for job in batch)
                steps.append(Step(started, ended, live, 0 if index else sum(len(job.prompt) for job in batch)))
                started = ended
        return steps, columns

    def _batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Split into consecutive jobs, of one adapter unless batches are mixed, up to the limit."""
        limit = self.world.limits.max_batch_size
        runs = [list(run) for _, run in groupby(jobs, key=lambda job: self.mixed or job.adapter_id)]
        return [run[start : start + limit] for run in runs for start in range(0, len(run), limit)]


class Way(NamedTuple):
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
"""Figure 11's `hf_peft` is `merged, graphs` (on a CPU `merged`), its `hf_peft_mixed` is `mixed`."""


class Timed(NamedTuple):
    """Seconds of every timed step; launches of one (None on a CPU)."""

    steps: list[float]
    launches: Launches | None


class HfBench:
    """Ways to decode on a shared `world`, each checked against the reference before it is timed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._checked: set[str] = set()

    def measure(self, name: str, batch: int, context: int, protocol: timing.Protocol) -> Timed:
        """Time steps of `batch` rows behind `context` tokens each, on a GPU with the faster product."""
        way = WAYS[name]
        if name not in self._checked:
            self._check(name, way)
            self._checked.add(name)
        on_gpu, timed, backend = self.world.device != "cpu", list[Timed](), self.world.peft
        steps = protocol.warmup + max(protocol.repeats, protocol.min_repeats) + 1
        for kind in (SameProduct, nn.Linear) if on_gpu else (SameProduct,):
            with backend.applied(range(1, batch + 1), way.mixed, way.merged) as rows, backend.product(kind):
                decoding = backend.decoding(batch * [context * [1]], steps + 1, rows, done=1, graphs=way.graphs)
                seconds = timing.time_side_by_side({"": [decoding.step]}, protocol)[""]
                launches = launches_of(decoding.step) if on_gpu else None
            timed.append(Timed(seconds, launches))
        return min(timed, key=lambda one: median(one.steps))

    def _check(self, name: str, way: Way) -> None:
        """Raise `CheckFailed` unless a way gives the reference's logits for two prompts, one of them padded."""
        limit, backend = TOLERANCE[self.world.dtype], self.world.peft
        prompts, forced = [tuple(range(1, 20)), (5, 6, 7)], [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
        jobs = [Job(prompt, 6, 1 + way.mixed * place) for place, prompt in enumerate(prompts)]
        expected = [self.world.reference(job, tokens, lora=True) for job, tokens in zip(jobs, forced, strict=True)]
        plain = self.world.reference(jobs[0], forced[0], lora=False)
        with backend.applied([1, 2], way.mixed, way.merged) as rows, backend.product(SameProduct):
            decoding = backend.decoding(prompts, 6, rows, graphs=way.graphs)
            logits = decoding.forced(torch.tensor(forced, device=self.world.device))
        error = max(difference(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))
        without = difference(plain, expected[0])
        if not error <= limit < without:
            raise CheckFailed(
                f"{name} gives logits that differ from the reference by {error:.2e} (relative), where an adapter that "
                f"is left out differs by {without:.2e}, and {limit:.0e} is allowed"
            )
