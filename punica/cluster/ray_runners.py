"""Runners as Ray actors: start, step, kill. The only file that imports Ray.

A runner is an actor in a placement group of its own, which the replacement of a dead one takes over.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from punica.adapters import LoRARequest
from punica.checks import check_count, check_number, clip
from punica.cluster.adapter_files import StoredFiles, digest_of, read_adapter_files
from punica.cluster.runner import Runner, RunnerDescription, StepCommand, StepReply
from punica.engine import Engine

OBJECT_STORE_BYTES = 128 << 20
"""Object store of a Ray started here, for adapters and messages; a container's /dev/shm may be small."""

CHECK_TIMEOUT_S = 30.0
"""Longest wait for a runner's check of an adapter, beyond which it hangs."""

_STARTS = 3  # attempts: Ray limits a start to 30 s, too little on a busy machine until its files are cached


def import_ray() -> ModuleType:
    """Import the optional package; ImportError with the command that installs it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("a cluster needs Ray; install it with: pip install 'punica-lora[cluster]'") from error
    return ray


def connect(address: str | None, num_cpus: float, num_gpus: float) -> bool:
    """Join or start a Ray cluster for runners that need ``num_cpus`` and ``num_gpus`` in all; False if it was joined
    before.

    ``address=None``: the cluster that this process has joined, else a new one here. ValueError: an address where
    another cluster was joined, or a cluster that is too small. RuntimeError: Ray does not come up, or does not answer.
    """
    ray = import_ray()
    joins = not ray.is_initialized()
    if not joins and address is not None:
        raise ValueError(f"address is {address!r}, but this process is in a Ray cluster; call ray.shutdown() first")
    if joins:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no access to the internet
            os.environ.setdefault("RAY_worker_niceness", "0")  # runners are no background work
            cpus = max(num_cpus, os.cpu_count() or 1)
            quiet |= {"include_dashboard": False, "num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
            # those that engines will find: Ray's own count is 0 where its library does not find the driver
            quiet |= {"num_gpus": torch.cuda.device_count()} if num_gpus else {}
        for last in (*[False] * (_STARTS - 1), True) if address is None else (True,):
            try:
                ray.init(address=address or "local", **quiet)
                break
            except Exception as error:  # Ray raises nothing narrower; its processes end with this one
                if last or "timed out during startup" not in str(error):
                    raise RuntimeError(_not_up(address, error)) from error
    there = ray.cluster_resources()
    for name, needed in (("CPU", num_cpus), ("GPU", num_gpus)):
        if needed > there.get(name, 0):
            if joins:
                ray.shutdown()
            raise ValueError(
                f"the runners need {needed:g} {name}s, the Ray cluster has {there.get(name, 0):g}; start fewer "
                "runners, or add machines"
            )
    return joins


def _not_up(address: str | None, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if address is not None:
        return f"no Ray cluster answers at {address} ({reason}); start one with ray start --head, or give no address"
    return (
        f"Ray did not come up on this machine ({reason}); end other work, look for free memory and room in /dev/shm, "
        "or start it by ray start --head and give address='auto'"
    )


class RunnerActor:
    """A runner in its own process; `start` comes before the other orders."""

    _runner: Runner

    def start(self, build: Callable[[], Engine], num_threads: int) -> RunnerDescription:
        torch.set_num_threads(num_threads)
        self._runner = Runner(build, fetch=import_ray().get)
        return self._runner.describe()

    def step(self, command: StepCommand) -> StepReply:
        return self._runner.step(command)

    def check_adapter(self, adapter: LoRARequest, files: StoredFiles | None) -> Exception | None:
        """Return the error for which the engine refuses an adapter, ``None`` for one that fits."""
        try:
            self._runner.check_adapter(adapter, files)
        except (OSError, TypeError, ValueError) as error:
            return error
        return None


@dataclass(frozen=True)
class RunnerResources:
    """Resources of each runner: what Ray reserves, and threads of torch. Ray hides no GPU from runners that reserve
    none: their factory must name its device.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    num_threads: int = 1

    def __post_init__(self) -> None:
        check_number("num_cpus", self.num_cpus)
        check_number("num_gpus", self.num_gpus)
        check_count("num_threads", self.num_threads)


