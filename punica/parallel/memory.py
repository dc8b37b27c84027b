"""Free-memory checks before large allocations."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from punica.parallel.group import get_tensor_model_parallel_world_size


class Need(NamedTuple):
    """A large allocation: ``what`` takes ``nbytes``, ``remedy`` takes fewer."""

    what: str
    nbytes: int
    remedy: str


class _Accounting(NamedTuple):
    """Files in which a version of Linux's control groups reports limit and use of memory."""

    root: str
    limit: str
    used: str
    file_cache: tuple[str, str]  # lines of memory.stat: reclaimed before an allocation fails


_V1 = _Accounting(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)  # fmt: skip
_V2 = _Accounting("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on CUDA with those that torch has reserved and does not use; on a CPU without
    swapping, within the limits of the container, divided by the ranks of this group.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = min([psutil.virtual_memory().available, *container_bytes()])
    return max(0, available) // get_tensor_model_parallel_world_size()


def container_bytes(root: Path = Path("/")) -> Iterator[int]:
    """Bytes left in each control group of this process that has a limit. ``root``: of the file system."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        accounting = _V1 if controllers else _V2
        top = root / accounting.root
        group = top / path.strip("/")
        # in a container the path may be the host's, and only the top is visible
        for level in (group, *group.parents):
            if level.is_relative_to(top) and (left := _left_in(level, accounting)) is not None:
                yield left


def _left_in(group: Path, accounting: _Accounting) -> int | None:
    try:
        limit = int((group / accounting.limit).read_text(encoding="utf-8"))  # "max" is no limit
        used = int((group / accounting.used).read_text(encoding="utf-8"))
        pairs = [line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()]
        cached = sum(int(value) for name, value in pairs if name in accounting.file_cache)
    except (OSError, ValueError):
        return None
    return limit - max(0, used - cached)


def check_free(needs: Sequence[Need], device: torch.device) -> None:
    """ValueError if allocations together are more than what is free on the device. Memory that a CPU only promises
    counts: a step that first writes to it would otherwise end the process.
    """
    wanted = sum(need.nbytes for need in needs)
    if device.type == "meta" or wanted <= (free := free_bytes(device)):
        return
    named = " and ".join(need.what if len(needs) == 1 else f"{need.what} ({need.nbytes} bytes)" for need in needs)
    remedies = ", or ".join(need.remedy for need in needs)
    raise ValueError(f"{named} would take {wanted} bytes, {free} are free on {device}; {remedies}")
