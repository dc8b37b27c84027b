"""Use of a process: memory, threads, handles, and throughput of the first and last quarter of a run."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil
import torch


@dataclass(frozen=True)
class Use:
    """Host and device memory in MiB, threads, and open file handles of a process, or of one with its children."""

    host_mib: float
    device_mib: float
    threads: int
    handles: int

    @classmethod
    def of(cls, pid: int | None = None) -> "Use":
        """Read those of a process with its children, a server's engine among them; without ``pid`` of this one alone,
        with its device memory.
        """
        gc.collect()
        process = psutil.Process(pid)
        children = [] if pid is None else process.children(recursive=True)
        all_of_it = [process, *filter(psutil.Process.is_running, children)]
        device = torch.cuda.memory_allocated() if pid is None and torch.cuda.is_available() else 0
        return cls(
            sum(one.memory_info().rss for one in all_of_it) / 2**20, device / 2**20,
            sum(one.num_threads() for one in all_of_it), sum(one.num_fds() for one in all_of_it),
        )  # fmt: skip

    def growth(self, before: "Use") -> dict[str, tuple[float, str]]:
        """Return the differences to ``before`` as values of an outcome."""
        return {
            "host_memory_growth": (self.host_mib - before.host_mib, "MiB"),
            "device_memory_growth": (self.device_mib - before.device_mib, "MiB"),
            "thread_growth": (self.threads - before.threads, "count"),
            "handle_growth": (self.handles - before.handles, "count"),
        }

    def leaks(self, before: "Use", pool: int = 0) -> dict[str, int]:
        """Return the threads and handles that there are more of than ``before``; a pool may have started ``pool``."""
        more = {"threads": self.threads - before.threads - pool, "handles": self.handles - before.handles}
        return {name: number for name, number in more.items() if number > 0}


def drift(rates: Sequence[float]) -> float:
    """Return the median of the last quarter of ``rates`` over that of the first, minus 1, in per cent."""
    quarter = max(1, len(rates) // 4)
    return 100 * (median(rates[-quarter:]) / median(rates[:quarter]) - 1)
