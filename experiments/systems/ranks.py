"""Tensor-parallel ranks that stay: processes with one worker each, whose methods are called over a socket.

A rank takes minutes to start when it draws a large model and captures its steps; the harness measures point by point.
"""

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

from experiments.harness.experiment import CheckFailed
from punica.parallel import spawn_tensor_parallel

POLL_S = 0.5
LEAVE_S = 60.0
"""Seconds that `close` waits for ranks at work before it kills them."""


class Ranks:
    """`tp_size` processes in one tensor-parallel group, each with a worker that it made by `make(*args)`.

    `backend`: of `punica.parallel.spawn_tensor_parallel`; None: NCCL where there are GPUs. Arguments and results are
    pickled. RuntimeError, with the traceback of the rank that failed first, when a rank ends early.
    """

    def __init__(self, make: Callable[..., object], args: tuple, tp_size: int, backend: str | None = None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="punica-ranks-"))
        self._error: BaseException | None = None
        self._lines: list[Connection] = []
        self._pids: list[int] = []
        job = (str(self._home / "line"), make, args)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(job[0])
            listener.listen(tp_size)
            listener.settimeout(POLL_S)
            self._thread = threading.Thread(target=self._run, args=(tp_size, job, backend), daemon=True)
            self._thread.start()
            try:
                met = dict(self._accepted(listener) for _ in range(tp_size))
            except BaseException:
                self.close()
                raise
        self._lines = [met[rank] for rank in range(tp_size)]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `worker.method(*args)` on all ranks at once; return the results in rank order.

        `CheckFailed` when a worker raised it; ranks can be called again afterwards.
        """
        try:
            for line in self._lines:
                line.send((method, args))
            answers = [line.recv() for line in self._lines]
        except (EOFError, ConnectionError):
            self._fail()
        for answer in answers:
            if isinstance(answer, CheckFailed):
                raise answer
        return answers

    def close(self) -> None:
        """Let the ranks finish and end; kill those that take longer than `LEAVE_S`, to free their memory."""
        for line in self._lines:
            line.close()
        self._thread.join(LEAVE_S)
        if self._thread.is_alive():
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join()
        shutil.rmtree(self._home, ignore_errors=True)

    def _run(self, tp_size: int, job: tuple, backend: str | None) -> None:
        try:
            spawn_tensor_parallel(_obey, tp_size, *job, backend=backend)
        except BaseException as error:  # raised by `_fail`, in the other thread
            self._error = error

    def _accepted(self, listener: socket.socket) -> tuple[int, Connection]:
        while True:
            with suppress(TimeoutError):
                connected, _ = listener.accept()
                connected.setblocking(True)
                line = Connection(connected.detach())
                self._lines.append(line)
                rank, pid = line.recv()
                self._pids.append(pid)
                return rank, line
            if not self._thread.is_alive():
                self._fail()

    def _fail(self) -> NoReturn:
        self._thread.join(LEAVE_S)  # it ends the other ranks first
        raise RuntimeError(f"the ranks have ended: {self._error or 'without a word'}") from self._error


def _obey(rank: int, address: str, make: Callable[..., object], args: tuple) -> None:
    """Run a rank: call its worker's methods until the connection closes."""
    with Client(address, "AF_UNIX") as line:
        line.send((rank, os.getpid()))
        worker = make(*args)
        while True:
            try:
                method, given = line.recv()
            except EOFError:
                return
            try:
                answer = getattr(worker, method)(*given)
            except CheckFailed as wrong:
                answer = wrong
            with suppress(BrokenPipeError):  # they have stopped waiting for it
                line.send(answer)
