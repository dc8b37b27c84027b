"""Start of tensor parallelism: one process per rank, and the group that the layers find.

``tp_size`` processes run *the same program* on *the same requests*; model and engine code does not change. They come
from torchrun (``torchrun --nproc-per-node 2 serve.py``, once per machine), or on one machine from
:func:`spawn_tensor_parallel`::

    with init_tensor_parallel():
        model = LlamaForCausalLM(folder)      # builds this rank's shards
        model.load_weights(folder)            # reads this rank's part of the full checkpoint
        ...                                   # every rank now computes the same logits

With more processes than ``tp_size`` the world is cut into groups of consecutive ranks, ``world_size / tp_size``
replicas of the model.
"""

import importlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from punica.checks import check_count
from punica.parallel.group import TorchDistGroup, process_wide_group, set_tensor_parallel_group
from punica.processes import end_with_parent

TORCHRUN_HINT = "start the program with torchrun --nproc-per-node N, or use punica.parallel.spawn_tensor_parallel"
FIRST_FAILURE = "first-failure"  # file with the traceback of the rank that failed first


@contextmanager
def init_tensor_parallel(
    tp_size: int | None = None,
    *, backend: str | None = None, init_method: str | None = None, rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[TorchDistGroup]:  # fmt: skip
    """Make this process one rank of a tensor-parallel group for the ``with`` block; the group is yielded.

    Args:
        tp_size: ranks that share one model; must divide the world size. ``None``: the whole world.
        backend: of ``torch.distributed``. ``None``: NCCL (and gloo for CPU tensors) where there is a GPU, else gloo.
        init_method: rendezvous, e.g. ``"tcp://10.0.0.1:29500"``. ``None``: ``MASTER_ADDR`` and ``MASTER_PORT``.
        rank, world_size: this process's place. ``None``: ``RANK`` and ``WORLD_SIZE``, which torchrun sets.

    With NCCL the current CUDA device becomes ``LOCAL_RANK`` (else ``rank``) and stays so. This is a collective of the
    whole world. A world that is initialised already is used as found: leave the keyword arguments out. On exit the
    previous group is installed again, and what was initialised here is destroyed.

    Raises, before anything changes: TypeError or ValueError for an argument or environment variable out of range,
    RuntimeError for a missing environment or too few GPUs.
    """
    given: dict[str, Any] = {"backend": backend, "init_method": init_method, "rank": rank, "world_size": world_size}
    found = dist.is_available() and dist.is_initialized()
    world = _world_as_found(given) if found else _planned_world(**given)
    size = world.size if tp_size is None else check_count("tp_size", tp_size)
    if world.size % size:
        raise ValueError(f"tp_size is {size}, must divide the world size {world.size}")
    with ExitStack() as undo:
        if not found:
            _start(world)
            undo.callback(dist.destroy_process_group)
        group = _own_group(world, size, undo)
        undo.callback(set_tensor_parallel_group, process_wide_group())
        set_tensor_parallel_group(group)
        yield group


@dataclass(frozen=True)
class _World:
    """All processes: this one's rank, their number and, unless they are connected already, their rendezvous."""

    rank: int
    size: int
    local_rank: int = 0
    backend: str = ""
    init_method: str | None = None


def _world_as_found(given: dict[str, Any]) -> _World:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"torch.distributed is already initialised (rank {dist.get_rank()} of {dist.get_world_size()}); "
            f"leave out {', '.join(named)}, or call torch.distributed.destroy_process_group first"
        )
    return _World(dist.get_rank(), dist.get_world_size(), backend=dist.get_backend_config())


