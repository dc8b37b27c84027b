"""Processes that end with the one that started them, however that ends, also while they load or a call hangs."""

import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
from contextlib import suppress
from typing import Any

SPINS = 10_000
"""Turns for which an OpenMP thread waits for others before it sleeps. By default it burns 300,000, milliseconds, also
where another process has the core of the thread that it waits for.
"""


def end_with_parent() -> None:
    """Have the kernel kill this process of `multiprocessing` when its parent ends; end it where the parent already has.
    ``PR_SET_PDEATHSIG`` would do so already when the thread ends that started this process.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    end = parent.sentinel  # a pipe to which nothing more is written: its only event is the end of the parent
    with suppress(OSError):  # of kernels without it
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # before the kernel knew
        os._exit(1)


def run_with_parent(call: bytes, *arguments: Any) -> None:
    """Run a pickled ``(function, more)`` as ``function(*arguments, *more)``, in a process that ends with its parent,
    also while it imports what the function needs. Set variables of OpenMP win over `SPINS`.
    """
    end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # read when torch is imported
    function, more = pickle.loads(call)
    function(*arguments, *more)
