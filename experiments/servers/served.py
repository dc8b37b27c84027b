"""A server: batches as of `worker`'s engines, loads, and rows of these: throughput, waits, errors, the client's lag."""

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading
from experiments.servers.client import FIELDS, UNFINISHED, Answer, Client, Run, Server, run
from experiments.servers.stream import Job, Stream
from experiments.systems.open_loop import tail
from experiments.workload.arrivals import Span

LAG_SHARE, LAG_S = 0.1, 0.005
"""Lag of the client's event loop (p99) from which on it counts as the bottleneck: this part of the median time to
first token, and this time in seconds."""


class Served:
    """A server behind the interface of `worker`'s engines, and under loads. `fields`: as `Client` has them."""

    def __init__(self, server: Server, key: str = "", fields: Collection[str] = FIELDS) -> None:
        self.server, self.key, self.fields, self.about = server, key, fields, server.label

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        """Continue every prompt by exactly its number of new tokens, over a connection of its own that is opened now.
        Its tokens are the words ``w1``, ``w2`` and so on; -1 is any other.
        """
        names = [self.server.base, *self.server.adapters]
        asked = zip(adapters, prompts, new_tokens, strict=True)
        answers = [Answer(0.0, Job(names[adapter], prompt, count)) for adapter, prompt, count in asked]

        async def send() -> None:
            async with Client(self.server, self.key, self.fields) as client:
                await asyncio.gather(*map(client.send, answers))

        asyncio.run(send())
        if wrong := next((answer for answer in answers if answer.error), None):
            raise CheckFailed(f"{self.about}: {wrong.error} {wrong.detail}")
        found = [list(map(int, re.findall(r"\bw(\d+)", answer.text))) for answer in answers]
        return [[*tokens, *[-1] * count][:count] for tokens, count in zip(found, new_tokens, strict=True)]

    def load(self, streams: Mapping[str, Stream], loads: Mapping[str, float], span: Span) -> dict[str, Any]:
        """Return the readings by panel and popularity: of each load, requests in flight (int) or per second (float)."""
        cells = [(panel, name) for name in streams for panel in loads]
        return {
            "readings": {cell: asyncio.run(self._readings(streams[cell[1]], loads[cell[0]], span)) for cell in cells}
        }

    async def _readings(self, stream: Stream, load: float, span: Span) -> list[Reading]:
        """Run one load. `CheckFailed`: no answer is right."""
        if stream.trace:
            span = replace(span, bursts=stream.trace.arrivals)
        arrivals = load if isinstance(load, int) else span.arrivals(load, stream.seed).tolist()
        async with Client(self.server, self.key, self.fields) as client:
            found = await run(client, stream.jobs(), span, arrivals)
        if found.answers and all(answer.error for answer in found.answers):
            first = found.answers[0]
            raise CheckFailed(
                f"{self.server.url} gives no right answer as {first.job.model}: {first.error} {first.detail[:300]} "
                "(its streams need usage, stream_options.include_usage; figure.fields= has the fields that it takes)"
            )
        rate = [] if isinstance(load, int) else [Reading("offered_rate", load, "request/s")]
        return [*rate, *run_readings(found)]


def run_readings(run: Run) -> list[Reading]:
    """Readings of requests that began in the measured time, and of what arrived in it. `CheckFailed`: none began."""
    begin, end = run.span.measured
    users = [answer for answer in run.answers if begin <= answer.at < end]
    if not users:
        raise CheckFailed(f"no request began in {run.span.seconds:.3g} s: choose a longer time (figure.seconds)")
    right = [answer for answer in users if not answer.error]
    gaps = [(one.pieces[-1] - one.pieces[0]) / (one.tokens - 1) for one in right if one.tokens and one.tokens > 1]
    ended = sum(not one.error and one.end is not None and begin <= one.end < end for one in run.answers)
    waiting = [answer for answer in users if answer.error in ("", UNFINISHED)]  # to the deadline, or longer
    first = [(answer.pieces[0] if answer.pieces else run.span.deadline) - answer.at for answer in waiting]
    return [
        Reading("output_throughput", tokens_in(run.answers, begin, end) / run.span.seconds, "token/s"),
        Reading("request_rate", ended / run.span.seconds, "request/s"),
        *_waits("time_to_first_token", first),
        *_waits("time_per_output_token", gaps),
        *_waits("request_latency", [answer.end - answer.at for answer in right if answer.end is not None]),
        *_counts(users, right),
        *_waits("client_lag", run.lags),
        Reading("client_is_bottleneck", float(is_late(run.lags, first)), "share"),
    ]


def tokens_in(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Return the tokens of right answers in a time: those of their usage, shared out over their pieces."""
    right = [answer for answer in answers if not answer.error and answer.pieces]
    inside = [sum(begin <= at < end for at in answer.pieces) / len(answer.pieces) for answer in right]
    return sum((answer.tokens or 0) * share for answer, share in zip(right, inside, strict=True))


def is_late(lags: Sequence[float], first: Sequence[float]) -> bool:
    """Check that the client was the bottleneck: its event loop was late, or was never free."""
    if not lags:
        return True
    limit = max(LAG_S, LAG_SHARE * float(np.median(first))) if len(first) else LAG_S
    return float(np.percentile(lags, 99)) > limit


def _waits(metric: str, seconds: Sequence[float]) -> list[Reading]:
    """Return `tail` and `_mean` in ms; nothing without samples."""
    mean = [Reading(f"{metric}_mean", 1e3 * float(np.mean(seconds)), "ms")] if len(seconds) else []
    return [*tail(metric, seconds, 1e3, "ms"), *mean]


def _counts(users: Sequence[Answer], right: Sequence[Answer]) -> list[Reading]:
    kinds = Counter(answer.error for answer in users if answer.error)
    found = {"requests": len(users), "errors": kinds.total()}
    found |= {f"errors_{re.sub(r'[^a-z0-9]+', '_', kind)}": count for kind, count in sorted(kinds.items())}
    found["ended_early"] = sum((answer.tokens or 0) < answer.job.new_tokens for answer in right)
    output, prompt = (sum(counts) for counts in ([a.tokens or 0 for a in right], [a.prompt_tokens or 0 for a in right]))
    return [
        *(Reading(name, number, "requests", "count") for name, number in found.items()),
        Reading("output_tokens", output, "tokens", "count"), Reading("prompt_tokens", prompt, "tokens", "count"),
    ]  # fmt: skip
