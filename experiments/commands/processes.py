"""Commands that run at once on a machine, each on GPUs and CPU cores of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Generic, TypeVar

from experiments.harness.schema import REPOSITORY

STOPPING_S = 30.0
"""Seconds that an interrupted command has for writing its rows."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


K = TypeVar("K")
"""Key by which a caller tells a command from others."""


@dataclass(frozen=True)
class Ended(Generic[K]):
    """A command that ended: its key, exit status (None: interrupted), and its last line, from JSON."""

    key: K
    status: int | None
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Running(Generic[K]):
    key: K
    process: subprocess.Popen[bytes]
    output: IO[str]
    places: tuple[int, ...]


class Processes(Generic[K]):
    """Commands under way on `places` GPUs; one place is the whole machine, without a change of its environment.

    With several, a command sees its GPUs alone (`CUDA_VISIBLE_DEVICES`), and its share of the cores. So the CPU time of
    the others counts as no disturbance. What it prints while it runs is appended to a file per GPU in `logs`.
    """

    def __init__(self, places: int, logs: Path) -> None:
        self.free, self._places, self._logs = list(range(places)), places, logs
        self._running: list[_Running[K]] = []

    @property
    def running(self) -> list[K]:
        """Keys of the commands under way."""
        return [one.key for one in self._running]

    def start(self, key: K, words: Sequence[str], gpus: int) -> None:
        """Run `python -m words` on as many of the free GPUs, and their cores."""
        taken = tuple(self.free[:gpus])
        del self.free[:gpus]
        output = TemporaryFile("w+")  # noqa: SIM115 (closed when the command has ended)
        with self._log(taken) as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=REPOSITORY, stdout=output, stderr=errors,
                env=os.environ | self._visible(taken), preexec_fn=lambda: self._settle(taken),
            )  # fmt: skip
        self._running.append(_Running(key, process, output, taken))

    def ended(self) -> Iterator[Ended[K]]:
        """Yield the commands that ended since the last call, and free their GPUs."""
        for one in list(self._running):
            if (status := one.process.poll()) is not None:
                yield self._end(one, status)

    def interrupt(self) -> Iterator[Ended[K]]:
        """Interrupt all commands, wait while they write their rows, and yield them."""
        yield from self.ended()
        for one in self._running:
            one.process.send_signal(signal.SIGINT)
        for one in list(self._running):
            try:
                one.process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            yield self._end(one, None)

    def _end(self, one: _Running[K], status: int | None) -> Ended[K]:
        with one.output as output:
            output.seek(0)
            lines = output.read().splitlines()
        print(*lines, sep="\n")
        self._running.remove(one)
        self.free = sorted([*self.free, *one.places])
        facts = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return Ended(one.key, status, facts)

    def _visible(self, taken: Sequence[int]) -> dict[str, str]:
        if self._places == 1:
            return {}
        outer = os.environ.get(VISIBLE)
        mine = outer.split(",") if outer else [*map(str, range(self._places))]
        return {VISIBLE: ",".join(mine[place] for place in taken)}

    def _settle(self, taken: Sequence[int]) -> None:
        """Take a share of the cores, and SIGINT, which a shell lets its jobs in the background ignore."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        cores = sorted(os.sched_getaffinity(0))
        if 1 < self._places <= len(cores):
            share = len(cores) // self._places
            os.sched_setaffinity(0, {cores[place * share + core] for place in taken for core in range(share)})

    def _log(self, taken: Sequence[int]) -> IO[bytes]:
        if self._places == 1:
            return os.fdopen(os.dup(sys.stderr.fileno()), "wb")
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / f"record_all_gpu{taken[0]}.log"
        print(f"on GPU {', '.join(map(str, taken))}, progress in {path}", file=sys.stderr, flush=True)
        return path.open("ab")