@dataclass(frozen=True)
class Timeouts:
    """Longest waits for a runner, in seconds: ``place_s`` for its resources, ``step_s`` for the end of a step, with
    what first steps compile. A start after its reservation has no limit. TypeError, ValueError: not above 0.
    """

    place_s: float = 60.0
    step_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("place_s", "step_s"):
            if check_number(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0 seconds")


@dataclass(eq=False)
class RunnerProcess:
    """Actor of one runner, in which ``build`` makes the engine."""

    build: Callable[[], Engine]
    resources: RunnerResources
    actor: Any = field(default=None, init=False)
    _placement: Any = field(default=None, init=False)
    _place: Any = field(default=None, init=False)  # future, ready when the reservation is made

    def start(self) -> Any:
        """Start a new actor; return a future `RunnerDescription`."""
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = self.resources
        if self._placement is None:
            bundle = {"CPU": each.num_cpus, **({"GPU": each.num_gpus} if each.num_gpus else {})}
            self._placement = ray.util.placement_group([bundle])
        self._place = self._placement.ready()  # a new reservation if the machine is gone
        placed = PlacementGroupSchedulingStrategy(placement_group=self._placement)
        options = {"num_cpus": each.num_cpus, "num_gpus": each.num_gpus, "max_restarts": 0}
        self.actor = ray.remote(RunnerActor).options(**options, scheduling_strategy=placed).remote()
        return self.actor.start.remote(ray.put(self.build), each.num_threads)

    @property
    def is_placed(self) -> bool:
        """True once Ray has reserved the resources."""
        return bool(wait_for([self._place], 0))

    def no_place(self, waited_s: float) -> str:
        ray = import_ray()
        free, total, wanted = ray.available_resources(), ray.cluster_resources(), []
        for name, each in (("CPU", self.resources.num_cpus), ("GPU", self.resources.num_gpus)):
            if each:
                wanted.append(f"{each:g} {name}s ({free.get(name, 0):g} of {total.get(name, 0):g} are free)")
        return (
            f"no place in the Ray cluster within {waited_s:g} s for {' and '.join(wanted)}; wait until others give "
            "theirs back, ask for fewer runners, add machines, or raise Timeouts.place_s"
        )

    def step(self, command: StepCommand) -> Any:
        """Order a step; return the future `StepReply`."""
        return self.actor.step.remote(command)

    def order_check(self, adapter: LoRARequest, files: StoredFiles | None) -> Callable[[], None]:
        """Order the check of an adapter; return a function for any thread, which waits for it. It raises the runner's
        error, `Lost`, or RuntimeError where it has not replied within `CHECK_TIMEOUT_S`.
        """
        future = self.actor.check_adapter.remote(adapter, files)

        def wait() -> None:
            try:
                refusal = result_of(future, CHECK_TIMEOUT_S)
            except TimeoutError as error:
                raise RuntimeError(
                    f"adapter {clip(adapter.lora_name)} was not checked: its runner has not replied within "
                    f"{CHECK_TIMEOUT_S:g} s, it is busy or hangs; try again later"
                ) from error
            if refusal is not None:
                raise refusal

        return wait

    def kill(self) -> None:
        if self.actor is not None:
            import_ray().kill(self.actor)
            self.actor = None

    def close(self) -> None:
        self.kill()
        if self._placement is not None:
            import_ray().util.remove_placement_group(self._placement)
            self._placement = None


class Lost(Exception):
    """Error for a future of a dead actor; the cause is Ray's error."""


def result_of(future: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a future. `Lost` when the actor died or raised; TimeoutError after ``timeout_s``."""
    ray = import_ray()
    try:
        return ray.get(future, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(str(error)) from error
    except ray.exceptions.RayError as error:
        raise Lost(str(error).strip().rpartition("\n")[2]) from error


def wait_for(futures: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Wait for a future, at most ``timeout_s`` seconds (``None``: no limit); return all that are ready."""
    ray = import_ray()
    ready, _ = ray.wait(futures, num_returns=1, timeout=timeout_s)
    if ready:  # all others that are ready, without waiting
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=0)
    return ready


def store_adapter(adapter: LoRARequest) -> StoredFiles:
    """Read the files of an adapter, and put them into the object store. Errors of `read_adapter_files`."""
    files = read_adapter_files(adapter)
    return StoredFiles(digest_of(files), import_ray().put(files))
