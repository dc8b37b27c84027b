"""`SteppingThread`: a `Stepper` in a thread of the server's own process.

    event loop:  call, submit, abort --queue--> thread: commands, then one step, again   (blocks while idle)
    event loop:  Call.batches() <--one call_soon_threadsafe per step-- thread: new tokens of all requests

`EngineThread` steps one engine; a cluster of them has its own (`runners_thread.py`). Event loop and steps take turns in
one interpreter, which slows the steps of a GPU: the command line runs one engine in a process (`engine_process.py`).
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.serve.backend import Backend
from punica.serve.calls import Call, Piece
from punica.serve.errors import ApiError
from punica.serve.metrics import Metrics
from punica.serve.stepper import EngineStepper, ServedEngine, Stepper

_T = TypeVar("_T")


class SteppingThread(Stepper, Backend):
    """Thread that steps a `ServedEngine`."""

    engine: ServedEngine

    def __init__(self, engine: ServedEngine, metrics: Metrics) -> None:
        super().__init__(engine, metrics)
        self.metrics = metrics
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
    def is_healthy(self) -> bool:
        """True while the thread runs and its last step did not raise."""
        return self._thread.is_alive() and not self._is_stopping and not self._is_failing

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
            self._commands.put(partial(self._take_out, [request.request_id for request in call.requests]))

    async def retire(self, adapter_id: int) -> None:
        """Remove an adapter from the engine's memory as soon as no request uses it."""
        await self.call(partial(self._retire, adapter_id))

    # --- engine's thread ----------------------------------------------------------------------------------------------

    def _send(self, pieces: Sequence[tuple[Call, Piece]]) -> None:
        def put() -> None:
            for call, piece in pieces:
                call.put(piece)

        if pieces and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(put)


class EngineThread(EngineStepper, SteppingThread):
    """Thread that steps one engine."""

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
        """Read and check an adapter beside the steps."""
        reading = self._read(adapter)
        await asyncio.wrap_future(reading)
        await self.call(partial(self._keep, adapter, reading))


def _nothing() -> None:
    """Do nothing: the command that wakes an idle thread."""
