"""Replay of a stream under an admission rule, step by step and without a model. No torch.

The rule is the engine's own (`punica.scheduling.admission`), so a rule that reorders the queue is replayed as it runs.
Between two changes of the batch every request grows by a token per step, so that a stream of 1000 requests and a
million steps is a few thousand stretches.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from experiments.workload import RequestLengths
from punica.scheduling import ADMISSION_RULES, AdmissionRule, Request, RequestState

FEATURES = ("tokens", "rows", "context", "adapters", "prompts", "prefills")
"""Work of a step: tokens of prompts and new ones, requests in the batch, tokens whose keys are read, different
adapters, tokens of prompts alone, and whether there are any (1 or 0)."""


def state_of(name: str, new_tokens: int, adapter_id: int, prompt: int = 1) -> RequestState:
    """Build a waiting request for an admission rule to decide about; its prompt is as long, and zeros."""
    return RequestState(Request(name, (0,) * prompt, new_tokens, SimpleNamespace(lora_int_id=adapter_id)))


def take_joining(
    rule: AdmissionRule, running: Sequence[RequestState], waiting: list[RequestState], most: int,
    fits: Callable[[Sequence[RequestState]], bool] = lambda batch: True,
) -> list[RequestState]:  # fmt: skip
    """Remove from `waiting` and return the requests that `rule` lets join before the next step.

    `most`: requests of a batch. `fits`: whether a batch of these may run. Adapters count as resident.
    """
    admitted: list[RequestState] = []
    while waiting and len(running) + len(admitted) < most:
        candidate = rule.candidate(waiting, lambda request: True)
        batch = [*running, *admitted]
        if not (rule.allows(candidate, batch, admitted) and fits([*batch, candidate])):
            break
        place = waiting.index(candidate)
        for earlier in waiting[:place]:
            earlier.overtaken += 1
        del waiting[place]
        admitted.append(candidate)
    return admitted


@dataclass(frozen=True)
class Stretch:
    """``steps`` steps from step ``first`` on with the same ``members``.

    ``members``: (request, tokens generated before ``first``) in order of admission. Requests are numbered by arrival.
    The last ``joined`` of them are prefilled in step ``first``; those that are done, in static batches, do not grow.
    ``begun``: requests that have joined by then, those of this stretch included.
    """

    first: int
    steps: int
    members: tuple[tuple[int, int], ...]
    joined: int
    begun: int


class Timeline:
    """Steps of the rule ``admission`` on requests of ``lengths`` for ``adapters`` (one each), in batches of
    ``max_batch``. All requests wait from the start.

    ``order``: requests in the order in which they join. ValueError for an unknown rule, for one that lets no request
    into an empty batch, and for a number of adapters that is not that of the requests.
    """

    def __init__(self, lengths: RequestLengths, adapters: Sequence[int], admission: str, max_batch: int) -> None:
        if len(adapters) != len(lengths):
            raise ValueError(f"adapters must have one entry for each of {len(lengths)} requests, got {len(adapters)}")
        self.prompts, self.outputs = lengths.prompt.tolist(), lengths.output.tolist()
        self.adapters, self.admission, self.max_batch = list(adapters), admission, max_batch
        self.order: list[int] = []
        self.stretches = self._replay(ADMISSION_RULES.get(admission)())

    def with_adapters(self, adapters: Sequence[int]) -> "Timeline":
        """Return the same steps of requests for other ``adapters``: what the rule makes of them if none are parted."""
        other = copy(self)
        other.adapters = list(adapters)
        other.__dict__.pop("means", None)
        return other

    @property
    def steps(self) -> int:
        """Steps until all are served."""
        last = self.stretches[-1]
        return last.first + last.steps

    def at(self, step: int) -> Stretch:
        """Return the stretch of one step that begins at ``step``."""
        place = bisect_right(self._starts, step) - 1
        if not 0 <= step < self.steps:
            raise ValueError(f"step must be in [0, {self.steps}), got {step}")
        found = self.stretches[place]
        passed = step - found.first
        members = tuple((request, self._grown(request, done, passed)) for request, done in found.members)
        return Stretch(step, 1, members, 0 if passed else found.joined, found.begun)

    def between(self, first: int, end: int) -> Iterator[Stretch]:
        """Yield the stretches of steps ``[first, end)``, cut where these begin and end."""
        while first < min(end, self.steps):
            whole = self.stretches[bisect_right(self._starts, first) - 1]
            steps = min(end, whole.first + whole.steps) - first
            yield replace(self.at(first), steps=steps)
            first += steps

    def features(self) -> NDArray[np.float64]:
        """Compute `FEATURES` of every step, ``[steps, 6]``; not kept, since a million steps are 48 MB."""
        return np.concatenate([self._features(stretch) for stretch in self.stretches])

    @cached_property
    def means(self) -> dict[str, float]:
        """`FEATURES` per step, over the whole stream."""
        return dict(zip(FEATURES, self.features().mean(axis=0).tolist(), strict=True))

    def _grown(self, request: int, done: int, steps: int) -> int:
        return min(done + steps, self.outputs[request])

    def _features(self, stretch: Stretch) -> NDArray[np.float64]:
        """A request with prompt p that has generated g attends to p + g tokens, and p + output - 1 when it is done."""
        found = np.zeros((stretch.steps, len(FEATURES)))
        found[:, 1] = len(stretch.members)
        found[:, 3] = len({self.adapters[request] for request, _ in stretch.members})
        passed = np.arange(stretch.steps)
        for request, done in stretch.members:
            left = self.outputs[request] - done
            found[:left, 0] += 1
            found[:, 2] += self.prompts[request] + np.minimum(done + passed, self.outputs[request] - 1)
        joined = stretch.members[len(stretch.members) - stretch.joined :]
        found[0, 4] = sum(self.prompts[request] for request, _ in joined)
        found[0, 5] = bool(joined)
        found[0, 0] += found[0, 4]
        return found

    @cached_property
    def _starts(self) -> list[int]:
        return [stretch.first for stretch in self.stretches]

    def _replay(self, rule: AdmissionRule) -> list[Stretch]:
        requests = zip(self.outputs, self.adapters, self.prompts, strict=True)
        states = [state_of(str(i), *one) for i, one in enumerate(requests)]
        stretches: list[Stretch] = []
        members: list[tuple[int, int]] = []
        step, waiting = 0, list(states)

        def joining(queue: list[RequestState]) -> list[RequestState]:
            return take_joining(rule, [states[request] for request, _ in members], queue, self.max_batch)

        while members or waiting:
            joined = [int(state.request_id) for state in joining(waiting)]
            if not (members or joined):
                raise ValueError(f"admission rule {self.admission!r} lets no request into an empty batch")
            members += [(request, 0) for request in joined]
            self.order += joined
            left = min(self.outputs[request] - done for request, done in members if done < self.outputs[request])
            counts = [state.overtaken for state in waiting]
            steps = 1 if joining(list(waiting)) else left
            for state, count in zip(waiting, counts, strict=True):
                state.overtaken = count  # the probe admits no request
            stretches.append(Stretch(step, steps, tuple(members), len(joined), len(self.order)))
            step += steps
            members = [(request, self._grown(request, done, steps)) for request, done in members]
            unfinished = [(request, done) for request, done in members if done < self.outputs[request]]
            members = members if rule.inseparable and unfinished else unfinished
        return stretches
