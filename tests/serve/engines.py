"""The same engine in a thread of this process and in a process of its own, with steps that fail or last on demand."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import torch

from punica.engine import Engine, EngineConfig
from punica.engine.pretrained import GenerationDefaults
from punica.serve.backend import Backend
from punica.serve.stepper import EngineStepper
from tests.serve.world import World, state_of


@dataclass(frozen=True)
class Served:
    """A backend behind a real server: its address, and what its engine holds."""

    url: str
    backend: Backend
    failures: Path

    def post(self, path: str, json: dict[str, Any]) -> Any:
        return httpx2.post(f"{self.url}{path}", json=json, trust_env=False, timeout=60)

    def state(self) -> Any:
        """What requests take of the engine, wherever it is."""
        return asyncio.run_coroutine_threadsafe(self._ask(), self.backend._loop).result(60)

    async def _ask(self) -> Any:
        return await self.backend.order(held)

    def fail_steps(self, count: int) -> None:
        """Have the next steps raise."""
        self.failures.write_text("x" * count)


def failing_engine(world: World, failures: Path, **sizes: Any) -> Engine:
    """An engine whose steps raise for each x in a file."""
    engine = world.engine(2, **sizes)
    step = engine.step

    def failing() -> Any:
        if left := failures.read_text():
            failures.write_text(left[1:])
            raise RuntimeError("injected")
        return step()

    engine.step = failing  # type: ignore[method-assign]
    return engine


def builder(world: World, failures: Path, **sizes: Any) -> Callable[[], Engine]:
    """What makes a `failing_engine`, in whichever process."""
    failures.touch()
    return partial(failing_engine, world, failures, **sizes)


def ending(code: int) -> Engine:
    """End the process instead of building an engine."""
    os._exit(code)


def plain() -> Any:
    """What a process needs of an engine that serves nothing."""
    config, runner = EngineConfig(max_batch_size=1, max_model_len=8), SimpleNamespace(model=torch.nn.Linear(1, 1))
    return SimpleNamespace(
        codec=None, config=config, manager=None, defaults=GenerationDefaults(), vocab_size=1, runner=runner
    )


def hanging(file: Path) -> Engine:
    """Write the process's number to a file and hang with the interpreter's lock."""
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
    ctypes.PyDLL(None).sleep(3600)  # unlike CDLL, it keeps the lock
    raise AssertionError("not reached")


class Hangs:
    """What a process hangs at with the interpreter's lock while it unpickles it: as at the import of a library."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return hanging, (self.file,)

    def __call__(self) -> Engine:
        raise AssertionError("not reached")


def threads(stepper: EngineStepper) -> Any:
    """How many threads compute a step, and how long they wait for each other."""
    return torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT")


def held(stepper: EngineStepper) -> dict[str, Any]:
    """What requests take of the engine."""
    return state_of(stepper.engine)


class Peculiar(ValueError):
    """An error that cannot be built anew from its message."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(f"{name} is above {limit}")


def refusing() -> Engine:
    """Refuse to build an engine."""
    raise Peculiar("max_loras", 3)
