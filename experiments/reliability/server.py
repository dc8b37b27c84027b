"""A server in a process of its own, on a free port, and its clients."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from experiments.harness.schema import REPOSITORY
from experiments.reliability.world import BATCH, MAX_LEN, MAX_RANK, World

BASE = "base"
START_S = 120.0


@dataclass(frozen=True)
class Served:
    """A running server: its address, its process, and the file of what it prints."""

    url: str
    process: subprocess.Popen[bytes]
    output: Path

    def metric(self, name: str) -> float:
        """Read a gauge or counter, summed over its labels."""
        text = httpx2.get(f"{self.url}/metrics", trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def is_idle(self) -> bool:
        """Check that no request runs or waits."""
        return not self.metric("punica_requests_running") and not self.metric("punica_requests_waiting")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a function until it is true; False after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def serving(world: World, *options: str) -> Iterator[Served]:
    """Start a server of the world's checkpoint and adapters; it is ended with the block.

    RuntimeError with what it printed, where it does not answer.
    """
    port, output = free_port(), world.folder / f"server-{time.monotonic_ns()}.txt"
    words = [
        sys.executable, "-m", "punica.serve", str(world.checkpoint), "--port", str(port), "--dtype", "float32",
        "--served-model-name", BASE, "--max-batch-size", str(BATCH), "--max-model-len", str(MAX_LEN),
        "--max-lora-rank", str(MAX_RANK), "--allow-folder", str(world.folder), *options,
    ]  # fmt: skip
    for adapter in world.adapters:
        words += ["--adapter", f"{adapter.lora_name}={adapter.lora_path}"]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if world.device == "cpu" else {})
    with output.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, cwd=REPOSITORY, env=environment)
    served = Served(f"http://127.0.0.1:{port}", process, output)
    try:
        if not wait_until(lambda: process.poll() is not None or _answers(served.url), START_S):
            raise RuntimeError(f"no answer of the server after {START_S:.0f} s: {output.read_text()}")
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {output.read_text()}")
        yield served
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
