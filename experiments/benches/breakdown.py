"""Breakdown of one step of the engine into parts, for `ext_breakdown`.

A case is a step with some adapters or none. Cases of one kind of step take turns, so that a drift affects all alike. On
a CPU a clock around a few dozen calls divides every timed step, at no cost. On a GPU a profiler watches a few further
steps, which it slows down: both are kept.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from experiments.benches import device_parts, host_parts
from experiments.benches.engine_steps import EngineSteps, StepShape, TimedStep, fewest_turns, launch_times, turns
from experiments.harness.schema import ModelConf
from punica.measure.timing import Protocol, seconds_between_events

COPY_BYTES = 1 << 30
ATTEMPTS = 5
IN_A_ROW = 2
"""Consecutive timed decode steps of a case."""


@dataclass
class Case:
    """Seconds of one case. `steps`: timed ones, raw. `schedule`, `metadata` and, only on a GPU, `launch` and `ahead`
    (while the device computed): what the host did for each of these. `watched`: those that were taken apart, which on a
    CPU are the same; `parts` of all of them together. `unknown`: seconds of kernels that no part claims, by name.
    """

    steps: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    metadata: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown: dict[str, float] = field(default_factory=dict)

    def mean_parts(self) -> dict[str, float]:
        """Seconds of each part in the mean of the watched steps, and so adding up to that."""
        return {part: seconds / len(self.watched) for part, seconds in self.parts.items()}


def measured(bench: EngineSteps, shapes: Mapping[str, StepShape], protocol: Protocol) -> dict[str, Case]:
    """Measure every case of `shapes`, by name."""
    cases = {name: Case() for name in shapes}
    in_a_row = 1 if any(shape.prompt for shape in shapes.values()) else IN_A_ROW
    for _ in turns(len(cases), in_a_row, protocol):
        for name, shape in shapes.items():
            bench.settle(shape)
            if bench.on_gpu:
                _time_on_gpu(bench, in_a_row, cases[name], bench.steps_each(shape))
            else:
                _time_on_cpu(bench, in_a_row, cases[name])
    if bench.on_gpu:
        for name, shape in shapes.items():
            bench.settle(shape)
            count = max(2, in_a_row * fewest_turns(in_a_row, protocol))
            _profile(bench, count, cases[name], bench.steps_each(shape))
    return cases


def _time_on_gpu(bench: EngineSteps, count: int, case: Case, each: int) -> None:
    """Time `count` steps, for each of which the engine takes `each`; the last but one of these launches it, if any."""
    with launch_times(bench.engine) as launches:
        steps = [bench.step() for _ in range(count)]
    own, launching = launches[each - 1 :: each], launches[max(0, each - 2) :: each]
    for step, launched, before in zip(steps, own, launching, strict=True):
        _note(step, case)
        case.launch.append(launched.given - step.statistics.metadata_s)
        case.ahead.append(before.ahead)


def _time_on_cpu(bench: EngineSteps, count: int, case: Case) -> None:
    with host_parts.watched_calls(bench.engine) as watch:
        for _ in range(count):
            step = bench.step(watch.start)
            parts = watch.stop()
            parts[host_parts.SCHEDULE] = step.statistics.schedule_s
            parts[host_parts.METADATA] = step.statistics.metadata_s
            parts[device_parts.REST] = 0.0  # which counted what lies around the step, too
            parts[device_parts.REST] = step.seconds - sum(parts.values())
            _note(step, case)
            for part, seconds in parts.items():
                case.parts[part] += seconds
            case.watched.append(step.seconds)


def _note(step: TimedStep, case: Case) -> None:
    case.steps.append(step.seconds)
    case.schedule.append(step.statistics.schedule_s)
    case.metadata.append(step.statistics.metadata_s)


def _profile(bench: EngineSteps, count: int, case: Case, each: int) -> None:
    """Profile `count` steps, for each of which the engine takes `each`.

    Decode steps launched ahead cannot be timed one by one, so that all have the mean.
    """
    steps: list[TimedStep] = []
    _warm_profiler()
    bench.wait()
    ahead, spent = bench.is_ahead, 0.0

    def work() -> None:
        nonlocal spent
        started = time.perf_counter()
        steps.extend(bench.step() for _ in range(count))
        bench.wait()
        spent = time.perf_counter() - started

    kernels = device_parts.watched_kernels(work)
    if each > 1:
        wanted = device_parts.by_step(kernels)[each - 1 :: each][:count]
        kernels = [kernel for step in wanted for kernel in step]
    case.watched = [spent / count] * count if ahead else [step.seconds for step in steps]
    case.parts, case.unknown = device_parts.seconds_by_part(kernels), device_parts.unknown(kernels)
    case.parts[device_parts.GAPS] = sum(case.watched) - sum(case.parts.values())


@cache
def _warm_profiler() -> None:
    """The first profile of a process takes a second."""
    device_parts.watched_kernels(lambda: None)


@cache
def copy_bandwidth(device: str) -> float:
    """Measure bytes per second, read and written, of a large copy: the best of a few, once per process."""
    source = torch.ones(COPY_BYTES >> 2, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def copy() -> object:
        return target.copy_(source)

    clock = seconds_between_events if device.startswith("cuda") else _seconds
    copy()
    return 2 * source.nbytes / min(clock(copy) for _ in range(ATTEMPTS))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def bytes_moved(model: ModelConf, rank: int, shape: StepShape, *, fp8_cache: bool = False) -> int:
    """Return the bytes that a step must read: the weights without the embedding, keys and values of all cached tokens
    of decoding requests, and each adapter once. Writes and activations are small beside them. `fp8_cache`: keys and
    values have a byte each.
    """
    weights = model.backbone_parameters() - model.vocab_size * model.hidden_size
    cached = shape.decodes * shape.context * model.kv_elements()
    wide = weights + shape.num_adapters * model.lora_parameters(rank)
    return model.dtype.bytes * wide + (1 if fp8_cache else model.dtype.bytes) * cached


def listed(cases: Sequence[Case], most: int = 6) -> str:
    """List kernels that no part claims, the longest first; empty without any."""
    total: dict[str, float] = defaultdict(float)
    for case in cases:
        for name, seconds in case.unknown.items():
            total[name] += seconds
    longest = sorted(total, key=total.__getitem__, reverse=True)[:most]
    return "; ".join(f"{name[:60]} {1e3 * total[name]:.3f} ms" for name in longest)