def _planned_world(backend: str | None, init_method: str | None, rank: int | None, world_size: int | None) -> _World:
    needed = {"RANK": rank, "WORLD_SIZE": world_size}
    if init_method in (None, "env://"):
        needed |= {"MASTER_ADDR": None, "MASTER_PORT": None}
    missing = [name for name, given in needed.items() if given is None and not os.environ.get(name)]
    if missing:
        hint = f"{TORCHRUN_HINT}, or pass init_method, rank and world_size"
        raise RuntimeError(f"environment variable(s) {', '.join(missing)} not set; {hint}")
    size = check_count("world_size", _from_environment("WORLD_SIZE") if world_size is None else world_size)
    place = check_count("rank", _from_environment("RANK") if rank is None else rank, lowest=0)
    if place >= size:
        raise ValueError(f"rank is {place}, must be below world_size {size}; ranks count from 0")
    local = _from_environment("LOCAL_RANK", place)
    _check_backend(backend)
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    world = _World(place, size, local, backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), init_method)
    local_ranks, gpus = max(local + 1, _from_environment("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if "nccl" in world.backend and local_ranks > gpus:
        raise RuntimeError(
            f"{local_ranks} ranks on this machine need a GPU each with NCCL, there are {gpus}; start at most {gpus} "
            "ranks here, or pass backend='gloo' to compute on the CPU"
        )
    return world


def _check_backend(backend: str | None) -> None:
    """ValueError unless it is e.g. ``gloo`` or ``cpu:gloo,cuda:nccl``, of backends that torch knows."""
    known = dist.Backend.backend_list
    if backend is not None and any(part.rpartition(":")[2].lower() not in known for part in backend.split(",")):
        raise ValueError(f"backend is {backend!r}, must be of {known}; leave it out for the usual")


def _from_environment(name: str, default: int = 0) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdecimal():
        raise ValueError(f"environment variable {name} must be an integer >= 0, got {value!r}; {TORCHRUN_HINT}")
    return int(value)


def _start(world: _World) -> None:
    if "nccl" in world.backend:
        torch.cuda.set_device(world.local_rank)
    # torch.distributed.nn keeps the world of its import time alive as a default argument; imported lazily after the
    # world is made, it would have gloo's threads abort the process at its end.
    importlib.import_module("torch.distributed.nn")
    method = urlsplit(world.init_method or "")
    meeting: dict[str, Any] = {"init_method": world.init_method}
    if method.scheme == "file":  # torch does not unquote the path, and would wait for another file
        meeting = {"store": dist.FileStore(unquote(method.path), world.size)}
    dist.init_process_group(world.backend, rank=world.rank, world_size=world.size, **meeting)


def _own_group(world: _World, tp_size: int, undo: ExitStack) -> TorchDistGroup:
    process_group = None
    if tp_size < world.size:
        process_group, _ = dist.new_subgroups(tp_size)
        undo.callback(dist.destroy_process_group, process_group)
    _meet(world, None)
    if process_group is not None:  # in this order on all ranks, else a deadlock
        _meet(world, process_group)
    group = TorchDistGroup(process_group)
    undo.callback(group.close)
    return group


def _meet(world: _World, process_group: dist.ProcessGroup | None) -> None:
    """Run a first collective: all ranks are connected to this one when it returns.

    NCCL connects then, which it must not do during a graph capture. gloo's ranks are connected, but none may leave, and
    so close its connections, before the others have seen them.
    """
    for backend, device in (("nccl", "cuda"), ("gloo", "cpu")):
        if backend in world.backend:
            dist.all_reduce(torch.zeros(1, device=device), group=process_group)


def spawn_tensor_parallel(
    function: Callable[..., Any], tp_size: int, *args: Any, backend: str | None = None
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``tp_size`` ranks, a new process each; the results in rank order.

    Every process is inside :func:`init_tensor_parallel` and imports the module of ``function``, so the program's own
    start belongs under ``if __name__ == "__main__"``. ``function``, ``args`` and results travel by pickle. On CPUs the
    ranks share this process's torch threads evenly. ``backend`` is that of :func:`init_tensor_parallel`; pass
    ``"gloo"`` to compute on the CPU of a machine with fewer GPUs than ranks.

    Raises TypeError or ValueError for arguments that cannot be used, before a process starts. When a rank fails the
    others are ended. A RuntimeError names ranks that were killed, and carries the traceback of the first that failed.
    """
    check_count("tp_size", tp_size)
    _check_backend(backend)
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    if getattr(function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(f"function {function!r} is of an interactive session, write it into a module: ranks import it")
    try:
        call = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise TypeError(f"function (at the top level of a module) and args must be picklable: {error}") from error
    with tempfile.TemporaryDirectory(prefix="punica-tp-") as folder:
        home = Path(folder)
        (home / "call").write_bytes(call)
        _run_ranks(home, tp_size, backend)
        results = [home / f"result-{rank}" for rank in range(tp_size)]
        for rank, result in enumerate(results):
            if not result.exists():
                raise RuntimeError(
                    f"spawn_tensor_parallel: rank {rank} of {tp_size} ended without a result (sys.exit?)"
                )
        return [pickle.loads(result.read_bytes()) for result in results]


def _run_ranks(home: Path, tp_size: int, backend: str | None) -> None:
    threads = max(1, torch.get_num_threads() // tp_size)
    job = (tp_size, backend, threads, home)
    processes = mp.start_processes(_rank_main, job, nprocs=tp_size, join=False, start_method="spawn")
    failure = home / FIRST_FAILURE
    try:
        while not (processes.join(timeout=5) or failure.exists()):
            pass
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        if not failure.exists():  # killed, or failed to import what it should run
            raise RuntimeError(
                f"spawn_tensor_parallel: rank {error.error_index} of {tp_size}: {error}; if it says nothing above, it "
                "could not import the module of the function, or the program lacks if __name__ == '__main__'"
            ) from None
    finally:
        codes = [process.exitcode or 0 for process in processes.processes]
        for process in processes.processes:
            if process.is_alive():  # an interrupt of this process, or a rank that failed and cannot leave its group
                process.kill()
                process.join()
    if failure.exists():
        text = failure.read_text(encoding="utf-8")
        causes = [
            f"rank {rank} of {tp_size} was ended by signal {-code} ({signal.strsignal(-code)}), 9 may be lack of "
            "memory; others lost their connection\n"
            for rank, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM  # by which torch ends the others
        ]  # fmt: skip
        raise RuntimeError(f"spawn_tensor_parallel: {''.join(causes)}{text}")


def _rank_main(rank: int, tp_size: int, backend: str | None, threads: int, home: Path) -> None:
    """Run one rank of `spawn_tensor_parallel`; results and failures go to files in ``home``."""
    end_with_parent()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(tp_size))
    torch.set_num_threads(threads)
    place: dict[str, Any] = {"rank": rank, "world_size": tp_size, "init_method": (home / "rendezvous").as_uri()}
    with ExitStack() as group:
        try:
            group.enter_context(init_tensor_parallel(backend=backend, **place))
            function, args = pickle.loads((home / "call").read_bytes())
            (home / f"result-{rank}").write_bytes(pickle.dumps(function(rank, *args)))
        except Exception:
            # before the group is left, which makes the other ranks fail too
            note, text = home / f"failure-{rank}", f"rank {rank} of {tp_size} failed\n\n{traceback.format_exc()}"
            note.write_text(text, encoding="utf-8", errors="backslashreplace")
            with suppress(FileExistsError):
                os.link(note, home / FIRST_FAILURE)  # complete at once, and only for the first
            raise SystemExit(1) from None
