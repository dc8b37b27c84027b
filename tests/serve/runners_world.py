"""A `RayCluster` whose runners are in this process: no Ray, and deaths, hanging starts and false replies on demand."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from punica.adapters import LoRARequest
from punica.cluster import ray_cluster, ray_runners
from punica.cluster.adapter_files import StoredFiles
from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import Lost
from punica.cluster.runner import Runner, StepCommand
from punica.engine import Engine
from tests.serve.world import World


@dataclass(eq=False)
class LocalProcess:
    """Runner without a process of its own. ``dies``: at its next step. ``hangs``: in its next step, and in checks.
    ``starts``: whether a start succeeds, ``None`` for never an answer. ``lies``: its replies name a block more than it
    uses, until it is started again.
    """

    build: Callable[[], Engine]
    resources: Any
    is_placed: bool = True
    dies: bool = False
    starts: bool | None = True
    lies: bool = False
    hangs: bool = False
    killed: threading.Event = field(default_factory=threading.Event)
    is_checking: bool = False
    runner: Runner | None = None
    checked: list[str] = field(default_factory=list)

    def start(self) -> Future[Any]:
        return Future() if self.starts is None else done(self._start)

    def _start(self) -> Any:
        if not self.starts:
            raise Lost("no memory for the model")
        self.dies = self.hangs = self.lies = False
        self.runner = Runner(self.build, fetch=lambda content: content)
        return self.runner.describe()

    def step(self, command: StepCommand) -> Future[Any]:
        return Future() if self.hangs else done(lambda: self._step(command))

    def _step(self, command: StepCommand) -> Any:
        if self.dies or self.runner is None:
            raise Lost("the process has died")
        time.sleep(0.001)  # a runner beside it has its turn
        reply = self.runner.step(command)
        return replace(reply, used_blocks=reply.used_blocks + self.lies)

    def order_check(self, adapter: LoRARequest, files: StoredFiles | None) -> Callable[[], None]:
        """Return a wait that hangs until the runner is killed, where it hangs."""
        runner, hangs, killed = self.runner, self.hangs, self.killed

        def wait() -> None:
            self.is_checking = True
            if hangs:
                assert killed.wait(30), "a runner that hangs was not killed"
            if hangs or self.dies or runner is None:
                raise Lost("the process has died")
            self.checked.append(adapter.lora_name)
            runner.check_adapter(adapter, files)

        return wait

    def kill(self) -> None:
        self.killed.set()
        self.runner, self.killed = None, threading.Event()

    close = kill


def done(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Lost as error:
        future.set_exception(error)
    return future


def wait_for(futures: Sequence[Future[Any]], timeout_s: float | None) -> list[Future[Any]]:
    ready = [future for future in futures if future.done()]
    if not ready:
        assert timeout_s is not None, "it would wait for ever"
        time.sleep(timeout_s)
    return ready


def use_local_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `RayCluster` start its runners in this process."""
    monkeypatch.setattr(ray_runners, "connect", lambda *_: False)
    monkeypatch.setattr(ray_runners, "result_of", lambda future: future.result())
    monkeypatch.setattr(ray_runners, "import_ray", lambda: SimpleNamespace(put=lambda files: files))
    monkeypatch.setattr(ray_cluster, "wait_for", wait_for)
    monkeypatch.setattr(ray_cluster, "RunnerProcess", LocalProcess)


def build_of(world: World, count: int, **sizes: Any) -> partial[Engine]:
    """Factory of runners' engines for the first adapters of a world."""
    sizes = {"max_batch_size": 4, "max_loras": 4, "max_model_len": 128, "max_lora_rank": 8, "device": "cpu", **sizes}
    return partial(Engine.from_pretrained, world.checkpoint, world.adapters[:count], **sizes)


def local(cluster: RayCluster, number: int) -> Any:
    """Process of the runner with this place in the order of names."""
    return sorted(cluster.runners.items())[number][1]
