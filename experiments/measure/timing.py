"""Two clocks with one interface.

============  =========================================================================================================
host_clock    the protocol of the paper's artifact: per repeat zero a buffer larger than the caches, synchronise, read
              the host's clock, call, synchronise, read the clock. Launch and synchronisation are inside the time
cuda_graph    one CUDA graph holds many calls, each on its own inputs out of more bytes than the caches hold; the time
              of a replay over its calls. It is what one call costs inside a long graph, as a server runs it
============  =========================================================================================================

All systems of a comparison are timed in one loop, one call of each per round, so that drift and other work affect them
alike. Garbage collection is off while the clock runs.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from punica.capture import capture, no_garbage_collection

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
CALLS_PER_GRAPH = 48


@dataclass(frozen=True)
class Protocol:
    """`seconds`: budget per system, beyond which it has `min_repeats`; `patience`: seconds that these may take."""

    timer: str
    device: str
    warmup: int
    repeats: int
    min_repeats: int
    seconds: float
    flush_mib: int
    patience: float = math.inf

    def fewest_turns(self, in_a_row: int) -> int:
        return math.ceil(self.min_repeats / in_a_row)

    def turns(self, systems: int, in_a_row: int = 1) -> Iterator[int]:
        """Yield turns in which each of `systems` has `in_a_row` repeats: the fewest, and more within the seconds."""
        started = time.perf_counter()
        for turn in range(max(self.fewest_turns(in_a_row), self.repeats // in_a_row)):
            seconds = (time.perf_counter() - started) / systems
            least = self.min_repeats if seconds <= self.patience else min(2, self.min_repeats)
            if turn * in_a_row >= least and seconds > self.seconds:
                return
            yield turn


def time_side_by_side(
    calls: Mapping[Name, Sequence[Call]], protocol: Protocol, apart: bool = False
) -> dict[Name, list[float]]:
    """Seconds per call of every system, raw, in measuring order. `calls[name]`: calls on different inputs, used in
    turn; for `cuda_graph` of more bytes than the caches hold. `apart`: no two systems read the same memory, so that the
    caches are emptied once a round.
    """
    if not calls or not all(calls.values()):
        raise ValueError("calls must name at least one system, each with at least one call")
    for options in calls.values():
        for i in range(protocol.warmup):
            options[i % len(options)]()
    synchronise(protocol.device)
    flush, first = _flusher(protocol), next(iter(calls))
    samplers = {
        name: _cuda_graph(options) if protocol.timer == "cuda_graph"
        else _host_clock(options, (lambda: None) if apart and name != first else flush, protocol.device)
        for name, options in calls.items()
    }  # fmt: skip
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    with no_garbage_collection():
        for i in protocol.turns(len(calls)):
            for name, sampler in samplers.items():
                samples[name].append(sampler(i))
    return samples


def _host_clock(options: Sequence[Call], flush: Call, device: str) -> Callable[[int], float]:
    def sample(i: int) -> float:
        call = options[i % len(options)]
        flush()
        synchronise(device)
        started = time.perf_counter()
        call()
        synchronise(device)
        return time.perf_counter() - started

    return sample


def seconds_between_events(call: Call) -> float:
    """Seconds that the current CUDA stream takes for `call`."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _cuda_graph(options: Sequence[Call]) -> Callable[[int], float]:
    run, calls = captured_rounds(options, CALLS_PER_GRAPH)
    run()
    return lambda _: seconds_between_events(run) / calls


def captured_rounds(options: Sequence[Call], least: int) -> tuple["CapturedRun", int]:
    """Capture `least` calls, or one of each of `options`, all in turn; return the graph and its number of calls."""
    calls = list(options) * max(1, least // len(options))

    def run() -> None:  # keeps no output, so that the next call has its memory
        for call in calls:
            call()

    return CapturedRun(run), len(calls)


class CapturedRun:
    """A function as a CUDA graph, run once `inside` before the capture; `function` owns what the graph reads."""

    def __init__(self, function: Callable[[], Any], inside: AbstractContextManager[None] | None = None) -> None:
        self.function, self.graph = function, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), inside or nullcontext():
            function()
        torch.cuda.current_stream().wait_stream(stream)
        with capture(self.graph):
            self.output = function()

    def __call__(self) -> Any:
        """Run it again; the next call overwrites the result."""
        self.graph.replay()
        return self.output


def _flusher(protocol: Protocol) -> Call:
    """Zeroes `flush_mib` MiB on the device, so that the next call reads its operands from memory."""
    return torch.empty(protocol.flush_mib << 18, dtype=torch.int32, device=protocol.device).zero_


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
