"""Rows of a run: throughput, waits, errors by kind, lag of the client."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.http_load.client import UNFINISHED, Answer
from experiments.http_load.loops import Run
from experiments.workload.arrivals import FEWEST_FOR_P99

MS = 1e3
LAG_SHARE, LAG_S = 0.1, 0.005
"""Lag of the client's event loop (p99) from which on it counts as the bottleneck: this part of the median time to
first token, and this time in seconds."""


def run_readings(run: Run) -> list[Reading]:
    """Readings of the requests that began in the measured time, and of what arrived in it.

    `CheckFailed`: no request began in it.
    """
    begin, end = run.span.measured
    users = [answer for answer in run.answers if begin <= answer.at < end]
    if not users:
        raise CheckFailed(f"no request began in {run.span.seconds:.3g} s: choose a longer time (figure.seconds)")
    right = [answer for answer in users if not answer.error]
    first = [_first_wait(answer, run.span.deadline) for answer in users if answer.error in ("", UNFINISHED)]
    late = is_late(run.lags, first)
    return [
        Reading("output_throughput", tokens_in(run.answers, begin, end) / run.span.seconds, "token/s"),
        Reading("request_rate", _ended_in(run.answers, begin, end) / run.span.seconds, "request/s"),
        *_waits("time_to_first_token", first),
        *_waits("time_per_output_token", [gap for answer in right if (gap := _gap(answer)) is not None]),
        *_waits("request_latency", [answer.end - answer.at for answer in right if answer.end is not None]),
        *_counts(users, right),
        *_waits("client_lag", run.lags),
        Reading("client_is_bottleneck", float(late), "share"),
    ]


def tokens_in(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Return the tokens of right answers in a time: those of their usage, shared out over their pieces, of which that
    time has some.
    """
    found = 0.0
    for answer in answers:
        if not answer.error and answer.pieces:
            inside = sum(begin <= at < end for at in answer.pieces)
            found += (answer.tokens or 0) * inside / len(answer.pieces)
    return found


def _first_wait(answer: Answer, deadline: float) -> float:
    """Return the wait for the first piece; of a request without one, which waited to the end, at least so long."""
    return (deadline if answer.first is None else answer.first) - answer.at


def is_late(lags: Sequence[float], first: Sequence[float]) -> bool:
    """Check that the client was the bottleneck: its event loop was late, or was never free."""
    if not lags:
        return True
    limit = max(LAG_S, LAG_SHARE * float(np.median(first))) if len(first) else LAG_S
    return float(np.percentile(lags, 99)) > limit


def _ended_in(answers: Sequence[Answer], begin: float, end: float) -> int:
    return sum(not one.error and one.end is not None and begin <= one.end < end for one in answers)


def _gap(answer: Answer) -> float | None:
    """Return the mean time between tokens; None of a single one."""
    tokens = answer.tokens or 0
    return (answer.pieces[-1] - answer.pieces[0]) / (tokens - 1) if tokens > 1 else None


def _waits(metric: str, seconds: Sequence[float]) -> list[Reading]:
    """Return median, p10 and p90, `_mean`, `_p95`, `_max` and, of `FEWEST_FOR_P99` or more, `_p99` in ms; nothing
    without samples.
    """
    if not len(seconds):
        return []
    values = [MS * value for value in seconds]
    shares = (95, 99) if len(values) >= FEWEST_FOR_P99 else (95,)
    far = [Reading(f"{metric}_p{share}", float(np.percentile(values, share)), "ms") for share in shares]
    mean = Reading(f"{metric}_mean", float(np.mean(values)), "ms")
    return [*sampled(metric, values, "ms"), mean, *far, Reading(f"{metric}_max", max(values), "ms")]


def _counts(users: Sequence[Answer], right: Sequence[Answer]) -> list[Reading]:
    """Count requests, errors by kind, answers that ended early, tokens."""
    kinds = Counter(answer.error for answer in users if answer.error)
    found = {"requests": len(users), "errors": kinds.total()}
    found |= {f"errors_{re.sub(r'[^a-z0-9]+', '_', kind)}": count for kind, count in sorted(kinds.items())}
    counted = {name: (number, "requests") for name, number in found.items()}
    counted["ended_early"] = sum(answer.ended_early for answer in right), "requests"
    counted["output_tokens"] = sum(answer.tokens or 0 for answer in right), "tokens"
    counted["prompt_tokens"] = sum(answer.prompt_tokens or 0 for answer in right), "tokens"
    return [Reading(name, number, unit, "count") for name, (number, unit) in counted.items()]
