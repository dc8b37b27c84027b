"""`Backend`: the server's side of an engine, wherever that runs, on the event loop; metrics, without names of tenants.

    submit, abort, admit, retire --orders--> the engine's `Stepper`: all orders, then one step, again
    Call.batches() <--one message per step or order-- new tokens of all requests, replies, notes for the metrics

The stepper is in another process (`process.py`), or in a thread that steps a cluster of processes (`runners.py`).
"""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from punica.adapters import LoRARequest
from punica.cluster.runner import RunnerDescription
from punica.engine import Request, StepStatistics
from punica.serve.errors import RETRY_AFTER, ApiError
from punica.serve.stepper import EngineStepper, Message, Order, Outcome, Piece, Stepper

_NUMBERS = itertools.count()
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LOOK_S = 0.5  # longest wait for a view of the engine, which it gives between two steps
_OF_STEPS = {
    "num_hit_tokens": ("punica_prefix_hit_tokens", "Tokens of joining requests found in the prefix cache"),
    "num_missed_tokens": ("punica_prefix_missed_tokens", "Tokens of joining requests not found there"),
    "num_evicted_blocks": ("punica_prefix_evicted_blocks", "Blocks of the prefix cache given to others"),
    "num_drafted_tokens": ("punica_drafted_tokens", "Drafts of next tokens that steps verified"),
    "num_accepted_tokens": ("punica_accepted_tokens", "Drafts that were right"),
}  # by field of `StepStatistics`
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


