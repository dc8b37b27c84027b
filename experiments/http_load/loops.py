"""Arrivals by the clock, a number of requests in flight, and the lag of the client's own event loop.

Measured are requests that begin within the measured time of a `Span`. Arrivals continue until those are done, or until
the deadline, which cancels the rest.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from experiments.http_load.client import Answer, Client, Job
from experiments.workload.arrivals import Span

TICK_S = 0.005
"""Time between two looks at the event loop's lag."""
BACK_OFF_S = 0.1
"""Pause of one place of a closed loop after an error, so that a dead server is not asked without end."""


@dataclass
class Run:
    """Answers in order of their beginning, and lags of the event loop in the measured time, in seconds."""

    span: Span
    answers: list[Answer] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


async def open_loop(client: Client, jobs: Iterator[Job], arrivals: Sequence[float], span: Span) -> Run:
    """Send a job at each of `arrivals`, in seconds, whether others are answered or not."""
    run, tasks = Run(span), list[asyncio.Task[None]]()

    async def arrive(times: Sequence[float]) -> None:
        for at in times:
            await asyncio.sleep(at - client.now())
            run.answers.append(Answer(at, next(jobs)))
            tasks.append(asyncio.create_task(client.send(run.answers[-1])))

    end = span.measured[1]
    watch = asyncio.create_task(_watch(client, run))
    await arrive([at for at in arrivals if at < end])
    await asyncio.sleep(end - client.now())
    counted, late = list(tasks), asyncio.create_task(arrive([at for at in arrivals if at >= end]))
    await _finish(client, span, counted)
    await _cancel([watch, late])
    await _cancel(tasks)
    return run


async def closed_loop(client: Client, jobs: Iterator[Job], in_flight: int, span: Span) -> Run:
    """Keep `in_flight` requests under way: each place sends the next job once its last one is answered."""
    run, tasks = Run(span), dict[int, asyncio.Task[None]]()

    async def place(number: int) -> None:
        while True:
            answer = Answer(client.now(), next(jobs))
            run.answers.append(answer)
            tasks[number] = asyncio.create_task(client.send(answer))
            await tasks[number]
            if answer.error:
                await asyncio.sleep(BACK_OFF_S)

    others = [asyncio.create_task(_watch(client, run))]
    others += [asyncio.create_task(place(number)) for number in range(in_flight)]
    await asyncio.sleep(span.measured[1] - client.now())
    await _finish(client, span, [task for task in tasks.values() if not task.done()])
    await _cancel(others)
    await _cancel(list(tasks.values()))
    return run


async def _finish(client: Client, span: Span, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for `tasks`, at most until the deadline of `span`."""
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, span.deadline - client.now()))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what is not done; an error of a task is raised, it would be one of this module."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _watch(client: Client, run: Run) -> None:
    """Note by how much a sleep of `TICK_S` is late, over the measured time."""
    begin, end = run.span.measured
    await asyncio.sleep(begin - client.now())
    while (before := client.now()) < end:
        await asyncio.sleep(TICK_S)
        run.lags.append(max(0.0, client.now() - before - TICK_S))
