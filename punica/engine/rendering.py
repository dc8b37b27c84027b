"""Chat templates that are not trusted, rendered in a process of their own within limits of time, memory and length.

The sandbox of Jinja bounds what a template reaches, not what it costs: nested loops or ``10 ** 10 ** 10`` run on.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

CPU_S = 1.0
"""Most processor time of one rendering; usual templates take milliseconds."""
MOST_BYTES = 256 << 20
"""Most memory of a rendering."""
MOST_CHARACTERS = 1 << 20
"""Most characters that a template may add to those of the chat."""
REFUSED_S = 60.0
"""Time for which a template that exceeded its processor time is not tried again."""
_MOST_REFUSED = 64
_PROGRAM = Path(__file__).with_name("render_worker.py")


class TemplateProcess:
    """Process that renders one chat at a time, started with the first and again after it was ended; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: dict[str, float] = {}  # template -> time until which it is not tried

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt of a chat. ValueError: the template's error, or the limit that it exceeds."""
        try:
            chat = json.dumps([{name: value for name, value in one.items() if value is not None} for one in messages])
            job = json.dumps({
                "template": template, "messages": json.loads(chat), "variables": dict(variables),
                "most_characters": len(chat) + MOST_CHARACTERS,
            })  # fmt: skip
        except (TypeError, RecursionError) as error:
            raise ValueError(f"an adapter's own chat template takes JSON values alone: {error}") from error
        with self._lock:
            if self._refused.get(template, 0.0) > time.monotonic():
                raise ValueError(_too_long())
            answer = self._answer(job.encode() + b"\n", template)
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def _answer(self, job: bytes, template: str) -> dict[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        jobs, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            jobs.write(job)
            jobs.flush()
            line = answers.readline()
        except BaseException as error:  # an interrupt in between: its answer would be the next one's
            _end(process)
            if isinstance(error, OSError):
                raise ValueError(f"the process that renders chat templates ended: {error}") from error
            raise
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        status = process.wait()
        _end(process)
        if status != -signal.SIGPROF:
            raise ValueError(f"the process that renders chat templates ended with status {status}")
        while len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[template] = time.monotonic() + REFUSED_S
        raise ValueError(_too_long())

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", str(_PROGRAM), str(CPU_S), str(MOST_BYTES)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, process)
        return process


def _too_long() -> str:
    return f"it takes more than {CPU_S} s of processor time, the limit, and is tried again {REFUSED_S:.0f} s later"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unsent bytes of a broken pipe
            if pipe is not None:
                pipe.close()
