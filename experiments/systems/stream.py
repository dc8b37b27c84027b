"""Requests that every system serves, and the replay of an admission rule on them, step by step. No torch. Lengths are
`released` (D07) or `stated` (D01), times `max_len / 2048`; between two changes of the batch steps are one stretch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from experiments.workload import RequestLengths, popularity, released_lengths, rescaled, stated_lengths
from punica.scheduling import ADMISSION_RULES, AdmissionRule, Request, RequestState

FEATURES = ("tokens", "rows", "context", "adapters", "prompts", "prefills")
"""Work of a step: tokens of prompts and new ones, requests in the batch, tokens whose keys are read, different
adapters, tokens of prompts alone, and whether there are any (1 or 0)."""


@dataclass(frozen=True)
class Job:
    """One request: prompt token ids, number of tokens to generate (no stop token), adapter id >= 1."""

    prompt: tuple[int, ...]
    new_tokens: int
    adapter_id: int


def paper_stream(
    workload: str, num_requests: int, max_len: int, vocab_size: int, lengths: str = "released"
) -> list[Job]:
    """Draw `num_requests` requests in order of arrival; `workload` decides their adapters and nothing else."""
    drawn = rescaled((stated_lengths if lengths == "stated" else released_lengths)(num_requests), max_len)
    return jobs_of(drawn, popularity(workload).requests(num_requests), vocab_size)


def jobs_of(drawn: RequestLengths, adapters: NDArray[np.int64], vocab_size: int) -> list[Job]:
    """Return requests of these lengths for these adapters, from 0, with random prompts."""
    words = np.random.Generator(np.random.PCG64(0))
    return [
        Job(tuple(words.integers(vocab_size, size=prompt).tolist()), int(output), int(adapter) + 1)
        for prompt, output, adapter in zip(drawn.prompt, drawn.output, adapters, strict=True)
    ]


def shortened(jobs: Sequence[Job], count: int, new_tokens: int) -> list[Job]:
    """Return the first `count` jobs, none longer than `new_tokens`: a stream for checks."""
    return [replace(job, new_tokens=min(job.new_tokens, new_tokens)) for job in jobs[:count]]


@dataclass(frozen=True)
class Stretch:
    """`steps` steps from `first` on with the same `members` (request, tokens before `first`), by admission; the last
    `joined` are prefilled in `first`. `begun`: requests that have joined by then.
    """

    first: int
    steps: int
    members: tuple[tuple[int, int], ...]
    joined: int
    begun: int

    @property
    def running(self) -> tuple[tuple[int, int], ...]:
        return self.members[: len(self.members) - self.joined]


class Timeline:
    """Steps of rule `admission` on requests of `lengths` for `adapters`, in batches of `max_batch` with up to `slots`
    adapters; all wait from the start. `order`: as they join. ValueError for a rule that lets none in.
    """

    def __init__(
        self, lengths: RequestLengths, adapters: Sequence[int], admission: str, max_batch: int, slots: int | None = None
    ) -> None:
        self.prompts, self.outputs = lengths.prompt.tolist(), lengths.output.tolist()
        self.adapters, self.max_batch, self.slots = list(adapters), max_batch, slots or max_batch
        self.order: list[int] = []
        self.stretches = self._replay(admission)
        self._starts = [stretch.first for stretch in self.stretches]
        self.steps = self._starts[-1] + self.stretches[-1].steps

    def with_adapters(self, adapters: Sequence[int]) -> "Timeline":
        """Return the same steps of requests for other `adapters`, for a rule that they do not part."""
        other = copy(self)
        other.adapters = list(adapters)
        other.__dict__.pop("means", None)
        return other

    def at(self, step: int) -> Stretch:
        if not 0 <= step < self.steps:
            raise ValueError(f"step must be in [0, {self.steps}), got {step}")
        whole = self.stretches[bisect_right(self._starts, step) - 1]
        passed = step - whole.first
        return Stretch(step, 1, self._grown(whole.members, passed), 0 if passed else whole.joined, whole.begun)

    def between(self, first: int, end: int) -> Iterator[Stretch]:
        while first < min(end, self.steps):
            whole = self.stretches[bisect_right(self._starts, first) - 1]
            steps = min(end, whole.first + whole.steps) - first
            yield replace(self.at(first), steps=steps)
            first += steps

    def features(self) -> NDArray[np.float64]:
        """Compute `FEATURES` of every step, `[steps, 6]`; not kept, since a million steps are 48 MB."""
        return np.concatenate([self._features(stretch) for stretch in self.stretches])

    @cached_property
    def means(self) -> dict[str, float]:
        return dict(zip(FEATURES, self.features().mean(axis=0).tolist(), strict=True))

    def _grown(self, members: Sequence[tuple[int, int]], steps: int) -> tuple[tuple[int, int], ...]:
        return tuple((request, min(done + steps, self.outputs[request])) for request, done in members)

    def _features(self, stretch: Stretch) -> NDArray[np.float64]:
        """A request with prompt p that has generated g attends to p + g tokens, and p + output - 1 when it is done."""
        features, passed = np.zeros((stretch.steps, len(FEATURES))), np.arange(stretch.steps)
        features[:, 1] = len(stretch.members)
        features[:, 3] = len({self.adapters[request] for request, _ in stretch.members})
        for request, done in stretch.members:
            features[: self.outputs[request] - done, 0] += 1
            features[:, 2] += self.prompts[request] + np.minimum(done + passed, self.outputs[request] - 1)
        features[0, 4] = sum(self.prompts[request] for request, _ in stretch.members[len(stretch.running) :])
        features[0, 5] = stretch.joined > 0
        features[0, 0] += features[0, 4]
        return features

    def _replay(self, admission: str) -> list[Stretch]:
        rule, stretches, step = ADMISSION_RULES.get(admission)(), list[Stretch](), 0
        states = [
            RequestState(Request(str(index), (0,) * prompt, output, SimpleNamespace(lora_int_id=adapter)))
            for index, (prompt, output, adapter) in enumerate(
                zip(self.prompts, self.outputs, self.adapters, strict=True)
            )
        ]
        members: tuple[tuple[int, int], ...] = ()
        waiting = list(states)
        while members or waiting:
            joined = self._joining(rule, [states[request] for request, _ in members], waiting)
            if not (members or joined):
                raise ValueError(f"admission rule {admission!r} lets no request into an empty batch")
            members += tuple((int(state.request_id), 0) for state in joined)
            self.order += [int(state.request_id) for state in joined]
            counts = [state.overtaken for state in waiting]
            more = self._joining(rule, [states[request] for request, _ in members], list(waiting))
            for state, count in zip(waiting, counts, strict=True):
                state.overtaken = count  # the probe admits no request
            left = min(self.outputs[request] - done for request, done in members if done < self.outputs[request])
            steps = 1 if more else left
            stretches.append(Stretch(step, steps, members, len(joined), len(self.order)))
            step, members = step + steps, self._grown(members, steps)
            unfinished = tuple((request, done) for request, done in members if done < self.outputs[request])
            members = members if rule.inseparable and unfinished else unfinished
        return stretches

    def _joining(
        self, rule: AdmissionRule, running: Sequence[RequestState], waiting: list[RequestState]
    ) -> list[RequestState]:
        """Remove from `waiting` and return the requests that join before the next step. Adapters count as resident."""
        joined: list[RequestState] = []
        while waiting and len(running) + len(joined) < self.max_batch:
            candidate, batch = rule.candidate(waiting, lambda request: True), [*running, *joined]
            adapters = {request.adapter_id for request in (*batch, candidate)}
            if not rule.allows(candidate, batch, joined) or len(adapters) > self.slots:
                break
            place = waiting.index(candidate)
            for earlier in waiting[:place]:
                earlier.overtaken += 1
            del waiting[place]
            joined.append(candidate)
        return joined


def timeline_of(jobs: Sequence[Job], admission: str, max_batch: int, slots: int | None = None) -> Timeline:
    """Replay `jobs` under an admission rule of the engine, without preemption."""
    prompts = np.array([len(job.prompt) for job in jobs])
    lengths = RequestLengths(prompts, np.array([job.new_tokens for job in jobs]))
    return Timeline(lengths, [job.adapter_id for job in jobs], admission, max_batch, slots)
