"""Requests that every system serves: lengths and order of the released generator, random prompts. No torch.

Lengths are `released`, the generator's (D07), or `stated`, with the 101 generated tokens per request that the paper
prints (D01). Both are multiplied by `max_len / 2048`. The order of adapters is the released shuffle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.systems.timeline import Timeline
from experiments.workload import RequestLengths, popularity, released_lengths, rescaled, stated_lengths


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
    adapters = popularity(workload).requests(num_requests)
    words = np.random.Generator(np.random.PCG64(0))
    return [
        Job(tuple(words.integers(vocab_size, size=prompt).tolist()), int(output), int(adapter) + 1)
        for prompt, output, adapter in zip(drawn.prompt, drawn.output, adapters, strict=True)
    ]


def shortened(jobs: Sequence[Job], count: int, new_tokens: int) -> list[Job]:
    """Return the first `count` jobs, none longer than `new_tokens`: a stream for checks."""
    return [replace(job, new_tokens=min(job.new_tokens, new_tokens)) for job in jobs[:count]]


def timeline_of(jobs: Sequence[Job], admission: str, max_batch_size: int) -> Timeline:
    """Replay `jobs` under an admission rule of the engine, without preemption."""
    prompts = np.array([len(job.prompt) for job in jobs])
    lengths = RequestLengths(prompts, np.array([job.new_tokens for job in jobs]))
    return Timeline(lengths, [job.adapter_id for job in jobs], admission, max_batch_size)