@dataclass(eq=False)
class Call:
    """Requests of one HTTP call, and their pieces as they arrive: with every step if it ``streams``, else one of each
    request, when it ends.
    """

    requests: Sequence[Request]
    streams: bool
    number: int = field(default_factory=_NUMBERS.__next__)
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.requests)
        self._pieces: list[Piece] = []
        self._arrived = asyncio.Event()
        self._error: ApiError | None = None

    def put(self, piece: Piece) -> None:
        if piece.error is not None:
            return self.fail(piece.error)
        self.num_unfinished -= piece.result is not None
        self._pieces.append(piece)
        self._arrived.set()

    def end(self, error: ApiError) -> None:
        """Have :meth:`batches` raise an error instead of waiting for further pieces."""
        self._error = error
        self._arrived.set()

    def fail(self, reason: str) -> None:
        self.end(ApiError(500, reason, code="engine_failed"))

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Yield all pieces that have arrived, until every request has ended; raises the error of :meth:`end`."""
        while self.num_unfinished or self._pieces:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._pieces = self._pieces, []
            if batch:
                yield batch
            if self._error is not None and self.num_unfinished:
                raise self._error


class Metrics:
    """Counters, gauges and histograms in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.counter, self.gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._requests = self.counter("punica_requests", "Generations that ended, by finish reason", ["reason"])
        self.rejected = self.counter("punica_rejected", "Calls answered by an error", ["status"])
        self._prompt = self.counter("punica_prompt_tokens", "Prompt tokens of generations that ended")
        self._generated = self.counter("punica_generated_tokens", "Generated tokens")
        self._steps = self.counter("punica_steps", "Model invocations")
        self._preempted = self.counter("punica_preemptions", "Requests sent back to the queue")
        self._of_steps = {name: self.counter(*told) for name, told in _OF_STEPS.items()}
        self._running = self.gauge("punica_requests_running", "Requests in the last step")
        self._waiting = self.gauge("punica_requests_waiting", "Requests that wait for a step")
        self._first = histogram("punica_first_token_seconds", "Arrival to first token", buckets=_SECONDS)
        between = "Mean time between tokens of one request"
        self._token = histogram("punica_token_seconds", between, buckets=_TOKEN_SECONDS)
        self._whole = histogram("punica_request_seconds", "Arrival to last token", buckets=_SECONDS)

    def note_step(self, statistics: StepStatistics, num_unfinished: int) -> None:
        num_running = min(statistics.batch_size, num_unfinished)
        for name, counter in self._of_steps.items():
            counter.inc(getattr(statistics, name))
        self._note(statistics.batch_size > 0, statistics.num_preempted, num_running, num_unfinished - num_running)

    def note_idle(self) -> None:
        self._note(0, 0, 0, 0)

    def _note(self, num_steps: int, num_preempted: int, num_running: int, num_waiting: int) -> None:
        self._steps.inc(num_steps)
        self._preempted.inc(num_preempted)
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def note_result(self, result: Outcome) -> None:
        self._requests.labels(result.finish_reason).inc()
        self._prompt.inc(result.num_prompt)
        self._generated.inc(result.num_generated)
        if result.first_token_s is None or result.last_token_s is None:
            return
        self._first.observe(result.first_token_s - result.arrival_s)
        self._whole.observe(result.last_token_s - result.arrival_s)
        if result.num_generated > 1:
            self._token.observe((result.last_token_s - result.first_token_s) / (result.num_generated - 1))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class Backend(ABC):
    """Engine of a server: orders to its `Stepper`, and the effects of messages.

    ``facts``: of the engine, or of several as of one. ``refuses``: new requests get 503, as the server ends.
    """

    facts: RunnerDescription
    _put: Callable[[Order], None]  # hands over an order, at once

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.refuses = self._cuts = False
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}  # by number of the order
        self._calls: dict[int, Call] = {}  # by their numbers: those that have not ended
        self._looks: dict[bool, asyncio.Future[dict[str, Any]]] = {}  # the latest of each kind
        self._views: dict[bool, dict[str, Any]] = {}
        self._health = "ok"
        self._end_reason = ""  # once it has ended

    @abstractmethod
    async def stop(self) -> None:
        """Abort what is unfinished and end."""

    def start(self) -> None:
        """Begin to deliver pieces on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def cut(self) -> None:
        """End all running answers with an error, and refuse new ones."""
        self.refuses = self._cuts = True
        for call in self._calls.values():
            call.end(stopping_error("ended this answer"))

    @property
    def health(self) -> str:
        """State in one word: ``"ok"``, ``"degraded"`` (slower than it was started for) or ``"failed"``."""
        return "failed" if self._end_reason else self._health

    async def submit(self, call: Call) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises. ApiError 503: it ended."""
        if self._cuts:
            raise stopping_error("ended this answer")
        self._calls[call.number] = call
        await self.order(Stepper.add, call.number, call.requests, call.streams)

    def abort(self, call: Call) -> None:
        """Take out the requests of a call that have not ended; also of one whose :meth:`submit` was cancelled."""
        self._calls.pop(call.number, None)
        if call.num_unfinished:
            with suppress(ApiError):  # ended: all its requests have
                self.order(Stepper.abort, [request.request_id for request in call.requests])

    async def admit(self, adapter: LoRARequest) -> None:
        """Read and check an adapter beside the steps, and serve this version of it. FileNotFoundError, TypeError,
        ValueError: it does not fit.
        """
        await self.order(EngineStepper.read, adapter)

    async def retire(self, adapter_id: int) -> None:
        """Remove an adapter from the engine's memory as soon as no request uses it."""
        await self.order(Stepper.retire, adapter_id)

    async def look(self, with_steps: bool) -> dict[str, Any]:
        """Return `Watch.view`; the one before where a step takes longer than `LOOK_S`, an empty one after the end."""
        if self._end_reason:
            return {}
        look = self._looks.get(with_steps)
        if look is None or look.done():
            look = self._looks[with_steps] = self.order(methodcaller("view", with_steps))
        with suppress(TimeoutError, ApiError):
            self._views[with_steps] = await asyncio.wait_for(asyncio.shield(look), LOOK_S)
        return self._views.get(with_steps, {})

    def order(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        """Have ``function(stepper, *arguments)`` called between two steps; the future has its value or error. ApiError
        503: the engine has ended.
        """
        if self._end_reason:
            raise ApiError(503, self._end_reason, code="engine_stopped")
        number = next(self._numbers)
        self._put(Order(number, function, arguments))
        reply = self._replies[number] = self._loop.create_future()
        return reply

    def _take(self, message: Message) -> None:
        for note in message.notes:
            note(self.metrics)
        self._health = message.health
        for number, piece in message.pieces:
            if number in self._calls:
                self._calls[number].put(piece)
        reply = None if message.order is None else self._replies.pop(message.order)
        if reply is None or reply.done():  # cancelled
            return
        if message.error is None:
            reply.set_result(message.value)
        else:
            reply.set_exception(message.error)

    def _end(self, reason: str) -> None:
        """Order nothing more; open calls get an error, orders without reply a refusal."""
        if self._end_reason:
            return
        self._end_reason = reason
        self.metrics.note_idle()
        for call in self._calls.values():
            call.fail(reason)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ApiError(503, reason, code="engine_stopped"))


def stopping_error(what: str) -> ApiError:
    return ApiError(
        503, f"the server is stopping and {what}; send the request again, later or to another server",
        code="server_stopping", headers={**RETRY_AFTER, "Connection": "close"},
    )  # fmt: skip


class SteppingThread(Backend):
    """Thread of this process with a `Stepper`."""

    def __init__(self, stepper: Stepper, metrics: Metrics) -> None:
        super().__init__(metrics)
        self.stepper, self.facts = stepper, stepper.facts
        self._put, stepper.send = stepper.orders.put, partial(self._call_soon, self._take)
        self._thread = threading.Thread(target=self._run, name="punica-engine", daemon=True)

    def start(self) -> None:
        super().start()
        self._thread.start()

    async def stop(self) -> None:
        self._end("the server is stopping")
        self.stepper.orders.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        self.stepper.run()
        self._call_soon(self._end, "the engine has stopped")

    def _call_soon(self, function: Callable[[Any], None], argument: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, argument)
