"""Runners as Ray actors: started, asked for steps, ended. The only file that knows Ray.

A runner is ``tp_size`` actors, one per tensor-parallel rank, in one placement group, so that they start together or not
at all and lie on one machine where that is possible. All ranks get every `StepCommand`; rank 0 replies. If one of them
dies the runner is dead, and a new one takes its placement group. Where there is no place for it, it waits for a while.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from punica.cluster.runner import Runner, RunnerDescription, StepCommand, StepReply
from punica.engine import Engine
from punica.parallel import init_tensor_parallel

OBJECT_STORE_BYTES = 128 << 20
"""Of a Ray that is started here: it carries adapters and messages, and a container's /dev/shm may be small."""

_STARTS = 3  # Ray gives a start of its own 30 s, which is too little on a busy machine until its files are in memory


def import_ray() -> ModuleType:
    """The optional package; ImportError with the command that installs it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("a cluster needs Ray; install it with: pip install 'punica[cluster]'") from error
    return ray


def connect(address: str | None, num_cpus: float, num_gpus: float) -> bool:
    """Join the Ray cluster at ``address`` (``None``: the one that this process has joined, else a new one on this
    machine with so many CPUs, a number to reckon with and not of cores); whether one was joined or started.

    ValueError for an address where another one was joined, and for a cluster that is too small even if nobody else
    used it.
    """
    ray = import_ray()
    joins = not ray.is_initialized()
    if not joins and address is not None:
        raise ValueError(f"address is {address!r}, but this process is in a Ray cluster; call ray.shutdown() first")
    if joins:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing here talks to the internet
            os.environ.setdefault("RAY_worker_niceness", "0")  # runners are what this machine is for, no background
            cpus = max(num_cpus, os.cpu_count() or 1)
            quiet |= {"include_dashboard": False, "num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
        for last in (*[False] * (_STARTS - 1), True) if address is None else (True,):
            try:
                ray.init(address=address or "local", **quiet)
                break
            except Exception as error:  # Ray raises nothing narrower; what it has started ends with this process
                if last or "timed out during startup" not in str(error):
                    raise
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


@dataclass(frozen=True)
class RankPlace:
    """Where the actor of a rank lives: its machine, an address to meet at, and the GPUs that Ray gave it."""

    node: str
    host: str
    port: int
    gpus: tuple[str, ...]


def device_environment(places: Sequence[RankPlace], rank: int) -> dict[str, str]:
    """Environment variables of a rank among its group. All ranks of a machine see the GPUs of all of them, since those
    of one process that another one cannot see are out of reach for NCCL's copies between GPUs.
    """
    here = [place for place in places if place.node == places[rank].node]
    local = sum(place.node == places[rank].node for place in places[:rank])
    variables = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(here))}
    gpus = [gpu for place in here for gpu in place.gpus]
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else variables


class RankActor:
    """One tensor-parallel rank of a runner, in a process of its own."""

    def __init__(self) -> None:
        self._group = ExitStack()
        self._runner: Runner | None = None
        self._rank = 0

    def place(self) -> RankPlace:
        """Where it is."""
        ray = import_ray()
        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def start(self, build: Callable[[], Engine], rank: int, num_threads: int, *places: RankPlace) -> RunnerDescription:
        """Meet the other ranks and build the engine."""
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
        """Of rank 0 the reply; the others did the same."""
        if self._runner is None:
            raise RuntimeError("the rank was not started; call start first")
        reply = self._runner.step(command)
        return reply if self._rank == 0 else None


@dataclass(eq=False)
class RunnerProcesses:
    """The actors of one runner.

    Args:
        build: makes the engine, in every rank.
        tp_size: ranks. ``num_cpus``, ``num_gpus``: what Ray reserves for each. ``num_threads``: of torch in each.

    Attributes:
        actors: handles, in rank order; empty before `start`.
    """

    build: Callable[[], Engine]
    tp_size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    actors: list[Any] = field(default_factory=list, init=False)
    _placement: Any = field(default=None, init=False)
    _place: Any = field(default=None, init=False)  # ready when Ray has found one

    def start(self) -> list[Any]:
        """New actors; a future `RunnerDescription` of each."""
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._placement is None:
            bundle = {"CPU": self.num_cpus, **({"GPU": self.num_gpus} if self.num_gpus else {})}
            self._placement = ray.util.placement_group([bundle] * self.tp_size, strategy="PACK")
        self._place = self._placement.ready()  # again: of a new place, if the machine is gone
        options = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "max_restarts": 0}
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
        return [one.start.remote(build, rank, self.num_threads, *places) for rank, one in enumerate(self.actors)]

    @property
    def is_placed(self) -> bool:
        """Whether Ray has found a place for it."""
        return bool(wait_for([self._place], 0))

    def no_place(self, waited_s: float) -> str:
        """What to say when it has not: wanted, free, and there in all."""
        ray = import_ray()
        free, total, wanted = ray.available_resources(), ray.cluster_resources(), []
        for name, each in (("CPU", self.num_cpus), ("GPU", self.num_gpus)):
            if each:
                needed = f"{self.tp_size} x {each:g}" if self.tp_size > 1 else f"{each:g}"
                wanted.append(f"{needed} {name}s ({free.get(name, 0):g} of {total.get(name, 0):g} are free)")
        return (
            f"no place in the Ray cluster within {waited_s:g} s for {' and '.join(wanted)}; wait until others give "
            "theirs back, ask for fewer runners, add machines, or raise place_timeout_s"
        )

    def step(self, command: StepCommand) -> list[Any]:
        """A step on all ranks; a future reply of each, of which the first is not ``None``."""
        return [actor.step.remote(command) for actor in self.actors]

    def kill(self) -> None:
        """End what is left of the actors, without waiting for them."""
        for actor in self.actors:
            import_ray().kill(actor)
        self.actors = []

    def close(self) -> None:
        """`kill`, and give the machine's resources back."""
        self.kill()
        if self._placement is not None:
            import_ray().util.remove_placement_group(self._placement)
            self._placement = None


class Lost(Exception):
    """What a future stood for will never come; the cause is Ray's error."""


def result_of(future: Any) -> Any:
    """Of a future that is ready. `Lost` when the actor died or raised."""
    ray = import_ray()
    try:
        return ray.get(future)
    except ray.exceptions.RayError as error:
        raise Lost(str(error).strip().rpartition("\n")[2]) from error


def wait_for(futures: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Those that are ready: at least one, or none when ``timeout_s`` seconds have passed (``None``: no limit)."""
    ray = import_ray()
    ready, _ = ray.wait(futures, num_returns=1, timeout=timeout_s)
    if ready:  # others that are ready as well, without waiting for them
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=0)
    return ready


def store(content: Any) -> Any:
    """A reference to ``content`` in Ray's object store, which any actor can turn into it again."""
    return import_ray().put(content)
