"""Parts of a step's time, by a profile of a GPU; on a CPU scheduling, metadata, and the rest.

Every instant belongs to the running kernel that started first; without kernels it is a gap, so that parts add up. A
LoRA shrink counts only while nothing else runs; inside the launch of the base product it is part of that.
"""

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from experiments.benches.engine_steps import IN_A_ROW, EngineSteps, StepShape, TimedStep
from experiments.measure.timing import Protocol, synchronise

BASE, ATTENTION, SHRINK, EXPAND = "base_gemm", "attention", "lora_shrink", "lora_expand"
SMALL, HEAD, COPIES, REST, GAPS = "small_kernels", "head_and_sampling", "copies", "rest", "gaps"
SCHEDULE, METADATA = "schedule", "metadata"

KERNELS: tuple[tuple[str, str], ...] = (
    (SHRINK, r"_(lora|mix)_shrink"),
    (EXPAND, r"_(lora|mix)_expand"),
    (ATTENTION, r"_(decode|prompt)_attention|_combine_kernel|flash|fmha|sdpa"),
    (SMALL, r"rms_norm|_rotary_angles|_rotate_and_store|swiglu"),
    (HEAD, r"argmax"),
    (BASE, r"gemm|gemv|dequantise|nvjet|cutlass|splitk|cublas"),
    (COPIES, r"^mem(cpy|set)"),
)
"""Part -> what the names of its kernels contain, whatever the case; the first that fits counts. The products of the
head have the names of the others: see `parts_of`."""


class Kernel(NamedTuple):
    """A kernel or copy that the device ran; start and end in seconds."""

    name: str
    start: float
    end: float


def part_of(name: str) -> str:
    """The part that a kernel of this name belongs to on its own; `REST` where the table does not know it."""
    return next((part for part, pattern in KERNELS if re.search(pattern, name, re.IGNORECASE)), REST)


def parts_of(names: Sequence[str]) -> list[str]:
    """The parts of kernels in order of start. What is unknown after a step's last norm is the head's."""
    parts = [part_of(name) for name in names]
    for place in [place for place, part in enumerate(parts) if part == HEAD]:
        for before in range(place - 1, -1, -1):
            if "rms_norm" in names[before] or parts[before] == HEAD:
                break
            if parts[before] in (BASE, REST):
                parts[before] = HEAD
    return parts


def by_step(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Divide kernels into steps, each of which ends with the choice of its tokens."""
    steps: list[list[Kernel]] = [[]]
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, kernel.end)):
        chooses = part_of(kernel.name) == HEAD
        if not chooses and steps[-1] and part_of(steps[-1][-1].name) == HEAD:
            steps.append([])
        steps[-1].append(kernel)
    return steps


def seconds_by_part(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Seconds of every part; gaps are not among them."""
    kernels = sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))
    parts = parts_of([kernel.name for kernel in kernels])
    times = sorted({time for kernel in kernels for time in kernel[1:]})
    seconds: dict[str, float] = defaultdict(float)
    running: list[int] = []
    waiting = iter(range(len(kernels)))
    following = next(waiting, None)
    for begin, end in itertools.pairwise(times):
        running = [index for index in running if kernels[index].end > begin]
        while following is not None and kernels[following].start <= begin:
            running.append(following)
            following = next(waiting, None)
        if running:
            own = [parts[index] for index in running]
            seconds[next((part for part in own if part != SHRINK), own[0])] += end - begin
    return seconds


def watched_kernels(work: Callable[[], object], device: str = "cuda") -> list[Kernel]:
    """Profile the kernels of the current GPU, or the operations of the CPU, during `work`."""
    kind = device.upper()
    synchronise(device)
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profiler:
        work()
        synchronise(device)
    return [
        Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if event.device_type == getattr(torch.autograd.DeviceType, kind)
    ]


@dataclass
class Case:
    """Seconds of one case: `steps`, raw; `host` by phase (schedule, metadata); `watched` steps, on a CPU the same, and
    `parts` of all of them.
    """

    steps: list[float] = field(default_factory=list)
    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    watched: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    def note(self, step: TimedStep) -> None:
        self.steps.append(step.seconds)
        self.host[SCHEDULE].append(step.statistics.schedule_s)
        self.host[METADATA].append(step.statistics.metadata_s)

    def mean_parts(self) -> dict[str, float]:
        """Seconds of each part in the mean of the watched steps, and so adding up to that."""
        return {part: seconds / len(self.watched) for part, seconds in self.parts.items()}


def measured(bench: EngineSteps, shapes: Mapping[str, StepShape], protocol: Protocol) -> dict[str, Case]:
    """Measure every case of `shapes`, by name. They take turns, so that a drift affects all alike."""
    cases = {name: Case() for name in shapes}
    in_a_row = 1 if any(shape.prompt for shape in shapes.values()) else IN_A_ROW
    for _ in protocol.turns(len(cases), in_a_row):
        for name, shape in shapes.items():
            bench.settle(shape)
            for _ in range(in_a_row):
                cases[name].note(bench.step())
    for name, case in cases.items():
        if bench.on_gpu:
            bench.settle(shapes[name])
            count = max(2, in_a_row * protocol.fewest_turns(in_a_row))
            _profile(bench, count, case, bench.steps_each(shapes[name]))
        else:
            known = {phase: sum(seconds) for phase, seconds in case.host.items()}
            case.watched, case.parts = case.steps, {**known, REST: sum(case.steps) - sum(known.values())}
    return cases


def _profile(bench: EngineSteps, count: int, case: Case, each: int) -> None:
    """Profile `count` steps of `each` engine steps; steps launched ahead all have the mean."""
    steps: list[TimedStep] = []
    watched_kernels(lambda: None)  # the first profile of a process takes a second
    bench.wait()
    ahead, spent = bench.engine.is_ahead, 0.0

    def work() -> None:
        nonlocal spent
        started = time.perf_counter()
        steps.extend(bench.step() for _ in range(count))
        bench.wait()
        spent = time.perf_counter() - started

    kernels = watched_kernels(work)
    if each > 1:
        kernels = list(itertools.chain(*by_step(kernels)[each - 1 :: each][:count]))
    case.watched = [spent / count] * count if ahead else [step.seconds for step in steps]
    case.parts = seconds_by_part(kernels)
    case.parts[GAPS] = sum(case.watched) - sum(case.parts.values())
