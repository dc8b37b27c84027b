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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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

    def enough(self, taken: int, seconds: float) -> bool:
        """Tell whether a system that took ``seconds`` for ``taken`` repeats is to stop before `repeats`."""
        least = self.min_repeats if seconds <= self.patience else min(2, self.min_repeats)
        return taken >= least and seconds > self.seconds


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
    _synchronise(protocol.device)
    flush = _flusher(protocol)
    first = next(iter(calls))
    samplers: dict[Name, Callable[[int], float]] = {}
    for name, options in calls.items():
        empty = (lambda: None) if apart and name != first else flush
        if protocol.timer == "cuda_graph":
            samplers[name] = _cuda_graph(options)
        else:
            samplers[name] = _host_clock(options, empty, protocol.device)
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    with no_garbage_collection():
        for i in range(max(protocol.repeats, protocol.min_repeats)):
            if protocol.enough(i, (time.perf_counter() - started) / len(calls)):
                break
            for name, sampler in samplers.items():
                samples[name].append(sampler(i))
    return samples


def _host_clock(options: Sequence[Call], flush: Call, device: str) -> Callable[[int], float]:
    def sample(i: int) -> float:
        call = options[i % len(options)]
        flush()
        _synchronise(device)
        started = time.perf_counter()
        call()
        _synchronise(device)
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
    rounds = max(1, CALLS_PER_GRAPH // len(options))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in options:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for _ in range(rounds):
            for call in options:
                call()
    graph.replay()
    return lambda _: seconds_between_events(graph.replay) / (rounds * len(options))


def _flusher(protocol: Protocol) -> Call:
    """Zeroes `flush_mib` MiB on the device, so that the next call reads its operands from memory."""
    buffer = torch.empty(protocol.flush_mib << 18, dtype=torch.int32, device=protocol.device)
    return buffer.zero_


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
