"""Python modules as processes: one that runs to its end, and our server, which runs until it is closed."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import REPOSITORY

START_S, END_S = 300.0, 60.0
"""Longest waits for a server's address, and for its end."""
LOG_LETTERS = 3000
_POLL_S = 0.05
_ADDRESS = re.compile(r"Uvicorn running on (http://\S+)")


def environment_of(device: str, threads: int) -> dict[str, str]:
    """Return the environment of a process that finds this repository and what this process finds, and no GPU where
    `device` is the CPU.
    """
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    return found if device == "cuda" else {**found, "CUDA_VISIBLE_DEVICES": ""}


def run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run a module to its end. `CheckFailed` with the end of its output: it failed."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", module, *arguments]
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise CheckFailed(_ended(module, code, log))


class OwnServer:
    """`punica.serve` on a port of its own. `CheckFailed`: it does not start."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            command = [sys.executable, "-m", "punica.serve", *arguments, "--port=0", "--drain=0"]
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            self.url = self._address()
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if found := _ADDRESS.search(self._log.read_text(encoding="utf-8", errors="replace")):
                return found[1]
            if (code := self._process.poll()) is not None:
                raise CheckFailed(_ended("punica.serve", code, self._log))
            time.sleep(_POLL_S)
        raise CheckFailed(f"punica.serve has not started within {START_S:g} s")

    def close(self) -> None:
        """End it and wait for its end, so that its memory is free."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ended(module: str, code: int, log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace")[-LOG_LETTERS:]
    return f"the process of {module} ended with exit code {code}, and said last:\n{said}"
