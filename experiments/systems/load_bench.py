"""A loaded engine, timed: its capacity with an endless queue, and Poisson arrivals at a part of that rate.

Measured are requests that arrive within some seconds after a warm-up (`Span`); arrivals continue until those are done,
or until the deadline. One that is unfinished then counts with the time that it has waited.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.benches.engine_state import clear
from experiments.harness.points import Reading
from experiments.harness.span import Span
from experiments.systems.check import check_tokens
from experiments.systems.loaded import FOLDERS, Loaded
from experiments.systems.open_loop import Arrival, Clock, TimedStep, Trace, drive
from experiments.systems.steady import begin_steadily
from experiments.systems.stream import Job, shortened


@dataclass(frozen=True)
class Capacity:
    """Requests and tokens (prompt and new) per second and requests in the batch, under an endless queue; steps counted
    and requests that ended in them.

    `requests`: new tokens per second over those of a mean request, which varies less than the number that end.
    """

    requests: float
    tokens: float
    batch: float
    steps: int
    finished: int

    def readings(self) -> list[Reading]:
        return [
            Reading("capacity", self.requests, "request/s"),
            Reading("throughput", self.tokens, "token/s"),
            Reading("mean_batch_size", self.batch, "requests"),
            Reading("steps", self.steps, "steps", "count"),
            Reading("finished", self.finished, "requests", "count"),
        ]


def check_system(system: Loaded, jobs: Sequence[Job], count: int, tokens: int) -> None:
    """Raise `CheckFailed` unless the first tokens of `count` of `jobs` are right, on adapters that folders have."""
    short = shortened(jobs, count, tokens)
    check_tokens(system, [replace(job, adapter_id=1 + place % FOLDERS) for place, job in enumerate(short)])


def capacity_of(system: Loaded, jobs: Sequence[Job], seconds: float, clock: Clock = time.perf_counter) -> Capacity:
    """Serve `jobs` in a cycle for `seconds`, from the middle of an endless queue (`begin_steadily`), after as many
    steps as the batch has places, and for no fewer. Inseparable batches are counted whole.

    Adapters begin where the system holds them. `CheckFailed` if a CUDA graph was captured meanwhile.
    """
    system.hold({job.adapter_id for job in jobs})
    engine, stream = system.engine, itertools.cycle(jobs)
    steps, ended, fill, first = list[TimedStep](), list[int](), engine.config.max_batch_size, -1
    begin_steadily(system, stream, max(job.new_tokens for job in jobs))
    start = clock()
    with system.captures_nothing():
        while True:
            if not (engine.scheduler.rule.inseparable and engine.scheduler.running):
                first = len(steps) if first < 0 and len(steps) >= fill else first
                if 0 <= first <= len(steps) - fill and steps[-1].end >= steps[first].start + seconds:
                    break
            while len(engine.scheduler.waiting) <= fill:
                for request in system.requests([next(stream)]):
                    engine.add_request(request)
            began, output = clock() - start, engine.step()
            done, waiting = output.statistics, len(engine.scheduler.waiting)
            live = done.batch_size - done.num_idle
            steps.append(TimedStep(began, clock() - start, live, done.num_prefill_tokens, waiting))
            ended.append(len(output.finished))
        clear(engine)
    counted = steps[first:]
    passed = counted[-1].end - counted[0].start
    new = sum(step.live for step in counted)
    return Capacity(
        requests=new / passed / fmean(job.new_tokens for job in jobs),
        tokens=(new + sum(step.prompt_rows for step in counted)) / passed,
        batch=new / len(counted),
        steps=len(counted),
        finished=sum(ended[first:]),
    )


def load(system: Loaded, jobs: Sequence[Job], rate: float, span: Span, seed: int) -> Trace:
    """Serve `jobs` in a cycle, arriving in a Poisson process of `rate` requests per second, over `span.at(rate)`.

    `CheckFailed` if a CUDA graph was captured meanwhile, which delays all requests.
    """
    span = span.at(rate)
    system.hold({job.adapter_id for job in jobs})
    times = span.arrivals(rate, seed)
    requests = system.requests([job for job, _ in zip(itertools.cycle(jobs), times, strict=False)])
    arrivals = [Arrival(request, float(at)) for request, at in zip(requests, times, strict=True)]
    with system.captures_nothing():
        return drive(system.engine, arrivals, span.measured, span.deadline, system.place_of)
