"""Loaders of an adapter into the spare slot of a `Bench`, checked and timed, for section 5.2.

A `Loader` starts a load, asynchronously on a GPU; its handle waits for the adapter. A new one is a function under
`LOADERS` and its name in `conf/figure/sec52_adapter_loading.yaml`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from experiments.benches.loading_bench import Bench
from experiments.benches.model_steps import TOLERANCE, difference
from experiments.harness.experiment import CheckFailed
from experiments.measure import timing
from punica.adapters import CopyHandle
from punica.adapters.write import CopyEvent, ReadyCopy
from punica.registry import Registry


@dataclass(frozen=True)
class Loader:
    """`start(i)` begins to load the i-th adapter of the rotation (any i >= 0); `check(i)` raises `CheckFailed` unless
    the destination holds it once the device is idle.
    """

    start: Callable[[int], CopyHandle]
    check: Callable[[int], None]


LOADERS: Registry[Callable[[Bench], Loader]] = Registry("adapter loader")
"""Name in rows and plots -> how to load on a bench."""


def _ending(stream: torch.cuda.Stream | None) -> CopyHandle:
    """The handle of a load that ends where `stream` is now; without a stream (on a CPU) it is over."""
    return ReadyCopy() if stream is None else CopyEvent(stream.record_event(), stream.device)


@LOADERS.register("punica")
def _punica(bench: Bench) -> Loader:
    manager = bench.manager

    def start(i: int) -> CopyHandle:
        loaded = manager.lora_index_to_id[bench.slot]
        if loaded is not None:
            manager.deactivate_adapter(loaded)  # else the least recently used of all slots would make room
        return manager.prefetch_adapter(bench.adapters[i % len(bench.adapters)].id)

    return Loader(start, bench.check_slot)


def _layer_by_layer(bench: Bench, pinned: bool) -> Loader:
    """`set_lora` of each layer in turn on the current stream, from separate tensors of host memory."""

    def in_host_memory(factor: Any) -> Any:
        if isinstance(factor, list):
            return [in_host_memory(part) for part in factor]
        return torch.empty_like(factor, pin_memory=pinned).copy_(factor)

    modules, copies, registered = bench.manager.modules, [], bench.manager.list_adapters()
    for adapter in bench.adapters:
        arguments = {name: weights.pair() for name, weights in registered[adapter.id].loras.items()}
        copies.append([(modules[name], *map(in_host_memory, pair)) for name, pair in arguments.items()])

    def start(i: int) -> CopyHandle:
        for layer, lora_a, lora_b in copies[i % len(copies)]:
            layer.set_lora(bench.slot, lora_a, lora_b)
        return _ending(torch.cuda.current_stream() if bench.device.type == "cuda" else None)

    return Loader(start, bench.check_slot)


LOADERS.register("per_tensor")(partial(_layer_by_layer, pinned=True))
LOADERS.register("pageable")(partial(_layer_by_layer, pinned=False))


@LOADERS.register("link")
def _link(bench: Bench) -> Loader:
    cuda, count = bench.device.type == "cuda", len(bench.adapters)
    sources = [torch.full((bench.bytes,), i % 251, dtype=torch.uint8, pin_memory=cuda) for i in range(count)]
    target = torch.full_like(sources[0], 255, device=bench.device)
    stream = torch.cuda.Stream(bench.device) if cuda else None

    def start(i: int) -> CopyHandle:
        with torch.cuda.stream(stream):  # None: nothing happens
            target.copy_(sources[i % count], non_blocking=True)
        return _ending(stream)

    def check(i: int) -> None:
        if not torch.equal(target.cpu(), sources[i % count]):
            raise CheckFailed("the bytes that were copied over the link are not those of its source")

    return Loader(start, check)


def check_loader(bench: Bench, name: str, loader: Loader) -> None:
    """One load into a poisoned slot, beside a step if there are steps, leaves the adapter there and the step as it was.

    Raises `CheckFailed` when it does not.
    """
    expected = bench.step().clone() if bench.step else None
    bench.poison()
    handle = loader.start(1)
    if bench.step and expected is not None:
        error = difference(bench.step(), expected)
        if not error <= TOLERANCE[bench.dtype]:
            raise CheckFailed(f"{name}: a step beside a load differs by {error:.2e} (relative) from the step alone")
    handle.wait()
    bench.synchronise()
    loader.check(1)


@dataclass
class Measured:
    """Seconds of one loader, raw samples in measuring order; what was not measured is empty.

    `load` is from the call until the adapter is there, `host` until the call returned, `device` as `load` by the
    device's events. `step` is from the call until the end of the step that follows it, `step_alone` the same step with
    no load before it.
    """

    load: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    step_alone: list[float] = field(default_factory=list)


class Stopwatch:
    """A call to time that notes more than its own duration: a load, a step, or a load and at once a step."""

    def __init__(self, bench: Bench, start: Callable[[int], CopyHandle] | None) -> None:
        self._bench, self._start, self._calls = bench, start, 0
        self._stream = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
        self.host: list[float] = []
        self.total: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self) -> None:
        before = self._now()
        started = time.perf_counter()
        if self._start is not None:
            handle = self._start(self._calls)
            self.host.append(time.perf_counter() - started)
            self._note_end(before, handle)
            if self._bench.step is None:
                handle.wait()
        if self._bench.step is not None:
            self._bench.step()
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        self.total.append(time.perf_counter() - started)
        self._calls += 1

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event(_timed()) if self._stream is not None else None

    def _note_end(self, before: torch.cuda.Event | None, handle: CopyHandle) -> None:
        """An event at the end of the load, on a stream where nothing else waits for it."""
        if self._stream is not None and before is not None:
            with torch.cuda.stream(self._stream):
                handle.wait()
                self._events.append((before, self._stream.record_event(_timed())))

    def device(self) -> list[float]:
        """Seconds between the events of every load; the device must be idle."""
        return [before.elapsed_time(after) / 1e3 for before, after in self._events]


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def measured(bench: Bench, names: Sequence[str], protocol: timing.Protocol) -> dict[str, Measured]:
    """Checked and timed: every loader of `names` on `bench`, interleaved, and the step alone if there are steps."""
    loaders = {name: LOADERS.get(name)(bench) for name in names}
    for name, loader in loaders.items():
        check_loader(bench, name, loader)
    watches = {name: Stopwatch(bench, loader.start) for name, loader in loaders.items()}
    alone = Stopwatch(bench, None)
    calls: dict[str, list[timing.Call]] = {name: [watch] for name, watch in watches.items()}
    if bench.step is not None:
        calls["step alone"] = [alone]
    taken = len(timing.time_side_by_side(calls, protocol)[names[0]])  # the calls before were for warming up
    bench.synchronise()
    return {name: _of(bench, watch, alone, taken) for name, watch in watches.items()}


def _of(bench: Bench, watch: Stopwatch, alone: Stopwatch, taken: int) -> Measured:
    total, host, device = watch.total[-taken:], watch.host[-taken:], watch.device()[-taken:]
    if bench.step is None:
        return Measured(total, host, device)
    return Measured(device or host, host, device, total, alone.total[-taken:])
