"""`EngineProcess`: an engine in a process of its own, so that the event loop never holds up a step.

    event loop --orders, by a thread--> reader thread --> the process's main thread: orders, then one step, again
    event loop <--one message per step-- the process's main thread

In one process the work per token and client would take turns with the steps, which need the interpreter all the time.
Only the engine's process uses the GPU. It ends itself when the server's end of the orders closes.
"""

import asyncio
import atexit
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue

from punica.engine import Engine
from punica.processes import run_with_parent
from punica.serve.backend import Backend, Metrics
from punica.serve.stepper import REFUSALS, EngineStepper, Message
from punica.threads import limit_threads

_log = logging.getLogger(__name__)
_END_S = 5.0  # longest wait for the end of a process that has been told to end, which then is killed
_REASON_S = 0.5  # longest wait for the exit code after its connection has closed; there is nothing else to serve


class EngineProcess(Backend, AbstractContextManager["EngineProcess"]):
    """Engine in a spawned process, which ends with this one, with its ``with`` block or by :meth:`close`.

    ``build`` makes the engine, in the process, which imports the calling script: call it below ``if __name__ ==
    "__main__":``. Raises the errors of ``build``; RuntimeError: the process ends before the engine is ready.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__(Metrics())
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads, and perhaps CUDA
        orders, ours = context.Pipe(duplex=False)
        self._messages, theirs = context.Pipe()  # used one way: sockets hold more than a pipe
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        self._put = lambda order: self._orders.put(pickle.dumps(order))
        threading.Thread(target=_send, args=(self._orders, ours), name="punica-orders", daemon=True).start()
        program = pickle.dumps((run, (build,)))
        self._process = context.Process(target=run_with_parent, args=(program, orders, theirs), name="punica-engine")
        atexit.register(self.close)  # else multiprocessing, whose turn is later, would wait for the process
        try:
            self._process.start()
            for end in (orders, theirs):  # the process has the only ones: they close with it
                end.close()
            try:
                found = self._messages.recv()
            except (EOFError, OSError):
                reason = f"{self._how_it_ended()} before the engine was ready; see its output above"
                raise RuntimeError(reason) from None
            if isinstance(found, Exception):
                raise found
            self.facts = found
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._orders.put(None)
        self._messages.close()
        if self._process.pid is not None:
            self._process.join(_END_S)
            self._process.kill()
            self._process.join()
        atexit.unregister(self.close)

    def start(self) -> None:
        super().start()
        self._loop.add_reader(self._messages.fileno(), self._receive)

    async def stop(self) -> None:
        self._end("the server is stopping")
        await asyncio.to_thread(self.close)

    def _receive(self) -> None:
        try:
            while self._messages.poll():
                self._take(self._messages.recv())
        except (EOFError, OSError):
            reason = f"{self._how_it_ended()}; restart the server"
            _log.error(reason)
            self._end(reason)
        except Exception as error:  # its pieces and replies are lost
            _log.exception("a message of the engine's process cannot be read")
            self._end(f"a message of the engine's process cannot be read: {error}; restart the server")

    def _end(self, reason: str) -> None:
        if not self._end_reason:
            self._loop.remove_reader(self._messages.fileno())
        super()._end(reason)

    def _how_it_ended(self) -> str:
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


def run(orders: Connection, messages: Connection, build: Callable[[], Engine]) -> None:
    """Build the engine and serve it in the main thread, until the orders end."""
    for end in (orders, messages):  # a compiler that outlives this process would keep them open
        os.set_inheritable(end.fileno(), False)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole process group: the server's, which lets answers end
        signal.signal(number, signal.SIG_IGN)
    made: Future[EngineStepper] = Future()
    threading.Thread(target=_read, args=(orders, made), name="punica-orders", daemon=True).start()
    try:
        engine = build()
    except REFUSALS as error:
        messages.send(portable(error))
        return
    limit_threads(engine.runner.model)
    stepper = EngineStepper(engine)
    stepper.send = partial(send, messages)
    messages.send(stepper.facts)
    gc.freeze()  # a collection of all that was imported would halt the steps
    made.set_result(stepper)
    stepper.run()


def send(messages: Connection, message: Message) -> None:
    """Send a message to the server; one that has gone is noticed by the reader, which ends this process."""
    if message.error is not None:
        message = message._replace(error=portable(message.error))
    with suppress(OSError):
        messages.send_bytes(pickle.dumps(message))


def portable(error: Exception) -> Exception:
    """Return an exception that can be sent, with the same message."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever the class of an exception does when it is built anew
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _read(orders: Connection, stepper: "Future[EngineStepper]") -> None:
    """Take orders, the first of which comes when there is a stepper; without a server end at once, also in a step."""
    try:
        while True:
            order = orders.recv()
            stepper.result().orders.put(order)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        _log.exception("orders cannot be read: the engine's process ends")
        os._exit(1)
