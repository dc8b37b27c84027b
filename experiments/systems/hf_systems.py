"""Hugging Face with PEFT: static batches of one adapter, as in the paper, and PEFT's own mixed ones, until their
longest request is done. Timed from the first invocation to the last token, not loading, merging and capturing.
"""

import time
from collections.abc import Sequence
from itertools import groupby

import torch

from experiments.facts.systems import System
from experiments.systems.serving import WARM_STEPS, Served, ServingSystem, Step, World
from experiments.systems.stream import Job, Timeline


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
            forced = torch.tensor([row + [0] * (longest - len(row)) for row in own], device=self.world.device)
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
