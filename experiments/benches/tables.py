"""Tables of GPU operators: parallel compilation, identity of rows, ratios, and the end of a run. Imports no torch."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness.schema import ConfigError
from experiments.harness.source import fingerprint
from experiments.measure import environment
from punica.processes import end_with_parent

Job = TypeVar("Job")


def compile_in_parallel(call: Callable[[Job], str], jobs: Sequence[Job], workers: int, chunk: int = 4) -> None:
    """Compile the kernels of `jobs` in worker processes, so that this one finds them in Triton's cache.

    `call` returns what went wrong: it is printed here, and happens again when the job is timed.
    """
    if workers == 0 or not jobs:
        return
    context, number = get_context("spawn"), min(workers, len(jobs))
    with ProcessPoolExecutor(number, mp_context=context, initializer=end_with_parent) as pool:
        for message in filter(None, pool.map(call, jobs, chunksize=chunk)):
            print("not compiled:", message[:200])


def columns_of_all(figure: str, script: str) -> dict[str, Any]:
    """Return the columns that all rows of the table made by `script` share."""
    about = {**environment.stamp(), "source_hash": fingerprint(Path(script).resolve()), "figure": figure}
    about |= {"hardware": environment.hardware_slug(), "device": environment.device_name()}
    return about | {"unit": "us", "statistic": "median", "seq_len": None, "scale": "paper"}


def digest(*content: object) -> str:
    """Return twelve hex digits over what decides a line's numbers."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def summary(what: str, ratios: Sequence[float]) -> Iterator[str]:
    """Yield a line with mean, least and largest of `ratios`; none without any."""
    if ratios:
        mean = f"geometric mean {statistics.geometric_mean(ratios):.2f}"
        yield f"{what}: {mean}, lowest {min(ratios):.2f}, highest {max(ratios):.2f}, rows {len(ratios)}"


def needs_gpu(what: str) -> None:
    """Raise `ConfigError` without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"{what} time GPU kernels; no CUDA device is visible")


def rows_folder(out: str | None) -> Path:
    """Return the folder of the rows: `out`, or this machine's."""
    return Path(out or f"outputs/{environment.hardware_slug()}/rows")


def end(failed: Iterable[str]) -> None:
    """End the run with exit code 1 when results were wrong."""
    if failed := list(failed):
        print("wrong, and not in the rows:", *failed, sep="\n  ", flush=True)
        raise SystemExit(1)
