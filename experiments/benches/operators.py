"""The LoRA operators of Figures 7 to 9, README and the studies, checked and timed on either device.

A `Problem` is one batch: x [T, h1], slots [T], A [L, r, h1] and B [L, h2, r] of all resident adapters, y [T, h2]. SGMV
is what a layer calls, on B rank after rank; baselines take B row after row. Work of a server per step is outside the
timing. Under `cuda_graph` there are as many problems as exceed the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch

from experiments.harness.experiment import check
from experiments.harness.schema import Config, DType
from experiments.measure.timing import Call, Name, Protocol, time_side_by_side
from experiments.workload.popularity import popularity
from punica.config import LoRAConfig
from punica.metadata import LoRAKernelMeta, LoRAMapping, MetaArgs
from punica.ops import reference
from punica.ops.weights import LoRAWeights
from punica.registry import Registry
from punica.wrapper import PunicaWrapperBase, get_punica_wrapper

MAX_LORAS, MAX_ROWS, VOCAB_SIZE = 64, 8192, 32000
"""Slots and rows in a step's metadata, as in a server, for any number of adapters in the batch."""


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

    def rounded(self, dtype: torch.dtype) -> Problem:
        parts = {name: getattr(self, name).to(dtype) for name in ("x", "a", "b", "stored_b")}
        return replace(self, y=torch.zeros_like(self.y, dtype=dtype), **parts)

    def shrunk(self) -> torch.Tensor:
        """v = x A^T by the reference, [T, r] float32."""
        v = torch.zeros(self.x.shape[0], self.a.shape[1], dtype=torch.float32, device=self.x.device)
        reference.bgmv_shrink(self.x, self.a, v, self.slots.to(self.x.device))
        return v

    def expected(self) -> torch.Tensor:
        return self.expanded(self.shrunk())

    def expanded(self, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.y.shape, dtype=torch.float32, device=self.y.device)
        reference.bgmv_expand(v, self.b, out, self.slots.to(v.device), add_inputs=False)
        return out


@dataclass(frozen=True)
class Prepared:
    """A call to time, the tensor it writes or adds into, and what that must hold after one call on zeros."""

    call: Call
    result: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor]


OPERATORS: Registry[Callable[[Problem], Prepared]] = Registry("operator")
"""Name in rows and plots -> how to prepare a problem for it."""


def kernel_meta_args(slots: torch.Tensor, max_loras: int, device: torch.device) -> MetaArgs:
    meta = LoRAKernelMeta.make(max_loras, len(slots), device)
    meta.prepare_tensors(slots)
    return meta.meta_args(len(slots), specialize_active_lora=True)


def begun(
    make: Callable[..., PunicaWrapperBase], slots_of_rows: Sequence[int], max_loras: int, rank: int,
    device: torch.device | str, **switches: Any,
) -> PunicaWrapperBase:  # fmt: skip
    """Begin a step of a wrapper by `make` with `max_loras` slots of width `rank`, row t in slot `slots_of_rows[t]`;
    `switches`: fields of `LoRAConfig`. A prompt is a run of rows with one slot.
    """
    config = LoRAConfig(max_lora_rank=rank, max_loras=max_loras, **switches)
    wrapper = make(max(MAX_ROWS, len(slots_of_rows)), max_loras, device, lora_config=config)
    adapters = [slot + 1 for slot in slots_of_rows]
    wrapper.update_metadata(LoRAMapping(adapters, adapters), list(range(1, max_loras + 1)), max_loras, VOCAB_SIZE)
    return wrapper


def step_of(batch: Problem) -> PunicaWrapperBase:
    """The wrapper of `batch` whose step has begun; batches whose rows use the same slots share it, as layers do."""
    return _step(tuple(batch.slots.tolist()), *batch.a.shape[:2], batch.x.device)


@lru_cache(maxsize=64)
def _step(slots_of_rows: tuple[int, ...], slots: int, rank: int, device: torch.device) -> PunicaWrapperBase:
    return begun(get_punica_wrapper, slots_of_rows, slots, rank, device)


def weights_of(batch: Problem) -> LoRAWeights:
    """Return the weights of `batch` as a layer holds them, with the table of true ranks."""
    slots, rank, _ = batch.a.shape
    whole = torch.full((1, slots), rank, dtype=torch.int32, device=batch.x.device)
    return LoRAWeights.of((batch.a,), (batch.stored_b,), whole)


@OPERATORS.register("SGMV")
def _sgmv(problem: Problem) -> Prepared:
    return adding(problem, partial(step_of(problem).add_linear, problem.y, problem.x, weights_of(problem)))


