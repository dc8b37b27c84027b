"""`Turns`: several threads in one engine, one of them at a time.

    thread A, generate:  add | step | step | step .................... | done, resigns
    thread B, generate:          add | waits for news of its requests .. | leads: step | step | done

A step serves the requests of all open calls, so one call makes the steps and the others wait. Threads enter in about
the order in which they came: one that makes steps cannot keep out another that brings requests.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

_DEVICES = ("cpu", "cuda")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Turns:
    """Reentrant lock of one engine, fair to threads that wait, and the lead in making steps.

    ``one_thread``: only the thread that made this object may enter, as each of several tensor-parallel ranks has to
    take the same requests in the same order. Others get a RuntimeError.
    """

    def __init__(self, *, one_thread: bool = False) -> None:
        self._only = threading.get_ident() if one_thread else None
        self._door, self._room = threading.Lock(), threading.Lock()  # the next thread waits at the door, for the room
        self._owner: int | None = None
        self._depth = 0
        self._leader: int | None = None
        self._news = threading.Condition()
        self._num_steps = 0

    def __enter__(self) -> None:
        this = threading.get_ident()
        if self._only not in (None, this):
            raise RuntimeError(
                "this engine is one of several tensor-parallel ranks, which take the same calls in the same order; "
                "call it from the thread that built it, or give each thread a queue into that one"
            )
        if self._owner != this:
            with self._door:
                self._room.acquire()
            self._owner = this
        self._depth += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._room.release()

    def advance(self, is_done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Make one step, or wait for one of the leading thread; nothing if ``is_done`` already.

        The thread leads from its first step on, until :meth:`resign`. Where it is alone in the engine, the leading
        thread cannot step, and it makes the step itself.
        """
        this = threading.get_ident()
        with self:
            if is_done():
                return
            if self._leader is None:
                self._leader = this
            if self._leader == this or self._depth > 1:
                step()
                self._tell(1)
                return
            seen = self._num_steps
        with self._news:
            self._news.wait_for(lambda: self._leader is None or self._num_steps != seen)

    def resign(self) -> None:
        """Leave the lead, if this thread has it, to one of those that wait."""
        with self:
            if self._leader == threading.get_ident():
                self._leader = None
                self._tell(0)

    def _tell(self, num_steps: int) -> None:
        with self._news:
            self._num_steps += num_steps
            self._news.notify_all()


class Shared(Protocol):
    """Object that threads share."""

    _turns: Turns


_S = TypeVar("_S", bound=Shared)


def exclusive(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate a method that only one thread at a time may be in, and that ``torch.autocast`` must not reach.

    Autocast would change the dtype of some operations, and so tokens.
    """

    @wraps(method)
    def alone(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._turns:
            enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
            if not enabled:
                return method(self, *args, **kwargs)
            with ExitStack() as stack:
                for device in enabled:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return method(self, *args, **kwargs)

    return alone
