"""`EngineProcess`: an engine in a process of its own, so that the event loop never holds up a step.

    event loop:  submit, abort, retire --orders, by a thread--> engine's process: commands, then one step, again
    event loop:  Call.batches() <--one message per step-- engine's process: new tokens of all requests

A step of an engine on a GPU needs the interpreter all the time, to launch the next one. The work per token and client
would take turns with it in one process. Only the engine's process uses the GPU.
"""

import asyncio
import atexit
import itertools
import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.processes import run_with_parent
from punica.serve.backend import Backend
from punica.serve.calls import Call, Piece
from punica.serve.engine_child import EngineDescription, Message, RemoteStepper, run
from punica.serve.errors import ApiError
from punica.serve.metrics import Metrics

_log = logging.getLogger(__name__)
_END_S = 5.0  # longest wait for the end of a process that has been told to end, which then is killed
_REASON_S = 0.5  # longest wait for the exit code after its connection has closed


class EngineProcess(Backend):
    """Engine in a spawned process, which ends with this one, with its ``with`` block or by :meth:`close`.

    Args:
        build: makes the engine, in the process; it travels by pickle.
        metrics: of the server.

    Raises the errors of ``build``; RuntimeError: the process ends before the engine is ready.
    """

    engine: EngineDescription

    def __init__(self, build: Callable[[], Engine], metrics: Metrics) -> None:
        self.metrics = metrics
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[None]] = {}  # by number of the order
        self._calls: dict[int, Call] = {}  # by their numbers: those that have not ended
        self._is_failing = False
        self._end_reason = ""  # once it has ended
        self._ending: asyncio.Task[None] | None = None
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads, and perhaps CUDA
        orders, ours = context.Pipe(duplex=False)
        self._messages, theirs = context.Pipe()  # used one way: sockets hold more than a pipe
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_send, args=(self._orders, ours), name="punica-orders", daemon=True).start()
        program = pickle.dumps((run, (build,)))
        self._process = context.Process(target=run_with_parent, args=(program, orders, theirs), name="punica-engine")
        atexit.register(self.close)  # else multiprocessing, whose turn is later, would wait for the process
        try:
            self._process.start()
            for end in (orders, theirs):  # the process has the only ones: they close with it
                end.close()
            self.engine = self._await_engine()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Unfinished requests are lost."""
        self._orders.put(None)
        self._messages.close()
        if self._process.pid is not None:
            self._process.join(_END_S)
            self._process.kill()
            self._process.join()
        atexit.unregister(self.close)

    def start(self) -> None:
        """Begin to deliver pieces on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._messages.fileno(), self._receive)

    async def stop(self) -> None:
        """Abort what is unfinished and end the process."""
        self._end("the server is stopping")
        await asyncio.to_thread(self.close)
        if self._ending is not None:  # it says why the process ended before
            await self._ending

    @property
    def num_places(self) -> int:
        """Requests of one step."""
        return self.engine.num_places

    @property
    def has_lora(self) -> bool:
        """True for an engine with adapter slots."""
        return self.engine.has_lora

    @property
    def is_healthy(self) -> bool:
        """True while the process runs and its last step did not raise."""
        return not self._end_reason and not self._is_failing

    async def submit(self, call: Call) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises. ApiError 503: it ended."""
        self._calls[call.number] = call
        await self._order(RemoteStepper.add, call.number, call.requests, call.streams)

    def abort(self, call: Call) -> None:
        """Take out the requests of a call that have not ended; also of one whose :meth:`submit` was cancelled."""
        self._calls.pop(call.number, None)
        if call.num_unfinished:
            with suppress(ApiError):  # ended: all its requests have
                self._order(RemoteStepper.abort, [request.request_id for request in call.requests])

    async def admit(self, adapter: LoRARequest) -> None:
        """Read and check an adapter beside the steps."""
        await self._order(RemoteStepper.read, adapter)

    async def retire(self, adapter_id: int) -> None:
        """Remove an adapter from the engine's memory as soon as no request uses it."""
        await self._order(RemoteStepper.retire, adapter_id)

    def _await_engine(self) -> EngineDescription:
        try:
            found = self._messages.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{self._how_it_ended()} before the engine was ready; see its output above") from None
        if isinstance(found, EngineDescription):
            return found
        raise found

    def _order(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[None]:
        """Have a method of the process's `RemoteStepper` called; the future has its error. ApiError 503: it ended."""
        if self._end_reason:
            raise ApiError(503, self._end_reason, code="engine_stopped")
        number = next(self._numbers)
        self._orders.put(pickle.dumps((number, function, arguments)))
        reply = self._replies[number] = self._loop.create_future()
        return reply

    def _receive(self) -> None:
        """Take all messages that have come; on the event loop."""
        try:
            while self._messages.poll():
                self._take(self._messages.recv())
        except (EOFError, OSError):
            self._loop.remove_reader(self._messages.fileno())
            self._is_failing = True
            self._ending = self._loop.create_task(self._tell_the_end())
        except Exception as error:  # its pieces and replies are lost
            _log.exception("a message of the engine's process cannot be read")
            self._end(f"a message of the engine's process cannot be read: {error}; restart the server")

    async def _tell_the_end(self) -> None:
        reason = f"{await asyncio.to_thread(self._how_it_ended)}; restart the server"
        _log.error(reason)
        self._end(reason)

    def _take(self, message: Message) -> None:
        for note in message.notes:
            note(self.metrics)
        self._is_failing = message.is_failing
        for number, piece in message.pieces:
            if number in self._calls:
                self._calls[number].put(piece)
        if message.reply is None:
            return
        number, error = message.reply
        reply = self._replies.pop(number)
        if reply.done():  # cancelled
            return
        if error is None:
            reply.set_result(None)
        else:
            reply.set_exception(error)

    def _end(self, reason: str) -> None:
        """Take no further message; open calls get an error, orders without reply a refusal."""
        if self._end_reason:
            return
        self._end_reason = reason
        self._loop.remove_reader(self._messages.fileno())
        self.metrics.note_idle()
        for call in self._calls.values():
            if call.num_unfinished:
                call.put(Piece(0, [], 0, [], error=reason))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ApiError(503, reason, code="engine_stopped"))

    def _how_it_ended(self) -> str:
        """Wait for the exit code; say what it means."""
        self._process.join(_REASON_S)  # its connection is closed first
        code = self._process.exitcode
        if code is None:
            return "the engine's process has closed its connection"
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"the engine's process was ended by {signal.Signals(-code).name}{memory}"


def _send(orders: "SimpleQueue[bytes | None]", connection: Connection) -> None:
    """Send orders, then close the connection. One that the process does not take blocks this thread alone."""
    with connection, suppress(OSError):  # the process has ended: noticed with the next message
        while (order := orders.get()) is not None:
            connection.send_bytes(order)
