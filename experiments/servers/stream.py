"""Requests: adapters by popularity, lengths of chats. No torch."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.workload import popularity
from experiments.workload.traces import Trace

NONE = ""  # popularity of requests without adapters


@dataclass(frozen=True)
class Job:
    model: str
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Stream:
    """Chats of a popularity: lengths and adapters of `requests` of them come again and again, prompts are new.
    `adapters`: names; they take turns where the popularity has more. `lengths`: means of prompt and output.
    `trace`: has adapters, and lengths in proportion to the longest of the chats.
    """

    workload: str
    adapters: Sequence[str]
    requests: int
    lengths: Sequence[int]
    vocab_size: int
    seed: int
    trace: Trace | None = None

    def jobs(self) -> Iterator[Job]:
        lengths = stream_lengths(self.requests, *self.lengths)
        if self.trace:
            drawn = self.trace.lengths(longest(*self.lengths))
            lengths = list(zip(drawn.prompt.tolist(), drawn.output.tolist(), strict=True))
        adapters = self.trace.adapters if self.trace else popularity(self.workload).requests(self.requests)
        draws = np.random.Generator(np.random.PCG64(self.seed))
        while True:
            for (size, new), adapter in zip(lengths, adapters, strict=True):
                prompt = draws.integers(self.vocab_size, size=size).tolist()
                yield Job(self.adapters[adapter % len(self.adapters)], prompt, new)


def longest(prompt: int, new: int) -> int:
    """Return the most tokens of a chat of these mean lengths."""
    return 4 * prompt + round(1.6 * new)


def ids(workload: str, requests: int, adapters: int) -> list[int]:
    """Return the adapter id of each request of a batch, one of each adapter in turn; 0 without a popularity."""
    if workload == NONE:
        return [0] * requests
    sizes = popularity(workload).group_sizes(requests)
    return [1 + i % adapters for turn in range(max(sizes)) for i, size in enumerate(sizes) if turn < size]


def companies(requests: int, rows: int, repeats: int) -> list[list[int]]:
    """Draw batches of up to `rows` of `requests` in random order, all with request 1; the first is that one alone."""
    draw, batches, others = random.Random(0), [[1]], [0, *range(2, requests)]
    for _ in range(repeats - 1):
        batch = [1, *draw.sample(others, draw.randint(0, min(rows - 1, len(others))))]
        batches.append(draw.sample(batch, len(batch)))
    return batches


def stream_lengths(requests: int, prompt: int, new: int) -> list[tuple[int, int]]:
    """Draw lengths of prompts (log-normal, up to four times the mean `prompt`) and outputs (uniform about `new`)."""
    draw, spread, middle = random.Random(0), 0.8, math.log(prompt) - 0.8**2 / 2
    drawn = [(draw.lognormvariate(middle, spread), new * draw.uniform(0.4, 1.6)) for _ in range(requests)]
    return [(max(1, min(4 * prompt, round(length))), max(1, round(output))) for length, output in drawn]
