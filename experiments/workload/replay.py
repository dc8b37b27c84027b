"""Step counts of the paper's scheduling rules on a set of requests, with no model: arithmetic on lengths.

One step is one invocation of the model. A request with L new tokens takes part in L steps; the first is its prefill.

* continuous batching, as Punica does it: at most one new request joins per step, and its prefill runs together with the
  decode rows of the others;
* continuous batching as the paper runs vLLM: at most one new request per step, only when its adapter is the one that
  runs already, and a prefill step runs alone while the others wait;
* static batching (Hugging Face, DeepSpeed, FasterTransformer): consecutive requests for one adapter, run until the
  longest of them is done.

Between two admissions or departures nothing changes, so the replay jumps there: 1000 requests take milliseconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

Batch = list[tuple[int, int]]
"""New tokens left and adapter of each running request."""

MAX_BATCH = 32
"""Largest batch in the paper (section 5.1)."""


@dataclass
class Replay:
    """Step counts of a replay, by batch size (requests) and by number of LoRA segments.

    ``prefill_steps`` counts steps that ran one prefill alone; they are in neither table. ``batches`` counts the
    batches that static batching formed.
    """

    steps_by_batch: Counter[int] = field(default_factory=Counter)
    steps_by_segments: Counter[int] = field(default_factory=Counter)
    prefill_steps: int = 0
    batches: int = 0

    @property
    def decode_steps(self) -> int:
        """Steps in ``steps_by_batch``."""
        return sum(self.steps_by_batch.values())

    @property
    def steps(self) -> int:
        """All invocations of the model."""
        return self.decode_steps + self.prefill_steps

    @property
    def mean_batch(self) -> float:
        """Mean number of requests in a step that decodes."""
        return _mean(self.steps_by_batch)

    @property
    def largest_batch(self) -> int:
        """Largest number of requests in a step."""
        return max(self.steps_by_batch)

    @property
    def mean_segments(self) -> float:
        """Mean number of LoRA segments in a step that decodes."""
        return _mean(self.steps_by_segments)

    def share(self, smallest: int, largest: int) -> float:
        """Return the share of decode steps whose batch size is in [smallest, largest]."""
        inside = sum(steps for size, steps in self.steps_by_batch.items() if smallest <= size <= largest)
        return inside / self.decode_steps


def replay_continuous(outputs: Sequence[int], adapters: Sequence[int], max_batch: int = MAX_BATCH) -> Replay:
    """Punica's rule: first come first served, any mix of adapters, one admission per step, prefill joined to decode.

    Rows of the prefill come first, then decode rows sorted by adapter. A prefill is a segment of its own unless its
    adapter has the lowest number of those that decode.
    """
    _check(outputs, adapters, max_batch)
    replay = Replay()
    running: Batch = []
    waiting = list(zip(outputs, adapters, strict=True))[::-1]
    while waiting or running:
        if waiting and len(running) < max_batch:
            decoding = {adapter for _, adapter in running}
            running.append(waiting.pop())
            joined = bool(decoding) and running[-1][1] == min(decoding)
            running = _advance(replay, running, 1, len(decoding) + (not joined))
        else:
            running = _advance(replay, running)
    return replay


def replay_one_adapter(outputs: Sequence[int], adapters: Sequence[int], max_batch: int = MAX_BATCH) -> Replay:
    """The paper's vLLM rule: as above, but only one adapter at a time, and a prefill runs alone."""
    _check(outputs, adapters, max_batch)
    replay = Replay()
    running: Batch = []
    waiting = list(zip(outputs, adapters, strict=True))[::-1]
    while waiting or running:
        if waiting and len(running) < max_batch and (not running or running[0][1] == waiting[-1][1]):
            left, adapter = waiting.pop()
            replay.prefill_steps += 1
            if left > 1:  # the prefill gave the first token
                running.append((left - 1, adapter))
        else:
            running = _advance(replay, running)
    return replay


def replay_static(outputs: Sequence[int], adapters: Sequence[int], max_batch: int = MAX_BATCH) -> Replay:
    """Static batches of consecutive requests for one adapter; rows that are done stay and count as no work."""
    _check(outputs, adapters, max_batch)
    replay = Replay()
    for _, run in groupby(zip(outputs, adapters, strict=True), key=itemgetter(1)):
        requests = list(run)
        for start in range(0, len(requests), max_batch):
            replay.batches += 1
            running = requests[start : start + max_batch]
            while running:
                running = _advance(replay, running)
    return replay


def _advance(replay: Replay, running: Batch, steps: int = 0, segments: int = 0) -> Batch:
    """Run ``steps`` (0: until the first request leaves) of ``segments`` (0: one per adapter), then drop who is done."""
    steps = steps or min(left for left, _ in running)
    replay.steps_by_batch[len(running)] += steps
    replay.steps_by_segments[segments or len({adapter for _, adapter in running})] += steps
    return [(left - steps, adapter) for left, adapter in running if left > steps]


def _mean(steps_by: Counter[int]) -> float:
    return sum(value * steps for value, steps in steps_by.items()) / sum(steps_by.values())


def _check(outputs: Sequence[int], adapters: Sequence[int], max_batch: int) -> None:
    if len(outputs) != len(adapters):
        raise ValueError(f"outputs and adapters need one entry per request, got {len(outputs)} and {len(adapters)}")
    if len(outputs) == 0 or min(outputs) < 1:
        raise ValueError("outputs must hold at least one request, each with at least one new token")
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1, got {max_batch}")
