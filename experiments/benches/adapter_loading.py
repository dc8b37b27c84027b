"""Loading of adapters into the spare slot of a model, alone or beside decode steps, for section 5.2. A `Loader` starts
a load, asynchronously on a GPU; its handle waits for the adapter. A new one is a function under `LOADERS` and its name
in `conf/figure/sec52_adapter_loading.yaml`.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch

from experiments.benches.model_steps import (
    TOLERANCE,
    Invocation,
    captured,
    llama_config,
    random_llama,
    spans,
    step_tokens,
)
from experiments.harness.experiment import CheckFailed, check, difference
from experiments.harness.schema import ModelConf
from experiments.measure import timing
from experiments.workload.popularity import popularity
from punica.adapters import CopyHandle, LoRAModel, LoRAModelManager, random_adapter
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.config import LoRAConfig
from punica.layers import SlotPart
from punica.models import LlamaForCausalLM
from punica.registry import Registry

MOST_ADAPTERS = 256
DIFFERENT = 4
"""Adapters with weights of their own; others are copies in other memory, since drawing hundreds takes too long."""


@dataclass(frozen=True)
class Decode:
    """Decode steps of `rows` requests with `seq_len` cached tokens, adapters by the popularity `workload`."""

    workload: str
    rows: int
    seq_len: int


class Bench:
    """`model` wrapped for adapters of `rank`, its last slot free, `rotate_bytes` of adapters or more to load there, and
    steps of `decode` beside; `CheckFailed` for other bytes than by arithmetic.
    """

    def __init__(
        self, model: ModelConf, rank: int, device: str, *, layers: int | None = None, rotate_bytes: int = 0,
        seed: int = 0, decode: Decode | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.device = rank, torch.device(device)
        self.dtype = getattr(torch, model.dtype.name)
        self.bytes, config = model.lora_parameters(rank, layers) * model.dtype.bytes, llama_config(model, layers)
        self.slot = neighbours = popularity(decode.workload).number_of_adapters(decode.rows) if decode else 0
        count = min(max(2, -(-rotate_bytes // self.bytes)), MOST_ADAPTERS)
        ids = range(neighbours + 1, neighbours + count + 1)
        drawn = [random_adapter(i, config, rank, seed + i, dtype=self.dtype) for i in ids[:DIFFERENT]]
        copies = [copy.deepcopy(drawn[place % DIFFERENT]).clone(i) for place, i in enumerate(ids[DIFFERENT:])]
        self.adapters = drawn + copies
        # loading does not read the weights, so only steps need some
        llama = random_llama(model, device, layers) if decode else LlamaForCausalLM(config, self.dtype, device)
        rows, modules = decode.rows if decode else 1, list(LLAMA_LORA_MODULES)
        lora = LoRAConfig(rank, neighbours + 1, max_cpu_loras=neighbours + count, target_modules=modules)
        self.manager = LoRAModelManager(llama, rows, rows, model.vocab_size, lora, device)
        tensors = sum(tensor.nbytes for name in drawn[0].loras for tensor in _matrices(drawn[0], name)[:2])
        if not tensors == self.manager.slot_bytes == self.bytes:
            found = f"{tensors} bytes in an adapter, {self.manager.slot_bytes} in a slot"
            raise CheckFailed(f"rank {rank}: {found}, {self.bytes} by arithmetic")
        for i in range(1, neighbours + 1):
            self.manager.add_adapter(drawn[0].clone(i))
            self.manager.activate_adapter(i)
        for adapter in self.adapters:
            self.manager.add_adapter(adapter)
        self.step = _decode_step(self.manager, llama, decode) if decode else None

    def poison(self) -> None:
        """Fill the spare slot of every layer with NaN and rank -1, so that only a complete load passes `check_slot`."""
        for layer in self.manager.modules.values():
            for part in layer.slot_parts():
                part.matrix(self.slot).fill_(torch.nan)
                part.ranks[self.slot] = -1
        timing.synchronise(self.device.type)

    def check_slot(self, i: int) -> None:
        """Raise `CheckFailed` unless the spare slot of every layer holds the i-th adapter: A, B times scaling, rank."""
        adapter = self.adapters[i % len(self.adapters)]
        for name, parts in self._parts():
            a, b, scaling = _matrices(adapter, name)
            held = [w.to(self.dtype) for w in (a, b.float() * scaling)]
            for part, expected in zip(parts, held, strict=True):
                if not torch.equal(part.matrix(self.slot).cpu().float(), expected.float()):
                    raise CheckFailed(f"after a load, slot {self.slot} of {name} does not hold adapter {adapter.id}")
                if int(part.ranks[self.slot]) != self.rank:
                    raise CheckFailed(f"after a load, the rank of slot {self.slot} of {name} is not {self.rank}")

    def _parts(self) -> Iterator[tuple[str, Sequence[SlotPart]]]:
        """Yield modules with the places of A and B: `...k_proj` is the second slice of `qkv_proj`."""
        for name, layer in self.manager.modules.items():
            parent, _, last = name.rpartition(".")
            names = LlamaForCausalLM.packed_modules_mapping.get(last, [last])
            parts = layer.slot_parts()  # A of every slice, then B of every slice
            yield from ((f"{parent}.{part}", parts[i :: len(names)]) for i, part in enumerate(names))


def _matrices(adapter: LoRAModel, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A, B and the scaling of one projection of an adapter as it came; `CheckFailed` when it has none."""
    weights = adapter.get_lora(name)
    if weights is None:
        raise CheckFailed(f"adapter {adapter.id} has no {name}")
    a, b = weights.pair()
    return cast(torch.Tensor, a), cast(torch.Tensor, b), weights.scaling


