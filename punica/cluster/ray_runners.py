"""Runners as Ray actors: start, step, kill. The only file that imports Ray.

A runner is ``tp_size`` actors, one per tensor-parallel rank, in one placement group. All ranks get every `StepCommand`;
rank 0 replies. If one rank dies the runner is dead, and its replacement takes over the placement group.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from punica.adapters import LoRARequest
from punica.checks import check_count, check_number, clip
from punica.cluster.adapter_files import StoredFiles, digest_of, read_adapter_files
from punica.cluster.runner import Runner, RunnerDescription, StepCommand, StepReply
from punica.engine import Engine
from punica.parallel import init_tensor_parallel

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
    """Say why there is no Ray cluster at ``address``, or none could be started here, and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if address is not None:
        return f"no Ray cluster answers at {address} ({reason}); start one with ray start --head, or give no address"
    return (
        f"Ray did not come up on this machine ({reason}); end other work, look for free memory and room in /dev/shm, "
        "or start it by ray start --head and give address='auto'"
    )


@dataclass(frozen=True)
class RankPlace:
    """Location of a rank's actor: machine, address of the rendezvous, and the GPUs that Ray gave it."""

    node: str
    host: str
    port: int
    gpus: tuple[str, ...]


def device_environment(places: Sequence[RankPlace], rank: int) -> dict[str, str]:
    """Build the environment variables of a rank. All ranks of a machine see the GPUs of all of them: NCCL cannot copy
    between GPUs that are hidden from one process.
    """
    here = [place for place in places if place.node == places[rank].node]
    local = sum(place.node == places[rank].node for place in places[:rank])
    variables = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(here))}
    gpus = [gpu for place in here for gpu in place.gpus]
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else variables


class RankActor:
    """One tensor-parallel rank of a runner, in its own process; `start` comes before the other orders."""

    _runner: Runner
    _rank: int

    def __init__(self) -> None:
        self._group = ExitStack()

    def place(self) -> RankPlace:
        ray = import_ray()
        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def start(self, build: Callable[[], Engine], rank: int, num_threads: int, *places: RankPlace) -> RunnerDescription:
        torch.set_num_threads(num_threads)
        self._rank = rank
        if len(places) > 1:
            os.environ.update(device_environment(places, rank))
            meeting = f"tcp://{places[0].host}:{places[0].port}"
            group = init_tensor_parallel(init_method=meeting, rank=rank, world_size=len(places))
            self._group.enter_context(group)
        self._runner = Runner(build, fetch=import_ray().get)
        return self._runner.describe()

    def step(self, command: StepCommand) -> StepReply | None:
        reply = self._runner.step(command)
        return reply if self._rank == 0 else None

    def check_adapter(self, adapter: LoRARequest, files: StoredFiles | None) -> Exception | None:
        """Return the error for which the engine refuses an adapter, ``None`` for one that fits."""
        try:
            self._runner.check_adapter(adapter, files)
        except (OSError, TypeError, ValueError) as error:
            return error
        return None


@dataclass(frozen=True)
class RankResources:
    """Resources of each rank of a runner: what Ray reserves, and threads of torch. Ray hides no GPU from ranks that
    reserve none: their factory must name its device.
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
class RunnerProcesses:
    """Actors of one runner, in rank order; ``build`` makes the engine in each of its ``tp_size`` ranks."""

    build: Callable[[], Engine]
    tp_size: int
    resources: RankResources
    actors: list[Any] = field(default_factory=list, init=False)
    _placement: Any = field(default=None, init=False)
    _place: Any = field(default=None, init=False)  # future, ready when the reservation is made

    def start(self) -> list[Any]:
        """Start new actors; return a future `RunnerDescription` of each."""
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = self.resources
        if self._placement is None:
            bundle = {"CPU": each.num_cpus, **({"GPU": each.num_gpus} if each.num_gpus else {})}
            self._placement = ray.util.placement_group([bundle] * self.tp_size, strategy="PACK")
        self._place = self._placement.ready()  # a new reservation if the machine is gone
        options = {"num_cpus": each.num_cpus, "num_gpus": each.num_gpus, "max_restarts": 0}
        actor = ray.remote(RankActor)
        self.actors = [
            actor.options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=rank
                ),
            ).remote()
            for rank in range(self.tp_size)
        ]
        places = [one.place.remote() for one in self.actors] if self.tp_size > 1 else [None]
        build = ray.put(self.build)
        return [one.start.remote(build, rank, each.num_threads, *places) for rank, one in enumerate(self.actors)]

    @property
    def is_placed(self) -> bool:
        """True once Ray has reserved the resources."""
        return bool(wait_for([self._place], 0))

    def no_place(self, waited_s: float) -> str:
        """Describe a missing reservation."""
        ray = import_ray()
        free, total, wanted = ray.available_resources(), ray.cluster_resources(), []
        for name, each in (("CPU", self.resources.num_cpus), ("GPU", self.resources.num_gpus)):
            if each:
                needed = f"{self.tp_size} x {each:g}" if self.tp_size > 1 else f"{each:g}"
                wanted.append(f"{needed} {name}s ({free.get(name, 0):g} of {total.get(name, 0):g} are free)")
        return (
            f"no place in the Ray cluster within {waited_s:g} s for {' and '.join(wanted)}; wait until others give "
            "theirs back, ask for fewer runners, add machines, or raise Timeouts.place_s"
        )

    def step(self, command: StepCommand) -> list[Any]:
        """Order a step of all ranks; return a future of each, with rank 0's reply."""
        return [actor.step.remote(command) for actor in self.actors]

    def order_check(self, adapter: LoRARequest, files: StoredFiles | None) -> Callable[[], None]:
        """Order all ranks to check an adapter; return a function for any thread, which waits for them. It raises rank
        0's error, `Lost`, or RuntimeError where a rank has not replied within `CHECK_TIMEOUT_S`.
        """
        futures = [actor.check_adapter.remote(adapter, files) for actor in self.actors]
        deadline = time.monotonic() + CHECK_TIMEOUT_S

        def wait() -> None:
            try:
                refusals = [result_of(future, max(0.0, deadline - time.monotonic())) for future in futures]
            except TimeoutError as error:
                raise RuntimeError(
                    f"adapter {clip(adapter.lora_name)} was not checked: its runner has not replied within "
                    f"{CHECK_TIMEOUT_S:g} s, it is busy or hangs; try again later"
                ) from error
            if refusals[0] is not None:
                raise refusals[0]

        return wait

    def kill(self) -> None:
        """Kill the actors without waiting for them."""
        for actor in self.actors:
            import_ray().kill(actor)
        self.actors = []

    def close(self) -> None:
        """Kill the actors and release the reservation."""
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


def store(content: Any) -> Any:
    return import_ray().put(content)


def store_adapter(adapter: LoRARequest) -> StoredFiles:
    """Read the files of an adapter, and put them into the object store. Errors of `read_adapter_files`."""
    files = read_adapter_files(adapter)
    return StoredFiles(digest_of(files), store(files))
