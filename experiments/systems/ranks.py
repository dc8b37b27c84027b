"""Figure 11's bench on tensor-parallel ranks, for Figure 12: processes that stay, and run the same windows. Tokens are
checked on a model of the same widths with few layers, as Hugging Face's is whole on the first rank.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import distributed as dist

from experiments.benches.model_steps import random_llama
from experiments.benches.step_parts import watched_kernels
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading
from experiments.harness.schema import ModelConf
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.serving import WARM_STEPS, World
from experiments.systems.stream import Job
from experiments.systems.weights import Limits, exported
from punica.parallel import (
    SingleProcessGroup,
    get_tensor_model_parallel_rank,
    init_tensor_parallel,
    tensor_parallel,
)
from punica.processes import end_with_parent

WATCHED_STEPS = 10
"""Steps in which collectives are watched: profiling a step of 80 layers takes longer than the step."""
LEAVE_S = 60.0  # seconds that `close` waits for ranks at work before it kills them


class RankWorld(World):
    """World of this rank. The first rank computes references and broadcasts them."""

    def exported(self) -> dict[str, torch.Tensor]:
        """Return the whole weights under Hugging Face names, drawn again."""
        with tensor_parallel(SingleProcessGroup()):
            return exported(random_llama(self.model, self.device))

    def reference(self, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
        shared = [super().reference(job, tokens, lora) if get_tensor_model_parallel_rank() == 0 else None]
        dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
        return cast(torch.Tensor, shared[0])


class RankBench(StreamBench):
    """Bench of one rank, with its collectives and memory."""

    def __init__(
        self, model: ModelConf, device: str, limits: Limits, stream: StreamConf, check: tuple[int, int],
        check_layers: int, adapters: dict[str, Any],
    ) -> None:  # fmt: skip
        small = model.model_copy(update={"num_hidden_layers": min(check_layers, model.num_hidden_layers)})
        checked_on, world = (RankWorld(each, device, limits, **adapters) for each in (small, model))
        super().__init__(world, stream, check, checked_on=checked_on)

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Time one draw; with the share of collectives in its first piece, and memory of this rank's slots."""
        server = self.system(system)
        if not isinstance(server, EngineSystem):
            raise TypeError(f"{system} does not run on ranks: choose a system on our engine")
        readings = [*super().measure(system, workload, draw), self._collectives(server, workload, draw)]
        memory = [Reading("adapter_memory", server.engine.memory.adapter_slots, "byte")] if server.facts.lora else []
        return readings + memory

    def _collectives(self, system: EngineSystem, workload: str, draw: int) -> Reading:
        """Run the first steps of a piece again and time their collectives, in which ranks also wait."""
        timeline, windows = self.drawn(system.facts.name, workload)
        start, count = windows[draw].starts[0], min(windows[draw].length, WATCHED_STEPS)
        warm, seconds = min(WARM_STEPS, start), list[float]()

        def run() -> None:
            # on gloo; else a rank waits, in its first collective on the GPU, until the others are watched as well
            dist.all_reduce(torch.zeros(1))
            steps = system.run_all_steps(self.jobs(workload), timeline, start - warm, count + warm)
            seconds[:] = [step.seconds for step in steps]

        kernels = sorted(watched_kernels(run, self.world.device), key=lambda kernel: kernel.start)
        spent = [kernel.end - kernel.start for kernel in kernels if kernel.name.startswith(("gloo:", "nccl"))]
        own = spent[1:] if self.world.device == "cpu" else spent  # a CPU's first is the one that waits for the others
        return Reading("collective_share", sum(own) / sum(seconds), "ratio")


_KEPT, _WORKER = ExitStack(), list[Any]()  # group of the process of a rank, and the worker that it made


def _start(place: dict[str, Any], threads: int, backend: str | None, make: Callable[..., object], args: tuple) -> None:
    end_with_parent()
    os.environ.update(LOCAL_RANK=str(place["rank"]), LOCAL_WORLD_SIZE=str(place["world_size"]))
    torch.set_num_threads(threads)
    _KEPT.enter_context(init_tensor_parallel(backend=backend, **place))
    _WORKER.append(make(*args))


def _call(method: str, args: tuple) -> Any:
    return getattr(_WORKER[0], method)(*args)


def _leave() -> None:
    _KEPT.close()


class Ranks:
    """`tp_size` processes in a group, each with a worker `make(*args)`; `backend` None: NCCL where there are GPUs."""

    def __init__(self, make: Callable[..., object], args: tuple, tp_size: int, backend: str | None = None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="punica-ranks-")
        meeting, threads = (Path(self._home.name) / "rendezvous").as_uri(), max(1, torch.get_num_threads() // tp_size)
        self._pools = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(tp_size)]
        self._pids = self._results([pool.submit(os.getpid) for pool in self._pools])
        places = [{"rank": rank, "world_size": tp_size, "init_method": meeting} for rank in range(tp_size)]
        starts = [(place, threads, backend, make, args) for place in places]
        self._results([pool.submit(_start, *start) for pool, start in zip(self._pools, starts, strict=True)])

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `worker.method(*args)` on all ranks; results in rank order. `CheckFailed` leaves them usable;
        RuntimeError, from the first that failed otherwise, ends them.
        """
        return self._results([pool.submit(_call, method, args) for pool in self._pools])

    def close(self) -> None:
        """Let the ranks finish and end; kill those that take longer than `LEAVE_S`, to free their memory."""
        with suppress(BrokenProcessPool):
            if wait([pool.submit(_leave) for pool in self._pools], LEAVE_S).not_done:
                self._kill()
        for pool in self._pools:
            pool.shutdown()
        self._home.cleanup()

    def _results(self, calls: Sequence[Future[Any]]) -> list[Any]:
        wait(calls, return_when=FIRST_EXCEPTION)
        error = next((call.exception() for call in calls if call.done() and call.exception()), None)
        if isinstance(error, CheckFailed):
            wait(calls)
            raise error
        if error is not None:
            self._kill()  # the others may wait for it in a collective
            raise RuntimeError(f"the ranks have ended: {error!r}") from error
        return [call.result() for call in calls]

    def _kill(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class BenchOnRanks(Ranks):
    """`RankBench` on all ranks: rows of the first, the largest memory, the mean of collectives."""

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        ranks = self.call("measure", system, workload, draw)
        return [replace(first, value=_over_ranks(first, ranks)) for first in ranks[0]]

    def whole(self, system: str, workload: str) -> list[Reading]:
        return cast(list[Reading], self.call("whole", system, workload)[0])


def _over_ranks(first: Reading, ranks: list[list[Reading]]) -> float:
    values = [reading.value for readings in ranks for reading in readings if reading.metric == first.metric]
    if first.unit == "byte":
        return max(values)
    return fmean(values) if first.metric == "collective_share" else first.value
