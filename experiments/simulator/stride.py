"""Strides of a simulated GPU: steps in a row of the same requests, computed at once.

A stride ends with the step after which the GPU's requests may change: one of them has all its tokens, one waits for its
prefill, or pages could run out. No decision of the policy falls between its steps, so its end is the only event of it.
A request that is placed meanwhile cuts the stride to the step in flight. `Stride.catch_up` brings the policy's model of
the GPU up to date, before the policy checks it for room.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate
from math import inf

from experiments.simulator.latency import StepCost
from punica.cluster.gpu import Gpu, StepWork


class StepRecord:
    """Steps of all GPUs: tokens by second, prompts with their first token; GPU time by batch size; and how many."""

    def __init__(self, max_batch_size: int) -> None:
        self.tokens: defaultdict[int, int] = defaultdict(int)
        self.seconds_by_batch = [0.0] * (max_batch_size + 1)
        self.steps = 0


class Stride:
    """Stride of one GPU, with ``row`` among the GPUs in the order of their names, and its ``record``.

    Attributes:
        stop: time of its next event, the end of the stride or of a load that it waits for; infinite without one.
        is_running: a step is in flight.
        batch: [seconds], different requests that got a token.
        size: requests of its steps.
        leaving: a heap of the last step of each request that is prefilled here, its number, name and first step.
            An evicted request stays in it.
        known_at: when the next step was launched, beside the last one; infinite where it was not.
    """

    def __init__(self, gpu: Gpu, row: int, record: StepRecord) -> None:
        self.gpu, self.row, self.record = gpu, row, record
        self.stop = inf
        self.is_running = False
        self.batch: list[int] = []
        self.size = 0
        self.leaving: list[tuple[int, int, str, int]] = []
        self.known_at = inf
        self._ends: list[float] = []  # of its steps
        self._done = 0  # steps that have ended
        self._began = 0.0  # the step in flight
        self._joined = self._prompt_tokens = 0  # prefills of the first step, and their tokens

    @property
    def began(self) -> float:
        """Begin of the step in flight."""
        return self._ends[self._done - 1] if self._done else self._began

    def begin(
        self, now: float, work: StepWork, joined: int, prompt_tokens: int, cost: StepCost, further: int
    ) -> float:  # fmt: skip
        """Begin a stride of a step of ``work``, with ``joined`` prefills, and ``further`` steps of the same requests.
        ``prompt_tokens`` come out with the first step, whose end is returned.
        """
        self.is_running, self._done, self._began = True, 0, now
        self.size, self._joined, self._prompt_tokens = work.decodes + joined, joined, prompt_tokens
        first_end = now + _positive(cost.seconds(work), cost)
        self._ends = [first_end]
        if further:
            kv_tokens = self.gpu.decoding_kv_tokens + self.size
            each = cost.decode_seconds(self.size, kv_tokens, work.adapter_ranks, further)
            _positive(min(each[0], each[-1]), cost)  # linear between
            self._ends = list(accumulate(each, initial=first_end))
        self.stop = self._ends[-1]
        return first_end

    def cut(self, now: float, row: int) -> bool:
        """End the stride with the step in flight; False when it does so already."""
        self.catch_up(now, row)
        if len(self._ends) == self._done + 1:
            return False
        del self._ends[self._done + 1 :]
        self.stop = self._ends[-1]
        return True

    def catch_up(self, now: float, row: int) -> None:
        """End the steps that end until ``now``; of those at ``now`` the ones up to GPU ``row``, whose event it is."""
        if not self.is_running or self._ends[self._done] > now:
            return
        bisect = bisect_right if self.row <= row else bisect_left
        ended = bisect(self._ends, now)
        if ended > self._done:
            self.gpu.advance(ended - self._done)
            self._record(ended)

    def end(self) -> float:
        """End the last step, and return when it began. Its caller tells the policy."""
        if further := len(self._ends) - 1 - self._done:
            self.gpu.advance(further)
            self._record(len(self._ends) - 1)
        began = self.began
        self._record(len(self._ends))
        self.is_running, self.stop = False, inf
        return began

    def _record(self, ended: int) -> None:
        """Record the steps before ``ended``."""
        ends, done, record = self._ends, self._done, self.record
        record.seconds_by_batch[self.size] += ends[ended - 1] - self.began
        record.steps += ended - done
        self._done = ended
        if done == 0:
            second = int(ends[0])
            record.tokens[second] += self.size + self._prompt_tokens
            self._count(second, self._joined)
            done = 1
        while done < ended:
            second = int(ends[done])
            until = bisect_left(ends, second + 1, done, ended)
            record.tokens[second] += self.size * (until - done)
            self._count(second, 0)
            done = until

    def _count(self, second: int, joined: int) -> None:
        """Count the requests of a second: all of its first step, those that joined in later ones."""
        batch = self.batch
        if second < len(batch):
            batch[second] += joined
        else:
            batch.extend([0] * (second - len(batch)))
            batch.append(self.size)


def _positive(seconds: float, cost: StepCost) -> float:
    if not seconds > 0:
        raise RuntimeError(f"cost model {cost.name!r} gives a step of {seconds!r} s; it must be positive")
    return seconds