def _decode_step(manager: LoRAModelManager, llama: LlamaForCausalLM, decode: Decode) -> Callable[[], torch.Tensor]:
    """Return a decode step as the engine runs it, on a GPU as a graph; checked to depend on the adapters."""
    invocation = Invocation(llama, step_tokens(decode.rows, decode.seq_len))
    run = partial(invocation.forward, *invocation.begin(spans(decode.rows, 1, decode.seq_len)))
    own = [int(slot) for slot in popularity(decode.workload).slots(decode.rows)]  # adapter i lies in slot i - 1

    def step(slots: Sequence[int], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        manager.begin_step([(slot, len(list(rows))) for slot, rows in groupby(slots)], slots)
        return run()

    if difference(step([-1] * decode.rows, run), step(own, run)) <= TOLERANCE[invocation.cache.keys[0].dtype]:
        raise CheckFailed("a decode step comes out as if its rows had no adapters")
    return partial(step, own, captured(run) if invocation.device.type == "cuda" else run)


@dataclass(frozen=True)
class Loader:
    """`start(i)` begins to load adapter i; `check(i)`: `CheckFailed` unless its destination holds it."""

    start: Callable[[int], CopyHandle]
    check: Callable[[int], None]


LOADERS: Registry[Callable[[Bench], Loader]] = Registry("adapter loader")
"""Name in rows and plots -> how to load on a bench."""


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

    modules, registered = bench.manager.modules, bench.manager.list_adapters()
    copies = [
        [
            (modules[name], *map(in_host_memory, weights.pair()))
            for name, weights in registered[adapter.id].loras.items()
        ]
        for adapter in bench.adapters
    ]

    def start(i: int) -> CopyHandle:
        for layer, lora_a, lora_b in copies[i % len(copies)]:
            layer.set_lora(bench.slot, lora_a, lora_b)
        return CopyHandle(torch.cuda.current_stream() if bench.device.type == "cuda" else None)

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
        return CopyHandle(stream)

    def check(i: int) -> None:
        if not torch.equal(target.cpu(), sources[i % count]):
            raise CheckFailed("the bytes that were copied over the link are not those of its source")

    return Loader(start, check)


def check_loader(bench: Bench, name: str, loader: Loader) -> None:
    """Raise `CheckFailed` unless a load into a poisoned slot, beside a step too, leaves all else as it was."""
    expected = bench.step().clone() if bench.step else None
    bench.poison()
    handle = loader.start(1)
    if bench.step and expected is not None:
        check(f"{name}: a step beside a load", bench.step(), expected, TOLERANCE[bench.dtype])
    handle.wait()
    timing.synchronise(bench.device.type)
    loader.check(1)


@dataclass
class Measured:
    """Seconds of one loader, in measuring order: `load` until the adapter is there, `host` until the call returned,
    `device` by events; `step` until the end of the step behind it, `step_alone` without a load.
    """

    load: list[float]
    host: list[float]
    device: list[float]
    step: list[float] = field(default_factory=list)
    step_alone: list[float] = field(default_factory=list)


class Load:
    """A load as a call to time, at once followed by a step if there are steps; it notes its own times as well."""

    def __init__(self, bench: Bench, start: Callable[[int], CopyHandle]) -> None:
        self._bench, self._start = bench, start
        self._stream = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
        self.host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self) -> None:
        before = torch.cuda.current_stream().record_event(_timed()) if self._stream is not None else None
        started = time.perf_counter()
        handle = self._start(len(self.host))
        self.host.append(time.perf_counter() - started)
        if self._stream is not None and before is not None:
            with torch.cuda.stream(self._stream):  # where nothing else waits for the load
                handle.wait()
                self._events.append((before, self._stream.record_event(_timed())))
        (self._bench.step or handle.wait)()

    def device(self) -> list[float]:
        """Seconds between the events of every load; the device must be idle."""
        return [before.elapsed_time(after) / 1e3 for before, after in self._events]


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def measured(bench: Bench, names: Sequence[str], protocol: timing.Protocol) -> dict[str, Measured]:
    """Check and time every loader of `names` on `bench`, interleaved, and the step alone if there are steps."""
    loaders = {name: LOADERS.get(name)(bench) for name in names}
    for name, loader in loaders.items():
        check_loader(bench, name, loader)
    loads = {name: Load(bench, loader.start) for name, loader in loaders.items()}
    calls: dict[str, list[timing.Call]] = {name: [load] for name, load in loads.items()}
    if bench.step is not None:
        calls["step alone"] = [bench.step]
    samples = timing.time_side_by_side(calls, protocol)
    alone, found = samples.get("step alone"), {}
    for name, load in loads.items():
        taken = len(samples[name])  # the calls before were for warming up
        host, device = load.host[-taken:], load.device()[-taken:]
        of_step = [samples[name], alone] if alone else []
        found[name] = Measured((device or host) if alone else samples[name], host, device, *of_step)
    return found
