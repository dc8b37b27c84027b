"""Readings of a trace of requests that arrived by the clock (`open_loop`): latencies, steps, places of adapters."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import numpy as np

from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.harness.span import FEWEST_FOR_P99, Span
from experiments.systems.open_loop import DISK, MEMORY, SLOT, Counts, TimedStep, Trace, Traced, check_trace, counts_of

MS = 1e3


def load_readings(trace: Trace, span: Span) -> list[Reading]:
    """Latencies of the requests that arrived within the measured time of `span` (`users_of`), and steps in it."""
    users, (begin, end) = users_of(trace, span), span.measured
    steps = [step for step in trace.steps if begin <= step.end < end]
    return [*user_readings(users, trace), *step_readings(steps, span.seconds)]


def users_of(trace: Trace, span: Span) -> list[Traced]:
    """Return the requests that arrived within the measured time. `CheckFailed`: none did, or `check_trace`."""
    check_trace(trace)
    begin, end = span.measured
    users = [request for request in trace.requests if begin <= request.at < end]
    if not users:
        raise CheckFailed(f"no request arrived in {span.seconds:.3g} s: choose a longer time (figure.seconds)")
    return users


def user_readings(users: Sequence[Traced], trace: Trace) -> list[Reading]:
    """Latencies of some of the requests of `trace` in ms, median, p10, p90 and the `tail`; and counts of requests.

    `time_per_output_token` is a request's mean gap between tokens, `inter_token_latency` every single gap.
    """

    def waits(times: Iterable[float | None]) -> list[float]:
        ends = (trace.end if end is None else end for end in times)
        return [end - request.at for end, request in zip(ends, users, strict=True)]

    gaps = [
        (request.last - request.first) / (request.tokens - 1)
        for request in users
        if request.first is not None and request.last is not None and request.tokens > 1
    ]
    steps = [float(request.step - request.before + 1) for request in users if request.step is not None]
    return [
        *tail("time_to_first_token", waits(one.first for one in users), MS, "ms"),
        *tail("time_per_output_token", gaps, MS, "ms"),
        *tail("inter_token_latency", [gap for request in users for gap in request.gaps], MS, "ms"),
        *tail("request_latency", waits(one.last if one.is_done else None for one in users), MS, "ms"),
        *tail("queue_time", waits(one.joined for one in users), MS, "ms"),
        *tail("steps_to_first_token", steps, 1.0, "steps"),
        *_counts(users, counts_of(trace.requests, trace.strangers)),
    ]


def tail(metric: str, samples: Sequence[float], scale: float, unit: str) -> list[Reading]:
    """Return `sampled`, `_p95`, `_max` and, of `FEWEST_FOR_P99` samples or more, `_p99`; nothing without samples."""
    if not samples:
        return []
    values = [scale * sample for sample in samples]
    shares = (95, 99) if len(values) >= FEWEST_FOR_P99 else (95,)
    far = [Reading(f"{metric}_p{share}", float(np.percentile(values, share)), unit) for share in shares]
    return [*sampled(metric, values, unit), *far, Reading(f"{metric}_max", max(values), unit)]


def step_readings(steps: Sequence[TimedStep], seconds: float) -> list[Reading]:
    """Throughput, batch, and step times with and without a prompt, of steps that ended within `seconds`."""
    if not steps:
        return []
    tokens = sum(step.live + step.prompt_rows for step in steps)
    found = [
        Reading("throughput", tokens / seconds, "token/s"),
        Reading("busy", min(1.0, sum(step.seconds for step in steps) / seconds), "share"),
        Reading("mean_batch_size", fmean(step.live for step in steps), "requests"),
        Reading("waiting_at_end", steps[-1].waiting, "requests", "count"),
        Reading("steps", len(steps), "steps", "count"),
    ]
    for name, chosen in (
        ("decode_step", [step.seconds for step in steps if not step.prompt_rows]),
        ("prefill_step", [step.seconds for step in steps if step.prompt_rows]),
    ):
        found += [Reading(name, MS * median(chosen), "ms")] if chosen else []
    return found


def place_readings(users: Sequence[Traced]) -> list[Reading]:
    """Hit rates of slots and host memory at arrival and (`_at_join`) at a request's turn, and waits for the first token
    by the adapter's place at that turn.

    An adapter can be evicted from its slot while its request waits, and is then loaded like any other.
    """
    joined = [user for user in users if user.first is not None and user.at_join is not None]
    waits: dict[str, list[float]] = {
        place: [user.first - user.at for user in joined if user.at_join == place and user.first is not None]
        for place in (SLOT, MEMORY, DISK)
    }
    found = _hits([user.place for user in users], "") + _hits([str(user.at_join) for user in joined], "_at_join")
    loading = waits[MEMORY] + waits[DISK]
    for name, samples in (
        ("resident", waits[SLOT]), ("loading", loading), ("from_memory", waits[MEMORY]), ("from_disk", waits[DISK]),
    ):  # fmt: skip
        found += tail(f"time_to_first_token_{name}", samples, MS, "ms")
    if waits[SLOT] and loading:
        found.append(Reading("loading_over_resident", median(loading) / median(waits[SLOT]), "ratio"))
    return found


def _hits(places: Sequence[str], when: str) -> list[Reading]:
    if not places:
        return []
    return [
        Reading(f"slot_hit_rate{when}", sum(place == SLOT for place in places) / len(places), "share"),
        Reading(f"memory_hit_rate{when}", sum(place != DISK for place in places) / len(places), "share"),
    ]


def _counts(users: Sequence[Traced], of_all: Counts) -> list[Reading]:
    found = {"requests": len(users), "unfinished": sum(not user.is_done for user in users)}
    found |= {"lost": of_all.lost, "doubled": of_all.doubled, "starved": of_all.starved}
    return [Reading(name, count, "requests", "count") for name, count in found.items()]
