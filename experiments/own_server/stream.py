"""Requests with the lengths of chats, the same for server and engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.http_load.client import Job
from experiments.today.bench import stream_lengths
from experiments.workload import popularity


@dataclass(frozen=True)
class Stream:
    """Chats of a popularity: lengths and adapters of `requests` of them come again and again, prompts are new.

    `lengths`: means of prompt and output. `adapters`: names. `seed`: of the prompts.
    """

    workload: str
    requests: int
    lengths: Sequence[int]
    vocab_size: int
    adapters: Sequence[str]
    seed: int

    def jobs(self) -> Iterator[Job]:
        """Yield requests without end."""
        lengths = stream_lengths(self.requests, *self.lengths)
        adapters = popularity(self.workload).requests(self.requests)
        draws = np.random.Generator(np.random.PCG64(self.seed))
        while True:
            for (prompt, new), adapter in zip(lengths, adapters, strict=True):
                yield Job(self.adapters[adapter], draws.integers(self.vocab_size, size=prompt).tolist(), new)
