"""Open-loop driver: requests that arrive by the clock, whatever the engine has done by then. No torch.

The driver adds a request once its time has passed, and otherwise steps the engine, or sleeps. A token is delivered when
its step has returned. `check_trace` refuses a trace in which a request was lost, doubled or starved.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from experiments.benches.engine_state import clear
from experiments.harness.experiment import CheckFailed
from punica.engine import Engine, Request
from punica.scheduling.admission import MOST_OVERTAKES

Clock = Callable[[], float]
Sleep = Callable[[float], None]
SLOT, MEMORY, DISK = PLACES = ("slot", "memory", "disk")
"""Places of an adapter, the nearest first."""
NEAR = 2
"""Requests at the head of the queue whose adapters are loaded beside a step: the next to join, and the one after."""


class Arrival(NamedTuple):
    """A request and the second, from the start, at which it arrives."""

    request: Request
    at: float


@dataclass
class Traced:
    """Trace of a request; times in seconds from the start, steps by their number.

    `place`: of its adapter at arrival; `at_join`: the farthest place once the request was among the `NEAR` next ones,
    or when it joined from behind those. `before`: steps that had begun at arrival. `step`: the one that gave its first
    token, `joined` its beginning. `first`, `last`: delivery of first and last token; `gaps`: between tokens.
    """

    at: float
    wanted: int
    place: str
    before: int
    at_join: str | None = None
    step: int | None = None
    joined: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ended: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.ended > 0


class TimedStep(NamedTuple):
    """A step from `start` to `end`: requests that got a token, prompt rows, requests that waited."""

    start: float
    end: float
    live: int
    prompt_rows: int
    waiting: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """Requests in order of arrival, and steps; `end`: when the driver stopped; `strangers`: tokens and results for
    requests that had ended or were never added.
    """

    requests: list[Traced] = field(default_factory=list)
    steps: list[TimedStep] = field(default_factory=list)
    end: float = 0.0
    strangers: int = 0


def drive(
    engine: Engine, arrivals: Sequence[Arrival], measured: tuple[float, float], deadline: float,
    place_of: Callable[[Request], str], clock: Clock = time.perf_counter, sleep: Sleep = time.sleep,
) -> Trace:  # fmt: skip
    """Serve `arrivals`, in order of their times, until all that arrive within `measured` (from, to; s) are done, or
    until `deadline`. Unfinished requests are then taken out of the engine.

    Later arrivals are served as well, so that the measured ones do not meet an engine that runs empty.
    """
    trace, known = Trace(), dict[str, Traced]()
    waited_for = sum(measured[0] <= arrival.at < measured[1] for arrival in arrivals)
    start, added = clock(), 0
    while (now := clock() - start) < deadline:
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
        places = _places(engine, known, place_of)
        began = clock() - start
        output = engine.step()
        trace.end = clock() - start
        ended = [result.request_id for result in (*output.finished, *output.failed)]
        _note(trace, known, began, output.tokens, ended)
        _note_places(known, places, output.tokens)
        done, waiting = output.statistics, len(engine.scheduler.waiting)
        live = done.batch_size - done.num_idle
        trace.steps.append(TimedStep(began, trace.end, live, done.num_prefill_tokens, waiting))
        waited_for -= sum(name in known and measured[0] <= known[name].at < measured[1] for name in ended)
        if not waited_for and trace.end >= measured[1]:
            break
    clear(engine)
    return trace


def _places(engine: Engine, known: dict[str, Traced], place_of: Callable[[Request], str]) -> dict[str, str]:
    """Return the place of each waiting request's adapter; note it for the `NEAR` next ones, whose adapters may be
    loaded or evicted before they join.
    """
    found = {state.request_id: place_of(state.request) for state in engine.scheduler.waiting}
    for name in itertools.islice(found, NEAR):
        if name in known:
            known[name].at_join = _farther(known[name].at_join, found[name])
    return found


def _note_places(known: dict[str, Traced], places: dict[str, str], served: Iterable[str]) -> None:
    """Note the place for those of `served` that joined without having been near."""
    for name in served:
        if name in places and name in known and known[name].at_join is None:
            known[name].at_join = places[name]


def _farther(known: str | None, place: str) -> str:
    return place if known is None else max(known, place, key=PLACES.index)


def _note(
    trace: Trace, known: dict[str, Traced], began: float, tokens: dict[str, int], ended: Sequence[str]
) -> None:
    """Note a step's tokens and results."""
    for name in tokens:
        request = known.get(name)
        if request is None or request.is_done:
            trace.strangers += 1
            continue
        if request.first is None:
            request.joined, request.first, request.step = began, trace.end, len(trace.steps)
        if request.last is not None:
            request.gaps.append(trace.end - request.last)
        request.tokens, request.last = request.tokens + 1, trace.end
    for name in ended:
        if name in known:
            known[name].ended += 1
        else:
            trace.strangers += 1


@dataclass(frozen=True)
class Counts:
    """Requests of a trace that went wrong.

    `lost`: ended without all of their tokens. `doubled`: ended, or were given tokens, more than once. `starved`: got
    nothing although more later ones did than a rule lets overtake. `unfinished`: not done when the driver stopped,
    which is no fault.
    """

    lost: int
    doubled: int
    starved: int
    unfinished: int


def counts_of(requests: Sequence[Traced], strangers: int = 0) -> Counts:
    """Count over `requests`, all of a trace in order of arrival."""
    served_later, starved = 0, 0
    for request in reversed(requests):
        starved += request.first is None and served_later > MOST_OVERTAKES
        served_later += request.first is not None
    return Counts(
        lost=sum(request.is_done and request.tokens < request.wanted for request in requests),
        doubled=strangers + sum(request.ended > 1 or request.tokens > request.wanted for request in requests),
        starved=starved,
        unfinished=sum(not request.is_done for request in requests),
    )


def check_trace(trace: Trace) -> Counts:
    """Count over `trace`; `CheckFailed` when a request was lost, doubled or starved."""
    found = counts_of(trace.requests, trace.strangers)
    if found.lost or found.doubled or found.starved:
        raise CheckFailed(
            f"of {len(trace.requests)} requests {found.lost} ended without all of their tokens, {found.doubled} were "
            f"served twice, {found.starved} got nothing while more than {MOST_OVERTAKES} later ones did"
        )
    return found
