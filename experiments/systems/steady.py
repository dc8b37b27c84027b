"""An engine in the middle of an endless queue from its first step: the batch that its admission rule would have formed,
with noise for keys and values.
"""

from collections.abc import Iterator, Sequence

from experiments.benches.engine_state import put
from experiments.systems.loaded import Loaded
from experiments.systems.stream import Job
from experiments.systems.timeline import state_of, take_joining
from punica.scheduling import RequestState

LIVES = 3
"""Lifetimes of the longest request after which nothing is left of how the batch began."""


def begin_steadily(system: Loaded, stream: Iterator[Job], longest: int) -> None:
    """Give `system`, which is empty, the batch that it has after `LIVES` times `longest` steps of `stream`.

    Inseparable batches are left out: the system begins with the next one.
    """
    engine = system.engine
    if engine.scheduler.rule.inseparable:
        return
    for job, generated in _members(system, stream, LIVES * longest):
        put(engine, system.requests([job])[0], generated)


def _members(system: Loaded, stream: Iterator[Job], steps: int) -> list[tuple[Job, int]]:
    """Replay `steps` steps with a queue that never ends: jobs of the batch, and tokens that each has."""
    scheduler, most = system.engine.scheduler, system.engine.config.max_batch_size
    slots = scheduler.max_adapters or most
    jobs: dict[RequestState, Job] = {}
    batch, waiting = list[tuple[RequestState, int]](), list[RequestState]()

    def fits(requests: Sequence[RequestState]) -> bool:
        return len({request.adapter_id for request in requests}) <= slots

    for _ in range(steps):
        while len(waiting) <= most:
            job = next(stream)
            waiting.append(state_of(str(len(jobs)), job.new_tokens, job.adapter_id, len(job.prompt)))
            jobs[waiting[-1]] = job
        batch = [(state, done) for state, done in batch if done < jobs[state].new_tokens]
        joined = take_joining(scheduler.rule, [state for state, _ in batch], waiting, most, fits)
        batch = [(state, done + 1) for state, done in [*batch, *((state, 0) for state in joined)]]
    return [(jobs[state], done) for state, done in batch if done < jobs[state].new_tokens]
