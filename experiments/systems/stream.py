"""The requests that every system serves: the released generator's lengths and order, random prompts. No torch.

Lengths are `scaled_lengths`: the released ones (seed, log-normal prompts, uniform totals; D07) multiplied by `max_len /
2048`, so that a laptop serves the paper's mix of short and long, 2.3 % prompt tokens included; at `max_len = 2048` they
are the released ones bit for bit. The order of adapters is the released shuffle.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from punica.workload import popularity, replay_continuous, replay_static, scaled_lengths


@dataclass(frozen=True)
class Job:
    """One request: prompt token ids, how many tokens to generate (forced, no stop token), adapter id >= 1."""

    prompt: tuple[int, ...]
    new_tokens: int
    adapter_id: int


def paper_stream(workload: str, num_requests: int, max_len: int, vocab_size: int) -> list[Job]:
    """`num_requests` requests in order of arrival; all are there from the start, as in the paper.

    `workload` decides only who asks for which adapter; prompts and lengths are the same for all workloads.
    """
    lengths = scaled_lengths(num_requests, max_len)
    adapters = popularity(workload).requests(num_requests)
    words = np.random.Generator(np.random.PCG64(0))
    return [
        Job(tuple(words.integers(vocab_size, size=prompt).tolist()), int(output), int(adapter) + 1)
        for prompt, output, adapter in zip(lengths.prompt, lengths.output, adapters, strict=True)
    ]


def shortened(jobs: Sequence[Job], count: int, new_tokens: int) -> list[Job]:
    """The first `count` jobs, none longer than `new_tokens`: a stream for checks."""
    return [replace(job, new_tokens=min(job.new_tokens, new_tokens)) for job in jobs[:count]]


def steps_taken(jobs: Sequence[Job], admission: str, max_batch_size: int) -> int:
    """Model invocations that `jobs` take under an admission rule of the engine, by replay (without preemption)."""
    outputs = [job.new_tokens for job in jobs]
    adapters = [job.adapter_id for job in jobs]
    match admission:
        case "fcfs":
            return replay_continuous(outputs, adapters, max_batch_size).steps
        case "single_adapter":  # a new adapter waits until the batch is empty: run after run of one adapter
            runs = [list(run) for _, run in groupby(jobs, key=lambda job: job.adapter_id)]
            return sum(steps_taken(run, "fcfs", max_batch_size) for run in runs)
        case "static":
            return replay_static(outputs, adapters, max_batch_size).steps
        case "static_mixed":
            return replay_static(outputs, [0] * len(jobs), max_batch_size).steps
    raise ValueError(f"no replay for the admission rule {admission!r}; add it to steps_taken in {__name__}")


def prefix_of_steps(jobs: Sequence[Job], admission: str, max_batch_size: int, max_steps: int | None) -> list[Job]:
    """The longest prefix of `jobs`, at least one, that takes at most `max_steps` model invocations; `None`: all jobs.

    This is how a laptop measures systems whose batches hold one request. Their speed is the same at every moment, so a
    few hundred steps show it; the thousands that the whole stream takes would only repeat it. A system with large
    batches needs the whole stream, with its ramp and its tail, and gets it, since it takes few steps.
    """
    if max_steps is None or steps_taken(jobs, admission, max_batch_size) <= max_steps:
        return list(jobs)
    # steps grow with the prefix; of the lengths from 1 on, as many fit as the longest that fits is long
    lengths = range(1, len(jobs))
    fitting = bisect_right(lengths, max_steps, key=lambda length: steps_taken(jobs[:length], admission, max_batch_size))
    return list(jobs[: max(1, fitting)])
