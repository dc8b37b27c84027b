"""The LoRA operators of Figures 7, 8, 9 and README, checked and timed on either device.

A `Problem` is one batch: x [T, h1], slots [T], weights A [L, r, h1] and B [L, h2, r] of all resident adapters, and
y [T, h2]. An operator adds `x A^T B^T` of each row's adapter into y. SGMV is what a layer calls (`layer_calls`), on B
as layers store it, rank after rank; the baselines take B as adapter files do, row after row. The work of a server per
step (segment plan, kernel metadata) is prepared outside the timing.

On a CPU the timer empties the caches between calls, and one problem is enough. Under `cuda_graph` there are as many
`problems`, each with its own x, y and adapters, as exceed the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate

import torch

from experiments.benches import baselines
from experiments.benches.layer_call import begun
from experiments.benches.operator_conf import operator_conf
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import Config, DType
from experiments.measure.timing import Call, Name, Protocol, time_side_by_side
from experiments.workload.popularity import popularity
from punica.metadata import LoRABatch, LoRAKernelMeta, MetaArgs, RowGroups
from punica.ops import reference
from punica.ops.weights import LoRAWeights
from punica.registry import Registry
from punica.wrapper import PunicaWrapperBase, get_punica_wrapper


class Unsupported(RuntimeError):
    """This torch cannot run an operator on this device in this dtype; the point gets no row."""


TOLERANCE = {DType.float32: 1e-5, DType.float16: 2e-3, DType.bfloat16: 1.6e-2}
"""Largest relative error ||result - reference|| / ||reference|| that a timed operator may have."""


@dataclass(frozen=True)
class Problem:
    """One batch on one device; see the module's text for the shapes."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    stored_b: torch.Tensor  # the same values in the memory order of a layer: a view of [L, r, h2]
    y: torch.Tensor
    slots: torch.Tensor  # [T] int64 on the host
    sizes: tuple[int, ...]  # rows per segment
    ranks: torch.Tensor | None = None  # [1, L] int32 on the device: true ranks, above which weights are 0; None: all r

    def segments(self) -> list[tuple[int, int, int]]:
        """(slot, start, end) of each segment."""
        ends = list(accumulate(self.sizes))
        return [(int(self.slots[end - 1]), end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def meta_args(self) -> MetaArgs:
        """The metadata arguments of the Triton operators for these rows."""
        return kernel_meta_args(self.slots, self.a.shape[0], self.x.device)

    def step(self) -> LoRABatch:
        """The step of these rows, as a wrapper holds it."""
        step = LoRABatch(len(self.slots), self.a.shape[0], self.x.device)
        step.fill(RowGroups.of_rows(self.slots.numpy()))
        return step

    def rounded(self, dtype: torch.dtype) -> Problem:
        """A copy in another dtype, with a result of its own."""
        parts = {name: getattr(self, name).to(dtype) for name in ("x", "a", "b", "stored_b")}
        return replace(self, y=torch.zeros_like(self.y, dtype=dtype), **parts)

    def shrunk(self) -> torch.Tensor:
        """v = x A^T by the reference, [T, r] float32."""
        v = torch.zeros(self.x.shape[0], self.a.shape[1], dtype=torch.float32, device=self.x.device)
        reference.bgmv_shrink(self.x, self.a, v, self.slots.to(self.x.device))
        return v

    def expected(self) -> torch.Tensor:
        """x A^T B^T by the reference, [T, h2] float32."""
        return self.expanded(self.shrunk())

    def expanded(self, v: torch.Tensor) -> torch.Tensor:
        """v B^T by the reference, [T, h2] float32."""
        out = torch.zeros(self.y.shape, dtype=torch.float32, device=self.y.device)
        reference.bgmv_expand(v, self.b, out, self.slots.to(v.device), add_inputs=False)
        return out


@dataclass(frozen=True)
class Prepared:
    """A call to time, the tensor it writes or adds into, and what that must hold after one call on zeros."""

    call: Call
    result: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor]


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A [slots, r, h1], B [slots, h2, r] and, or None where all are r, the true ranks [1, slots]."""
Prepare = Callable[[Problem], Prepared]
OPERATORS: Registry[Prepare] = Registry("operator")
"""Name in rows and plots -> how to prepare a problem for it."""


def kernel_meta_args(slots: torch.Tensor, max_loras: int, device: torch.device) -> MetaArgs:
    """The seven metadata arguments of the Triton operators for rows that use `slots`, [T] int64 on the host."""
    meta = LoRAKernelMeta.make(max_loras, len(slots), device)
    meta.prepare_tensors(slots)
    return meta.meta_args(len(slots), specialize_active_lora=True)


def step_of(batch: Problem) -> PunicaWrapperBase:
    """Return the wrapper of `batch`, at its defaults, whose step has begun. Batches whose rows use the same slots share
    it, as layers do.
    """
    return _step(tuple(batch.slots.tolist()), *batch.a.shape[:2], batch.x.device)


@lru_cache(maxsize=64)
def _step(slots_of_rows: tuple[int, ...], slots: int, rank: int, device: torch.device) -> PunicaWrapperBase:
    return begun(get_punica_wrapper, slots_of_rows, slots, rank, device)


def weights_of(batch: Problem) -> LoRAWeights:
    """Return the weights of `batch` as a layer holds them, with the table of true ranks."""
    slots, rank, _ = batch.a.shape
    ranks = batch.ranks
    if ranks is None:
        ranks = torch.full((1, slots), rank, dtype=torch.int32, device=batch.x.device)
    return LoRAWeights.of((batch.a,), (batch.stored_b,), ranks)


def layer_calls(batches: Sequence[Problem]) -> list[Call]:
    """Prepare a layer's call on each of `batches`."""
    return [partial(step_of(batch).add_linear, batch.y, batch.x, weights_of(batch)) for batch in batches]


@OPERATORS.register("SGMV")
def _sgmv(problem: Problem) -> Prepared:
    return adding(problem, *layer_calls([problem]))


@OPERATORS.register("SGMV expand")
def _expand(problem: Problem) -> Prepared:
    v = problem.shrunk()
    call = partial(step_of(problem).add_expanded, problem.y, v[None], weights_of(problem).b)
    return Prepared(call, lambda: problem.y, lambda: problem.expanded(v))


@OPERATORS.register("Loop")
def _loop(problem: Problem) -> Prepared:
    segments = problem.segments()
    return adding(problem, lambda: baselines.lora_loop(problem.y, problem.x, problem.a, problem.b, segments))


@OPERATORS.register("Gather")
def _gather(problem: Problem) -> Prepared:
    slots = problem.slots.to(problem.x.device)

    def copies(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.flatten() for part in pair])

    def by_row() -> tuple[torch.Tensor, torch.Tensor]:
        rows = problem.slots.tolist()
        return torch.stack([problem.a[slot] for slot in rows]), torch.stack([problem.b[slot] for slot in rows])

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return baselines.gather_weights(problem.a, problem.b, slots)

    return Prepared(call, lambda: copies(call()), lambda: copies(by_row()))


