"""Program of the engine's process: a `Stepper` whose calls are in the server's process (`engine_process.py`).

    orders --reader thread--> commands, then one step, again --one message per step--> the server

The stepping thread is the main one. The reader ends the process when the server's end of the orders closes.
"""

import gc
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any, NamedTuple

from punica.engine import Engine, Request
from punica.engine.pretrained import GenerationDefaults
from punica.engine.text import TextCodec
from punica.serve.calls import Call, Piece
from punica.serve.metrics import KeptNotes
from punica.serve.stepper import EngineStepper
from punica.threads import limit_threads

_log = logging.getLogger(__name__)
REFUSALS = (ImportError, OSError, RuntimeError, TypeError, ValueError)
"""Errors of a checkpoint, its adapters or sizes: told in one line. Others end the process with a traceback."""


@dataclass(frozen=True)
class EngineDescription:
    """Sizes and settings of the engine, for the server: the first message."""

    codec: TextCodec | None = field(repr=False)
    defaults: GenerationDefaults
    max_model_len: int
    num_places: int
    has_lora: bool


class Message(NamedTuple):
    """Changes by one step or order: pieces with the numbers of their calls, notes for the metrics, health.

    ``reply``: number of an order that was carried out, and its error.
    """

    pieces: list[tuple[int, Piece]]
    notes: list[methodcaller]
    is_failing: bool
    reply: tuple[int, Exception | None] | None = None


class RemoteStepper(EngineStepper):
    """Steps of one engine, for the server at the other end of the messages."""

    _notes: KeptNotes

    def __init__(self, engine: Engine, messages: Connection) -> None:
        super().__init__(engine, KeptNotes())
        self._messages = messages
        self._pieces: list[tuple[int, Piece]] = []

    def order(self, number: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Have ``function(self, *arguments)`` called between two steps; from any thread."""
        self._commands.put(partial(self._carry_out, number, function, arguments))

    def run(self) -> None:
        """Step until the engine ends."""
        self._run()
        self._flush()

    # --- orders -------------------------------------------------------------------------------------------------------

    def add(self, number: int, requests: Sequence[Request], streams: bool) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises."""
        self._add(Call(requests, streams, number))

    abort = EngineStepper._take_out
    read = EngineStepper._read
    retire = EngineStepper._retire

    # --- messages -----------------------------------------------------------------------------------------------------

    def _carry_out(self, number: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Call a function of an order and reply; where it began to read an adapter, once that is kept."""
        try:
            begun = function(self, *arguments)
            if isinstance(begun, Future):
                begun.add_done_callback(lambda read: self.order(number, RemoteStepper._keep, (*arguments, read)))
                return
        except Exception as error:
            if not isinstance(error, REFUSALS):
                _log.exception("an order failed")
            self._flush((number, portable(error)))
        else:
            self._flush((number, None))

    def _step(self) -> None:
        super()._step()
        self._flush()

    def _send(self, pieces: Sequence[tuple[Call, Piece]]) -> None:
        self._pieces += [(call.number, piece) for call, piece in pieces]

    def _flush(self, reply: tuple[int, Exception | None] | None = None) -> None:
        message = Message(self._pieces, self._notes.take(), self._is_failing, reply)
        self._pieces = []
        with suppress(OSError):  # the server has gone: the reader ends this process
            self._messages.send_bytes(pickle.dumps(message))


def run(orders: Connection, messages: Connection, build: Callable[[], Engine]) -> None:
    """Build the engine and serve it, until the orders end."""
    for end in (orders, messages):  # a compiler that outlives this process would keep them open
        os.set_inheritable(end.fileno(), False)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole process group: the server's, which lets answers end
        signal.signal(number, signal.SIG_IGN)
    stepper: Future[RemoteStepper] = Future()
    threading.Thread(target=_read, args=(orders, stepper), name="punica-orders", daemon=True).start()
    try:
        engine = build()
    except REFUSALS as error:
        messages.send(portable(error))
        return
    limit_threads(engine.runner.model)
    places, has_lora = engine.config.max_batch_size, engine.manager is not None
    messages.send(EngineDescription(engine.codec, engine.defaults, engine.max_model_len, places, has_lora))
    made = RemoteStepper(engine, messages)
    gc.freeze()  # a collection of all that was imported would halt the steps
    stepper.set_result(made)
    made.run()


def portable(error: Exception) -> Exception:
    """Return an exception that can be sent, with the same message."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever the class of an exception does when it is built anew
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _read(orders: Connection, stepper: "Future[RemoteStepper]") -> None:
    """Take orders, the first of which comes when there is a stepper; without a server end at once, also in a step."""
    try:
        while True:
            order = orders.recv()
            stepper.result().order(*order)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        _log.exception("orders cannot be read: the engine's process ends")
        os._exit(1)