@OPERATORS.register("SGMV expand")
def _expand(problem: Problem) -> Prepared:
    v = problem.shrunk()
    call = partial(step_of(problem).add_expanded, problem.y, v[None], weights_of(problem).b)
    return Prepared(call, lambda: problem.y, lambda: problem.expanded(v))


@OPERATORS.register("Loop")
def _loop(problem: Problem) -> Prepared:
    """Per adapter two matmuls over its rows and an addition."""
    x, a, b, y, ends = problem.x, problem.a, problem.b, problem.y, accumulate(problem.sizes)
    segments = [(int(problem.slots[end - 1]), end - size, end) for size, end in zip(problem.sizes, ends, strict=True)]

    def call() -> None:
        for slot, start, end in segments:
            y[start:end] += x[start:end] @ a[slot].t() @ b[slot].t()

    return adding(problem, call)


def gathered(problem: Problem, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of every row side by side, [T, r, h1] and [T, h2, r]."""
    return problem.a.index_select(0, slots), problem.b.index_select(0, slots)


def _bmm_rows(problem: Problem, a_rows: torch.Tensor, b_rows: torch.Tensor) -> None:
    hidden = torch.bmm(problem.x.unsqueeze(1), a_rows.transpose(1, 2))
    problem.y.add_(torch.bmm(hidden, b_rows.transpose(1, 2)).squeeze(1))


@OPERATORS.register("Gather")
def _gather(problem: Problem) -> Prepared:
    """Copy A and B of every row, also where all rows share one pair."""
    call, rows = partial(gathered, problem, problem.slots.to(problem.x.device)), problem.slots.tolist()

    def copies(pair: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.flatten() for part in pair])

    def by_row() -> list[torch.Tensor]:
        return [torch.stack([bank[slot] for slot in rows]) for bank in (problem.a, problem.b)]

    return Prepared(call, lambda: copies(call()), lambda: copies(by_row()))


@OPERATORS.register("BMM")
def _bmm(problem: Problem) -> Prepared:
    return adding(problem, partial(_bmm_rows, problem, *gathered(problem, problem.slots.to(problem.x.device))))


@OPERATORS.register("Gather-BMM")
def _gather_bmm(problem: Problem) -> Prepared:
    """Both, as a batch needs whose adapters change from step to step."""
    slots = problem.slots.to(problem.x.device)
    return adding(problem, lambda: _bmm_rows(problem, *gathered(problem, slots)))


@OPERATORS.register("grouped_mm")
def _grouped_mm(problem: Problem) -> Prepared:
    """Two library calls over all slots, on rows sorted by slot."""
    rank = problem.a.shape[1]
    if not grouped_mm_available(problem.x.device, problem.x.dtype, rank):
        what = f"{problem.x.dtype} at rank {rank} on {problem.x.device}"
        raise Unsupported(f"torch {torch.__version__} has no grouped_mm for {what}")
    if problem.x.is_cuda:  # for other types torch reads the group ends on the host, which no CUDA graph can hold
        problem = problem.rounded(torch.bfloat16)
    product: Any = grouped_product()
    ends = torch.bincount(problem.slots, minlength=problem.a.shape[0]).cumsum(0).to(problem.x.device, torch.int32)

    def call() -> None:
        hidden = product(problem.x, problem.a.transpose(1, 2), offs=ends)
        problem.y.add_(product(hidden, problem.b.transpose(1, 2), offs=ends))

    return adding(problem, call)


def grouped_product() -> Callable[..., torch.Tensor] | None:
    """torch's grouped matmul: public from 2.10 on, before that under a private name."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@cache
def grouped_mm_available(device: torch.device | str, dtype: torch.dtype, width: int = 32) -> bool:
    """Check by one product on ``device`` in ``dtype``; it may want rows of whole units of 16 bytes."""
    product = grouped_product()
    if product is None:
        return False
    x, w = (torch.ones(shape, device=device, dtype=dtype) for shape in ((32, width), (2, 16, width)))
    ends = torch.tensor([16, 32], device=device, dtype=torch.int32)
    try:
        return bool((product(x, w.transpose(1, 2), offs=ends) == torch.tensor(width, dtype=dtype)).all())
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def adding(problem: Problem, call: Call) -> Prepared:
    return Prepared(call, lambda: problem.y, problem.expected)


@lru_cache(maxsize=6)
def bank(slots: int, rank: int, h1: int, h2: int, dtype: DType, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [slots, rank, h1] and B [slots, h2, rank], random, scaled so that v and y have unit variance."""
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype.name)
    a = torch.randn(slots, rank, h1, generator=generator, device=device, dtype=torch.float32) * h1**-0.5
    b = torch.randn(slots, h2, rank, generator=generator, device=device, dtype=torch.float32) * rank**-0.5
    return a.to(kind), b.to(kind)


def problems(cfg: Config, workload: str, batch_size: int, rank: int) -> list[Problem]:
    """The batch of `workload` in the shapes of `cfg.figure`, as often as the timer needs it."""
    figure: Any = cfg.figure
    sizes = popularity(workload).group_sizes(batch_size)
    weights = len(sizes) * rank * (figure.h1 + figure.h2) * figure.dtype.bytes
    return setup_operator(cfg, sizes, rank, copies(cfg, weights))


def setup_operator(cfg: Config, sizes: Sequence[int], rank: int, count: int) -> list[Problem]:
    """Make `count` batches of `sizes` rows per adapter, with x, y and adapters of their own, in a server's slots."""
    figure: Any = cfg.figure
    device, rows, used = cfg.hardware.device, sum(sizes), count * len(sizes)
    resident = max(figure.resident(cfg), len(sizes))
    a, b = bank(max(resident, used), rank, figure.h1, figure.h2, figure.dtype, device)
    if cfg.timer.name != "cuda_graph":  # systems share no memory, so that one flush serves a round of them
        seen = len(a) if device == "cuda" else used  # a CPU's operators look at no other slot
        a, b = a[:seen].clone(), b[:seen].clone()
    slots = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(count, rows, figure.h1, generator=generator, device=device).to(a.dtype)
    y = torch.zeros(count, rows, figure.h2, dtype=a.dtype, device=device)
    stored, made = b.mT.contiguous().mT, []
    for i in range(count):
        start = max(0, min(i * len(sizes), len(a) - resident))
        window = slice(start, start + resident)
        weights = a[window], b[window], stored[window]
        made.append(Problem(x[i], *weights, y[i], slots + (i * len(sizes) - start), tuple(sizes)))
    return made


def copies(cfg: Config, nbytes: int) -> int:
    """Return how often inputs of `nbytes` are needed: once, or under `cuda_graph` until the caches have no room."""
    return max(2, -(-flush_bytes(cfg) // nbytes)) if cfg.timer.name == "cuda_graph" else 1


def flush_bytes(cfg: Config) -> int:
    return (cfg.hardware.flush_mib or 0) << 20


def prepare_checked(batches: Sequence[Problem], name: str) -> list[Call]:
    """The calls of operator `name` on `batches`, the first checked against the reference (`CheckFailed`)."""
    batches[0].y.zero_()
    return checked(name, [OPERATORS.get(name)(batch) for batch in batches])


def checked(name: str, prepared: Sequence[Prepared]) -> list[Call]:
    """The calls of `prepared`, the first of them checked, as in `prepare_checked`; y must be 0 where it is added to."""
    prepared[0].call()
    result = prepared[0].result()
    check(name, result, prepared[0].expected(), TOLERANCE[DType(str(result.dtype).removeprefix("torch."))])
    return [one.call for one in prepared]


def prepare_backbone(cfg: Config, batch_size: int) -> list[Call]:
    """The calls of the backbone's projection X @ W, the first of them checked. W is scaled for unit variance of y."""
    figure: Any = cfg.figure
    h1, h2, device = figure.h1, figure.h2, cfg.hardware.device
    count, generator = copies(cfg, h1 * h2 * figure.dtype.bytes), torch.Generator(device).manual_seed(2)
    weights = torch.empty(count, h1, h2, device=device, dtype=getattr(torch, figure.dtype.name))
    for one in weights:
        one.copy_(torch.randn(one.shape, generator=generator, device=device) * h1**-0.5)
    x = torch.randn(count, batch_size, h1, generator=torch.Generator().manual_seed(2)).to(weights)
    out = x.new_empty(count, batch_size, h2)
    calls = [partial(torch.mm, x[i], weights[i], out=out[i]) for i in range(count)]
    expected = partial(torch.mm, x[0].double(), weights[0].double())
    return checked("backbone X@W", [Prepared(call, lambda: out[0], expected) for call in calls])


def microseconds(cfg: Config, calls: Mapping[Name, Sequence[Call]], apart: bool = False) -> dict[Name, list[float]]:
    """Samples of `calls`, interleaved, under `cfg`'s timer and scale, in microseconds. `apart`: no two share memory."""
    seconds = time_side_by_side(calls, protocol(cfg), apart)
    return {name: [value * 1e6 for value in values] for name, values in seconds.items()}


def protocol(cfg: Config) -> Protocol:
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