@OPERATORS.register("BMM")
def _bmm(problem: Problem) -> Prepared:
    a_rows, b_rows = baselines.gather_weights(problem.a, problem.b, problem.slots.to(problem.x.device))
    return adding(problem, lambda: baselines.lora_bmm(problem.y, problem.x, a_rows, b_rows))


@OPERATORS.register("Gather-BMM")
def _gather_bmm(problem: Problem) -> Prepared:
    slots = problem.slots.to(problem.x.device)
    return adding(problem, lambda: baselines.lora_gather_bmm(problem.y, problem.x, problem.a, problem.b, slots))


@OPERATORS.register("grouped_mm")
def _grouped_mm(problem: Problem) -> Prepared:
    if not baselines.grouped_mm_available(problem.x.device, problem.x.dtype):
        raise Unsupported(f"torch {torch.__version__} has no grouped_mm for {problem.x.dtype} on {problem.x.device}")
    if problem.x.is_cuda:  # for other types torch reads the group ends on the host, which no CUDA graph can hold
        problem = problem.rounded(torch.bfloat16)
    ends = baselines.slot_ends(problem.slots, problem.a.shape[0]).to(problem.x.device)
    return adding(problem, lambda: baselines.lora_grouped_mm(problem.y, problem.x, problem.a, problem.b, ends))


def adding(problem: Problem, call: Call) -> Prepared:
    """A whole operator: it adds into y."""
    return Prepared(call, lambda: problem.y, problem.expected)


def in_turn(calls: Sequence[Call]) -> None:
    """Several calls as one."""
    for call in calls:
        call()


