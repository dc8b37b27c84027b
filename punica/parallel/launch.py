"""Start of tensor parallelism: one process per rank, and the group that the layers find.

Processes run *the same program* on *the same requests*; model and engine code does not change. They come from torchrun
(``torchrun --nproc-per-node 2 serve.py``, once per machine), or on one machine from :func:`spawn_tensor_parallel`::

    with init_tensor_parallel():
        model = LlamaForCausalLM(folder)      # builds this rank's shards
        model.load_weights(folder)            # reads this rank's part of the full checkpoint
        ...                                   # every rank now computes the same logits
"""

import importlib
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    *, backend: str | None = None, init_method: str | None = None, rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[TorchDistGroup]:  # fmt: skip
    """Make this process one rank of a tensor-parallel group, the whole world, for the ``with`` block; yield the group.

    Args:
        backend: of ``torch.distributed``. ``None``: NCCL (and gloo for CPU tensors) where there is a GPU, else gloo.
        init_method: rendezvous, e.g. ``"tcp://10.0.0.1:29500"``. ``None``: ``MASTER_ADDR`` and ``MASTER_PORT``.
        rank, world_size: this process's place. ``None``: ``RANK`` and ``WORLD_SIZE``, which torchrun sets.

    With NCCL the current CUDA device becomes ``LOCAL_RANK`` (else ``rank``) and stays so. This is a collective of the
    whole world. A world that is initialised already is used as found: leave the arguments out. On exit the previous
    group is installed again, and what was initialised here is destroyed.

    Raises, before anything changes: TypeError or ValueError for a place out of range, RuntimeError for one that neither
    arguments nor environment tell, or for too few GPUs.
    """
    with ExitStack() as undo:
        if not dist.is_initialized():
            _start(backend, init_method, rank, world_size)
            undo.callback(dist.destroy_process_group)
        elif (backend, init_method, rank, world_size) != (None,) * 4:
            raise ValueError("torch.distributed is already initialised; leave the arguments out, or destroy its group")
        _meet()
        group = TorchDistGroup()
        undo.callback(group.close)
        undo.callback(set_tensor_parallel_group, process_wide_group())
        set_tensor_parallel_group(group)
        yield group


def _from_environment(name: str, default: int | None = None) -> int:
    value = os.environ.get(name) or ("" if default is None else str(default))
    if not value:
        raise RuntimeError(f"environment variable {name} is not set; {TORCHRUN_HINT}, or pass rank and world_size")
    if not value.isdecimal():
        raise RuntimeError(f"environment variable {name} must be an integer >= 0, got {value}; {TORCHRUN_HINT}")
    return int(value)


def _start(backend: str | None, init_method: str | None, rank: int | None, world_size: int | None) -> None:
    size = check_count("world_size", _from_environment("WORLD_SIZE") if world_size is None else world_size)
    place = check_count("rank", _from_environment("RANK") if rank is None else rank, lowest=0)
    if place >= size:
        raise ValueError(f"rank is {place}, must be below world_size {size}; ranks count from 0")
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if has_nccl else "gloo")
    if "nccl" in backend:
        local, gpus = _from_environment("LOCAL_RANK", place), torch.cuda.device_count()
        if local >= gpus:
            raise RuntimeError(
                f"rank {local} of this machine needs a GPU of its own with NCCL, there are {gpus}; start fewer ranks "
                "here, or pass backend='gloo' to compute on the CPU"
            )
        torch.cuda.set_device(local)
    # torch.distributed.nn keeps the world of its import time alive as a default argument; imported lazily after the
    # world is made, it would have gloo's threads abort the process at its end.
    importlib.import_module("torch.distributed.nn")
    method = urlsplit(init_method or "")
    meeting: dict[str, Any] = {"init_method": init_method}
    if method.scheme == "file":  # torch does not unquote the path, and would wait for another file
        meeting = {"store": dist.FileStore(unquote(method.path), size)}
    dist.init_process_group(backend, rank=place, world_size=size, **meeting)


def _meet() -> None:
    """Run a first collective: all ranks are connected to this one when it returns.

    NCCL connects then, which it must not do during a graph capture. gloo's ranks are connected, but none may leave, and
    so close its connections, before the others have seen them.
    """
    for backend, device in (("nccl", "cuda"), ("gloo", "cpu")):
        if backend in dist.get_backend_config():
            dist.all_reduce(torch.zeros(1, device=device))


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
                raise RuntimeError(f"spawn_tensor_parallel: rank {rank} of {tp_size} ended without a result: sys.exit?")
        return [pickle.loads(result.read_bytes()) for result in results]


def _run_ranks(home: Path, tp_size: int, backend: str | None) -> None:
    job = (tp_size, backend, max(1, torch.get_num_threads() // tp_size), home)
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
    os.environ["LOCAL_RANK"] = str(rank)
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
