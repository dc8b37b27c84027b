"""`SteppingThread`: the one thread that owns the engine, between the event loop and the engine's steps.

    event loop:  call, submit, abort --queue--> thread: commands, then one step, again   (blocks while idle)
    event loop:  Call.batches() <--one call_soon_threadsafe per step-- thread: new tokens of all requests

The engine is single-threaded: whatever touches it is a command on this thread, run between two steps. `EngineThread`
steps one engine; a cluster of them has its own (`runners_thread.py`).
"""

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from punica.adapters import LoRARequest
from punica.engine import Engine, GenerationResult, Request, RequestState, StepOutput
from punica.engine.pretrained import GenerationDefaults
from punica.engine.text import TextCodec
from punica.serve.errors import ApiError
from punica.serve.metrics import Metrics

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of request ``index`` of a call, the first ``num_text`` of them with text; the last has the result, or
    an error instead where the engine itself failed.
    """

    index: int
    token_ids: list[int]
    num_text: int
    logprobs: list[dict[int, float]]
    result: GenerationResult | None = None
    error: str | None = None


@dataclass(eq=False)
class Call:
    """Requests of one HTTP call, and their pieces as they arrive on the event loop.

    ``streams``: pieces with every step; otherwise one piece per request, when it ends.
    """

    requests: Sequence[Request]
    streams: bool
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.requests)
        self._pieces: list[Piece] = []
        self._arrived = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Append a piece; on the event loop."""
        self._pieces.append(piece)
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Yield all pieces that have arrived, until every request has ended. ApiError 500: the engine failed."""
        while self.num_unfinished:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._pieces = self._pieces, []
            for piece in batch:
                if piece.error is not None:
                    raise ApiError(500, piece.error, code="engine_failed")
                self.num_unfinished -= piece.result is not None
            yield batch


@dataclass(eq=False)
class _Unfinished:
    """Request in the engine, and how many of its tokens were handed over."""

    call: Call
    index: int
    state: RequestState
    num_sent: int = 0

    def piece(self, result: GenerationResult | None) -> Piece:
        """Build the piece with the tokens since the last one."""
        start, state = self.num_sent, self.state
        self.num_sent = state.num_generated
        num_text = max(0, len(state.text_token_ids) - start)
        return Piece(self.index, state.output_token_ids[start:], num_text, state.logprobs[start:], result)


class ServedEngine(Protocol):
    """One engine, or several with the interface of one."""

    codec: TextCodec | None
    defaults: GenerationDefaults
    max_model_len: int

    def add_request(self, request: Request) -> RequestState:
        """Queue a request; return its state, updated by the steps."""

    def abort_request(self, request_id: str) -> GenerationResult:
        """Remove an unfinished request. ValueError: an unknown id."""

    def step(self) -> StepOutput:
        """Run one model invocation, or wait for one."""


class SteppingThread(ABC):
    """Thread that steps a `ServedEngine`.

    After ``most_step_errors`` steps in a row that raised, all unfinished requests are aborted and their calls get a
    500. Later requests are served again.
    """

    most_step_errors = 1

    def __init__(self, engine: ServedEngine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished: dict[str, _Unfinished] = {}
        self._retired: set[int] = set()  # ids of adapters that are removed whenever no request uses them
        self._step_errors = 0  # in a row
        self._is_failing = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="punica-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- event loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step; pieces are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Abort what is unfinished and end the thread."""
        self._is_stopping = True
        self._commands.put(_nothing)  # an idle thread waits for a command
        await asyncio.to_thread(self._thread.join)

    @property
    @abstractmethod
    def num_places(self) -> int:
        """Requests that are served at once."""

    @property
    @abstractmethod
    def has_lora(self) -> bool:
        """True where adapters can be served."""

    @abstractmethod
    async def admit(self, adapter: LoRARequest) -> None:
        """Check an adapter that is about to get a name. FileNotFoundError, TypeError, ValueError: it does not fit."""

    @property
    def is_healthy(self) -> bool:
        """True while the thread runs and its last step did not raise."""
        return self._thread.is_alive() and not self._is_stopping and not self._is_failing

    @property
    def health(self) -> str:
        """State in one word: ``"ok"``, ``"degraded"`` (slower than it was started for) or ``"failed"``."""
        return "ok" if self.is_healthy else "failed"

    async def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` on the thread, between two steps; its result. ApiError 503 if the thread has ended."""
        future: Future[_T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if self._is_stopping:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        self._commands.put(command)
        if self._is_stopping and future.cancel():  # the thread may have ended meanwhile
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        return await asyncio.wrap_future(future)

    async def submit(self, call: Call) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises."""
        await self.call(partial(self._add, call))

    def abort(self, call: Call) -> None:
        """Take out the requests of a call that have not ended; also of one whose :meth:`submit` was cancelled."""
        if call.num_unfinished:
            self._commands.put(partial(self._abort, call))

    async def retire(self, adapter_id: int) -> None:
        """Remove an adapter from the engine's memory as soon as no request uses it."""

        def retire() -> None:
            self._retired.add(adapter_id)
            self._remove_retired({adapter_id})

        await self.call(retire)

    # --- engine's thread ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _remove_adapter(self, adapter_id: int) -> None:
        """Free the memory of an adapter that no request uses."""

    def _has_work(self) -> bool:
        """Return True while steps are to be made."""
        return bool(self._unfinished)

    def _advance(self) -> StepOutput:
        """Make one step."""
        return self.engine.step()

    def _note_step(self, output: StepOutput) -> None:
        """Count a step in the metrics."""
        self.metrics.note_step(output.statistics, len(self._unfinished))

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_commands(wait=not self._has_work())
                if self._has_work():
                    self._step()
        except BaseException:
            _log.exception("the engine's thread ends")
        finally:
            self._is_stopping = True
            self._run_commands(wait=False)
            self._give_up("the server is stopping")

    def _run_commands(self, *, wait: bool) -> None:
        """Run all queued commands; with ``wait``, at least one."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(block=wait)
                wait = False
                command()

    def _step(self) -> None:
        try:
            output = self._advance()
        except Exception as error:
            _log.exception("a step failed")
            self._is_failing = True
            self._step_errors += 1
            if self._step_errors == self.most_step_errors:
                self._step_errors = 0
                self._give_up(f"the engine failed: {type(error).__name__}: {error}")
            return
        self._step_errors, self._is_failing = 0, False
        self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        """Hand new tokens and results to the event loop, all of a step at once."""
        results = {result.request_id: result for result in (*output.finished, *output.failed)}
        pieces: list[tuple[Call, Piece]] = []
        left: set[int] = set()
        for request_id in {**output.tokens, **results}:
            request, result = self._unfinished.get(request_id), results.get(request_id)
            if request is None or (result is None and not request.call.streams):
                continue
            pieces.append((request.call, request.piece(result)))
            if result is not None:
                del self._unfinished[request_id]
                left.add(request.state.adapter_id)
                self.metrics.note_result(result)
        self._note_step(output)
        self._remove_retired(left)
        self._send(pieces)

    def _send(self, pieces: Sequence[tuple[Call, Piece]]) -> None:
        def put() -> None:
            for call, piece in pieces:
                call.put(piece)

        if pieces and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(put)

    def _add(self, call: Call) -> None:
        added: list[str] = []
        try:
            for index, request in enumerate(call.requests):
                state = self.engine.add_request(request)
                added.append(request.request_id)
                self._unfinished[request.request_id] = _Unfinished(call, index, state)
        except BaseException:
            self._take_out(added)
            raise

    def _abort(self, call: Call) -> None:
        self._take_out([request.request_id for request in call.requests])

    def _take_out(self, request_ids: Iterable[str]) -> None:
        """Abort those of the requests that have not ended."""
        for request_id in request_ids:
            request = self._unfinished.pop(request_id, None)
            if request is None:
                continue
            with suppress(ValueError):  # it failed in a step that raised: the engine has let it go
                self.metrics.note_result(self.engine.abort_request(request_id))
            self._remove_retired({request.state.adapter_id})
        if not self._unfinished:
            self.metrics.note_idle()

    def _give_up(self, error: str) -> None:
        """Abort every request; their calls get the error."""
        unfinished = list(self._unfinished.items())
        for request_id, _ in unfinished:
            try:
                self._take_out([request_id])
            except Exception:  # an engine that failed may fail again
                _log.exception("a request could not be taken out")
        self._send([(request.call, Piece(request.index, [], 0, [], error=error)) for _, request in unfinished])

    def _remove_retired(self, adapter_ids: set[int]) -> None:
        """Remove those of the adapters that are retired and that no request uses."""
        leaving = adapter_ids & self._retired
        if leaving:
            for adapter_id in leaving - {request.state.adapter_id for request in self._unfinished.values()}:
                self._remove_adapter(adapter_id)


class EngineThread(SteppingThread):
    """Thread that steps one engine. A step that raises is repeated once, as the engine allows."""

    most_step_errors = 2
    engine: Engine

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        super().__init__(engine, metrics)

    @property
    def num_places(self) -> int:
        """Requests of one step."""
        return self.engine.config.max_batch_size

    @property
    def has_lora(self) -> bool:
        """True for an engine with adapter slots."""
        return self.engine.manager is not None

    async def admit(self, adapter: LoRARequest) -> None:
        """Check an adapter between two steps; its numbers are read when it is first used."""
        if self.engine.manager is not None:
            await self.call(partial(self.engine.manager.check_adapter, adapter))

    def _remove_adapter(self, adapter_id: int) -> None:
        if self.engine.manager is not None:
            self.engine.manager.remove_adapter(adapter_id)


def _nothing() -> None:
    """Do nothing: the command that wakes an idle thread."""