@lru_cache(maxsize=1)
def bank(slots: int, rank: int, h1: int, h2: int, dtype: DType, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [slots, rank, h1] and B [slots, h2, rank], random, scaled so that v and y have unit variance."""
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype.name)
    a = torch.randn(slots, rank, h1, generator=generator, device=device, dtype=torch.float32) * h1**-0.5
    b = torch.randn(slots, h2, rank, generator=generator, device=device, dtype=torch.float32) * rank**-0.5
    return a.to(kind), b.to(kind)


def problems(cfg: Config, workload: str, batch_size: int, rank: int) -> list[Problem]:
    """The batch of `workload` in the shapes of `cfg.figure`, as often as the timer needs it."""
    figure, adapters = operator_conf(cfg), popularity(workload).number_of_adapters(batch_size)
    total, count = max(figure.resident(cfg), adapters), 1
    if cfg.timer.name == "cuda_graph":
        total = max(total, copies(cfg, rank * (figure.h1 + figure.h2) * figure.dtype.bytes, least=1))
        count = total // adapters
    a, b = bank(total, rank, figure.h1, figure.h2, figure.dtype, cfg.hardware.device)
    if cfg.timer.name != "cuda_graph":  # operators of a cell share no memory, so that one flush serves a round of them
        seen = total if cfg.hardware.device == "cuda" else adapters  # a CPU's operators look at no other slot
        a, b = a[:seen].clone(), b[:seen].clone()
    return rotated(cfg, popularity(workload).group_sizes(batch_size), count, (a, b, None))


def rotated(cfg: Config, sizes: Sequence[int], count: int, weights: Weights) -> list[Problem]:
    """Make `count` batches of `sizes` rows per adapter, each on its own x, y and adapters out of all of `weights`."""
    a, b, ranks = weights
    figure, device, rows = operator_conf(cfg), cfg.hardware.device, sum(sizes)
    slots = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(count, rows, figure.h1, generator=generator, device=device).to(a.dtype)
    y = torch.zeros(count, rows, figure.h2, dtype=a.dtype, device=device)
    stored, made = b.mT.contiguous().mT, []
    for i in range(count):
        first = i * len(sizes)
        seen = window(first, max(figure.resident(cfg), len(sizes)), a.shape[0])
        true = None if ranks is None else ranks[:, seen].contiguous()
        weights_seen = a[seen], b[seen], stored[seen]
        made.append(Problem(x[i], *weights_seen, y[i], slots + (first - seen.start), tuple(sizes), true))
    return made


def window(first: int, resident: int, total: int) -> slice:
    """Return the slots of a problem whose adapters begin at slot `first`: as many as are resident on a server, out of
    `total` that the timer rotates through, since kernels search all slots they see.
    """
    start = max(0, min(first, total - resident))
    return slice(start, min(start + resident, total))


def copies(cfg: Config, nbytes: int, least: int = 2) -> int:
    """Return how often inputs of `nbytes` are needed: once, or under `cuda_graph` until the caches have no room."""
    return max(least, -(-flush_bytes(cfg) // nbytes)) if cfg.timer.name == "cuda_graph" else 1


def flush_bytes(cfg: Config) -> int:
    """Return a number of bytes that no cache has room for."""
    return (cfg.hardware.flush_mib or 0) << 20


def prepare_checked(batches: Sequence[Problem], name: str) -> list[Call]:
    """The calls of operator `name` on `batches`, the first of them checked against the reference.

    Raises `CheckFailed` with the operator, its error and the tolerance when the result is wrong.
    """
    batches[0].y.zero_()
    return checked(name, [OPERATORS.get(name)(batch) for batch in batches])


def checked(name: str, prepared: Sequence[Prepared]) -> list[Call]:
    """The calls of `prepared`, the first of them checked, as in `prepare_checked`; y must be 0 where it is added to."""
    prepared[0].call()
    result = prepared[0].result()
    check(name, result, prepared[0].expected(), TOLERANCE[DType(str(result.dtype).removeprefix("torch."))])
    return [one.call for one in prepared]


def prepare_backbone(cfg: Config, batch_size: int) -> list[Call]:
    """The calls of the backbone's projection X @ W [h1, h2] that LoRA is added to, the first of them checked."""
    figure, device = operator_conf(cfg), cfg.hardware.device
    h1, h2, dtype = figure.h1, figure.h2, figure.dtype
    kind, count = getattr(torch, dtype.name), copies(cfg, h1 * h2 * dtype.bytes, least=1)
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(count, batch_size, h1, generator=generator, device=device).to(kind)
    w = (torch.randn(count, h1, h2, generator=generator, device=device) * h1**-0.5).to(kind)
    out = torch.empty(count, batch_size, h2, dtype=kind, device=device)
    torch.mm(x[0], w[0], out=out[0])
    check("backbone X@W", out[0], x[0].double() @ w[0].double(), TOLERANCE[dtype])
    return [partial(torch.mm, x[i], w[i], out=out[i]) for i in range(count)]


def microseconds(
    cfg: Config, calls: Mapping[Name, Sequence[Call]], apart: bool = False
) -> dict[Name, list[float]]:
    """Samples of `calls`, interleaved, under `cfg`'s timer and scale, in microseconds. `apart`: no two share memory."""
    seconds = time_side_by_side(calls, protocol(cfg), apart)
    return {name: [value * 1e6 for value in values] for name, values in seconds.items()}


def protocol(cfg: Config) -> Protocol:
    """The timing protocol that `cfg` asks for."""
    return Protocol(
        timer=cfg.timer.name,
        device=cfg.hardware.device,
        warmup=cfg.scale.warmup,
        repeats=cfg.scale.repeats,
        min_repeats=cfg.scale.min_repeats,
        seconds=cfg.scale.seconds_per_point,
        patience=cfg.scale.patience,
        flush_mib=cfg.hardware.flush_mib or 0,
    )


def check(name: str, result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """`CheckFailed` when `result` differs from `expected` by more than `tolerance`, relative."""
    error = float((result.double() - expected).norm() / expected.double().norm())
    if not error <= tolerance:
        raise CheckFailed(f"{name} differs from the reference by {error:.2e} (relative), above {tolerance:.0e}")
