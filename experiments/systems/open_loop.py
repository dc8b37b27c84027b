"""Open-loop driver: requests that arrive by the clock, whatever the engine has done, and their readings. A token is
delivered when its step has returned. `users_of` refuses a trace in which a request was lost, doubled or starved.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from experiments.benches.engine_steps import clear
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.systems.engine_systems import timed_step
from experiments.systems.serving import Step
from experiments.workload.arrivals import FEWEST_FOR_P99, Span
from punica.engine import Engine, Request
from punica.scheduling.admission import MOST_OVERTAKES

Clock = Callable[[], float]
SLOT, MEMORY, DISK = PLACES = ("slot", "memory", "disk")  # places of an adapter, the nearest first
NEAR = 2
"""Requests at the head of the queue whose adapters are loaded beside a step: the next to join, and the one after."""
MS = 1e3


class Arrival(NamedTuple):
    """A request and the second, from the start, at which it arrives."""

    request: Request
    at: float


@dataclass
class Traced:
    """A request; seconds from the start, steps by number. `place` of its adapter at arrival; `at_join`: the farthest
    once it was among the `NEAR` next ones; `before`: steps begun at arrival; `step` of its first token; `gaps`.
    """

    at: float
    wanted: int
    place: str
    before: int
    at_join: str | None = None
    step: int | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ended: int = 0
    gaps: list[float] = field(default_factory=list)

    def note_token(self, step: Step, number: int) -> None:
        if self.last is None:
            self.first, self.step = step.end, number
        else:
            self.gaps.append(step.end - self.last)
        self.tokens, self.last = self.tokens + 1, step.end


@dataclass
class Trace:
    """Requests by arrival, steps, `end` of the driver; `strangers`: tokens for requests ended or unknown."""

    requests: list[Traced] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: float = 0.0
    strangers: int = 0


def drive(
    engine: Engine, arrivals: Sequence[Arrival], measured: tuple[float, float], deadline: float,
    place_of: Callable[[Request], str], clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> Trace:  # fmt: skip
    """Serve `arrivals` until all within `measured` (from, to; s) are done, or until `deadline`, when the rest is taken
    out. Later arrivals are served as well, so that none meets an empty engine.
    """
    trace, known = Trace(), dict[str, Traced]()
    waited_for = sum(measured[0] <= arrival.at < measured[1] for arrival in arrivals)
    begin, added = clock(), 0

    def passed() -> float:
        return clock() - begin

    while (now := passed()) < deadline:
        while added < len(arrivals) and arrivals[added].at <= now:
            request, at = arrivals[added]
            traced = Traced(at, request.max_new_tokens, place_of(request), len(trace.steps))
            engine.add_request(request)
            known[request.request_id] = traced
            trace.requests.append(traced)
            added += 1
        if not engine.has_unfinished():
            if added == len(arrivals):
                break
            sleep(max(0.0, min(arrivals[added].at, deadline) - now))
            continue
        places = {state.request_id: place_of(state.request) for state in engine.scheduler.waiting}
        for name in [*places][:NEAR]:  # adapters that may be loaded or evicted before their requests join
            if name in known:
                known[name].at_join = max(known[name].at_join or SLOT, places[name], key=PLACES.index)
        step, output = timed_step(engine, passed)
        trace.end = step.end
        for name in output.tokens:
            if name not in known or known[name].ended:
                trace.strangers += 1
                continue
            known[name].note_token(step, len(trace.steps))
            if known[name].at_join is None:
                known[name].at_join = places.get(name)
        for result in (*output.finished, *output.failed):
            if result.request_id not in known:
                trace.strangers += 1
                continue
            known[result.request_id].ended += 1
            waited_for -= measured[0] <= known[result.request_id].at < measured[1]
        trace.steps.append(step)
        if not waited_for and trace.end >= measured[1]:
            break
    clear(engine)
    return trace


def wronged(trace: Trace) -> dict[str, int]:
    """Requests that were `lost` (tokens missing), `doubled`, or `starved` (overtaken by more than a rule allows)."""
    served_later, starved = 0, 0
    for request in reversed(trace.requests):
        starved += request.first is None and served_later > MOST_OVERTAKES
        served_later += request.first is not None
    lost = sum(request.ended > 0 and request.tokens < request.wanted for request in trace.requests)
    doubled = sum(request.ended > 1 or request.tokens > request.wanted for request in trace.requests)
    return {"lost": lost, "doubled": trace.strangers + doubled, "starved": starved}


def users_of(trace: Trace, span: Span) -> list[Traced]:
    wrong = {name: count for name, count in wronged(trace).items() if count}
    if wrong:
        raise CheckFailed(f"of {len(trace.requests)} requests some were not served right: {wrong}")
    begin, end = span.measured
    users = [request for request in trace.requests if begin <= request.at < end]
    if not users:
        raise CheckFailed(f"no request arrived in {span.seconds:.3g} s: choose a longer time (figure.seconds)")
    return users


def user_readings(users: Sequence[Traced], trace: Trace) -> list[Reading]:
    """Latencies in ms, median, p10, p90 and `tail`, and counts; an unfinished request counts with its wait.
    `time_per_output_token` is a request's mean gap, `inter_token_latency` every single one.
    """

    def waits(times: Iterable[float | None]) -> list[float]:
        ends = (trace.end if end is None else end for end in times)
        return [end - request.at for end, request in zip(ends, users, strict=True)]

    steps = [float(request.step - request.before + 1) for request in users if request.step is not None]
    unfinished = sum(not request.ended for request in users)
    counts = {"requests": len(users), "unfinished": unfinished, **wronged(trace)}
    return [
        *tail("time_to_first_token", waits(user.first for user in users), MS, "ms"),
        *tail("time_per_output_token", [fmean(user.gaps) for user in users if user.gaps], MS, "ms"),
        *tail("inter_token_latency", [gap for user in users for gap in user.gaps], MS, "ms"),
        *tail("request_latency", waits(user.last if user.ended else None for user in users), MS, "ms"),
        *tail("steps_to_first_token", steps, 1.0, "steps"),
        *(Reading(name, count, "requests", "count") for name, count in counts.items()),
    ]


def tail(metric: str, samples: Sequence[float], scale: float, unit: str) -> list[Reading]:
    """Return `sampled`, `_p95`, `_max` and, of `FEWEST_FOR_P99` samples or more, `_p99`; nothing without samples."""
    if not len(samples):
        return []
    values = [scale * sample for sample in samples]
    shares = (95, 99) if len(values) >= FEWEST_FOR_P99 else (95,)
    far = [Reading(f"{metric}_p{share}", float(np.percentile(values, share)), unit) for share in shares]
    return [*sampled(metric, values, unit), *far, Reading(f"{metric}_max", max(values), unit)]


def step_readings(trace: Trace, span: Span) -> list[Reading]:
    """Throughput, batch, and step times with and without a prompt, of steps that ended in the measured time."""
    begin, end = span.measured
    steps = [step for step in trace.steps if begin <= step.end < end]
    if not steps:
        return []
    readings = [
        Reading("throughput", sum(step.tokens for step in steps) / span.seconds, "token/s"),
        Reading("busy", min(1.0, sum(step.seconds for step in steps) / span.seconds), "share"),
        Reading("mean_batch_size", fmean(step.live for step in steps), "requests"),
        Reading("steps", len(steps), "steps", "count"),
    ]
    for name, has_prompt in (("decode_step", False), ("prefill_step", True)):
        chosen = [step.seconds for step in steps if (step.prompt_rows > 0) == has_prompt]
        readings += [Reading(name, MS * median(chosen), "ms")] if chosen else []
    return readings


def place_readings(users: Sequence[Traced]) -> list[Reading]:
    """Hit rates of slots and host memory at arrival and (`_at_join`) at a request's turn, and waits by place."""
    joined = [(user.at_join, user.first - user.at) for user in users if user.first is not None and user.at_join]
    readings = []
    for when, places in (("", [user.place for user in users]), ("_at_join", [place for place, _ in joined])):
        for name, near in (("slot_hit_rate", (SLOT,)), ("memory_hit_rate", (SLOT, MEMORY))):
            readings += [Reading(name + when, fmean(place in near for place in places), "share")] if places else []
    kinds = {"resident": (SLOT,), "loading": (MEMORY, DISK), "from_memory": (MEMORY,), "from_disk": (DISK,)}
    waits = {kind: [wait for place, wait in joined if place in places] for kind, places in kinds.items()}
    for kind, samples in waits.items():
        readings += tail(f"time_to_first_token_{kind}", samples, MS, "ms")
    if waits["resident"] and waits["loading"]:
        ratio = median(waits["loading"]) / median(waits["resident"])
        readings.append(Reading("loading_over_resident", ratio, "ratio"))
    return readings
