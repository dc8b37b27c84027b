"""Chat templates that are not trusted, rendered in a process of their own within limits of time, memory and length.

The sandbox of Jinja bounds what a template reaches, not what it costs: nested loops or ``10 ** 10 ** 10`` run on.
"""

import hashlib
import json
import os
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
"""Time for which a chat whose template exceeded its processor time is not tried again; other chats are."""
ANSWER_S = 60.0
"""Longest wait for a rendering, with the start of the process; beyond it the process is ended."""
_MOST_REFUSED = 64
_PROGRAM = Path(__file__).with_name("render_worker.py")


class TemplateProcess:
    """Process that renders one chat at a time, started with the first and again after it was ended; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0  # of the last job
        self._refused: dict[bytes, float] = {}  # hash of template, chat and variables -> time until which not tried

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt of a chat. ValueError: the template's error, or the limit that it exceeds."""
        try:
            chat = [{name: value for name, value in one.items() if value is not None} for one in messages]
            most_characters = len(json.dumps(chat)) + MOST_CHARACTERS
            job = json.dumps({
                "template": template, "messages": chat, "variables": dict(variables),
                "most_characters": most_characters,
            })  # fmt: skip
        except (TypeError, RecursionError) as error:
            raise ValueError(f"an adapter's own chat template takes JSON values alone: {error}") from error
        content = job.encode()
        key = hashlib.sha256(content).digest()
        with self._lock:
            if self._refused.get(key, 0.0) > time.monotonic():
                raise ValueError(_too_long())
            answer = self._answer(content, key)
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def _answer(self, job: bytes, key: bytes) -> dict[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        self._number += 1
        number = b"%d" % self._number
        late = threading.Timer(ANSWER_S, process.kill)
        late.daemon = True
        late.start()
        try:
            jobs = cast(IO[bytes], process.stdin)
            jobs.write(number + b" " + job + b"\n")
            jobs.flush()
            line = self._answers.readline()
            if line.endswith(b"\n"):
                return self._checked(line, number)
        except BaseException as error:  # an interrupt in between: its answer would be the next one's
            self._end()
            if isinstance(error, OSError):
                raise ValueError(f"the process that renders chat templates ended: {error}") from error
            raise
        finally:
            late.cancel()
        self._end()
        if process.returncode != -signal.SIGPROF:
            raise ValueError(f"the process that renders chat templates ended with status {process.returncode}")
        while len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[key] = time.monotonic() + REFUSED_S
        raise ValueError(_too_long())

    def _checked(self, line: bytes, number: bytes) -> dict[str, Any]:
        answered, _, content = line.partition(b" ")
        if answered != number:
            raise ValueError("the process that renders chat templates answered another chat; it is started again")
        answer = dict(json.loads(content))
        if answer.get("ends"):  # its memory is used up by templates that transformers keeps compiled
            self._end()
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process. Its answers have a pipe of their own, so that no printed text mixes with them."""
        self._end()
        read, write = os.pipe()
        self._answers = open(read, "rb")  # noqa: SIM115
        command = [sys.executable, "-P", str(_PROGRAM), str(CPU_S), str(MOST_BYTES), str(write)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(write,))
        except OSError:
            self._answers.close()
            raise
        finally:
            os.close(write)
        self._process, self._finalizer = process, weakref.finalize(self, _end, process, self._answers)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()


def _too_long() -> str:
    return f"it takes more than {CPU_S} s of processor time, the limit, and is tried again {REFUSED_S:.0f} s later"


def _end(process: "subprocess.Popen[bytes]", answers: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, answers):
        with suppress(OSError):  # unsent bytes of a broken pipe
            if pipe is not None:
                pipe.close()
