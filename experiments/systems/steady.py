"""An engine in the middle of an endless queue from its first step: its batch as the admission rule would have it by
then, everybody as far as they would be. What they have in the cache is noise, as in windows of a stream.
"""

from collections.abc import Iterator

from experiments.benches.engine_state import put
from experiments.systems.loaded import Loaded
from experiments.systems.stream import Job

LIVES = 3
"""Of the longest request, after which nothing is left of how the batch began."""


def begin_steadily(system: Loaded, stream: Iterator[Job], longest: int) -> None:
    """Give `system`, which is empty, the batch that it has after `LIVES` times `longest` steps of `stream`.

    A batch that begins and ends as one is left out: the system begins with the next one.
    """
    engine = system.engine
    if engine.scheduler.rule.inseparable:
        return
    for job, generated in _members(system, stream, LIVES * longest):
        put(engine, system.requests([job])[0], generated)


def _members(system: Loaded, stream: Iterator[Job], steps: int) -> list[tuple[Job, int]]:
    """Jobs of the batch and the tokens that each has, after `steps` steps in which somebody always waits."""
    most, slots = system.engine.config.max_batch_size, system.engine.scheduler.max_adapters
    adapters = 1 if system.admission == "single_adapter" else slots or most
    at_once = most if system.admission == "fcfs_many" else 1
    batch, head = list[tuple[Job, int]](), next(stream)
    for _ in range(steps):
        batch = [(job, done) for job, done in batch if done < job.new_tokens]
        for _ in range(min(at_once, most - len(batch))):
            if len({head.adapter_id, *(job.adapter_id for job, _ in batch)}) > adapters:
                break
            batch.append((head, 0))
            head = next(stream)
        batch = [(job, done + 1) for job, done in batch]
    return [(job, done) for job, done in batch if done < job.new_tokens]
