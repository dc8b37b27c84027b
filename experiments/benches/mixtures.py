"""Mixtures of k adapters per row, by three systems, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benches.operators import Prepared, Problem, begun, checked, copies, setup_operator, weights_of
from experiments.harness.schema import Config
from experiments.measure.timing import Call
from punica.metadata import MixedRows
from punica.wrapper import get_punica_wrapper

Lists = tuple[Tensor, Tensor]
"""Slots, int64, and gates, float32, of rows: each `[T, k]`."""


def lists_of(workload: str, rows: int, fan: int, pool: int) -> Lists:
    """Distinct: k adapters from that of the row's number on; Identical: the first k. Gates of all rows differ."""
    first = torch.arange(rows)[:, None] if workload == "Distinct" else torch.zeros(rows, 1, dtype=torch.int64)
    gates = torch.rand(rows, fan, generator=torch.Generator().manual_seed(fan)) + 0.1
    return (first + torch.arange(fan)) % pool, gates


def expected(problem: Problem, lists: Lists) -> Tensor:
    parts = zip(*[part.unbind(1) for part in lists], strict=True)
    own = [gates[:, None].to(problem.x.device) * replace(problem, slots=slots).expected() for slots, gates in parts]
    return torch.stack(own).sum(0)


def mixture(problem: Problem, lists: Lists) -> Call:
    rows, pool = len(problem.x), len(problem.a)
    wrapper = begun(get_punica_wrapper, [-1] * rows, pool, problem.a.shape[1], problem.x.device)
    mixed = MixedRows.of_runs(lists[0].numpy(), lists[1].numpy(), [1] * rows)
    wrapper.begin_mixtures(mixed, mixed)
    return partial(wrapper.add_linear, problem.y, problem.x, weights_of(problem))


def k_calls(problem: Problem, lists: Lists) -> Call:
    pool, rank, device = len(problem.a), problem.a.shape[1], problem.x.device
    steps = [begun(get_punica_wrapper, slots.tolist(), pool, rank, device) for slots in lists[0].unbind(1)]
    gates, scaled = lists[1].to(problem.x).t()[..., None].contiguous(), torch.empty_like(problem.x)
    weights = weights_of(problem)

    def call() -> None:
        for step, gate in zip(steps, gates, strict=True):
            torch.mul(problem.x, gate, out=scaled)
            step.add_linear(problem.y, scaled, weights)

    return call


def peft_layer(problem: Problem, lists: Lists) -> Call:
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    rank, names = problem.a.shape[1], [f"adapter {slot}" for slot in lists[0][0].tolist()]
    config: Any = LoraConfig(lora_alpha=rank)
    base: Any = nn.Linear(problem.x.shape[1], problem.b.shape[1], device="meta")
    base.forward = lambda _: problem.y  # the base product is there
    layer: Any = Linear(base, names[0], config, r=rank, lora_alpha=rank)
    for name, slot, gate in zip(names, lists[0][0].tolist(), lists[1][0].tolist(), strict=True):
        layer.update_layer(name, rank, lora_alpha=rank, config=config)
        layer.lora_A[name].weight = nn.Parameter(problem.a[slot], requires_grad=False)
        layer.lora_B[name].weight = nn.Parameter(problem.b[slot], requires_grad=False)
        layer.scaling[name] = gate
    layer.set_adapter(names)
    return torch.inference_mode()(partial(layer, problem.x))


Make = Callable[[Problem, Lists], Call]
SYSTEMS: dict[str, Make] = {"mixture": mixture, "k calls": k_calls, "PEFT layer": peft_layer}


def checked_calls(
    cfg: Config, names: Sequence[str], workload: str, fan: int, rows: int, rank: int
) -> dict[str, list[Call]]:
    """The calls of systems on their inputs, the first of each checked (`CheckFailed`)."""
    figure: Any = cfg.figure
    pool, made = figure.pool, {}
    used = pool if workload == "Distinct" else fan
    count = copies(cfg, used * rank * (figure.h1 + figure.h2) * figure.dtype.bytes)
    for name in names:
        slots, gates = lists_of(workload, rows, fan, pool)
        lists = slots, gates[:1].expand_as(gates) if name == "PEFT layer" else gates
        batches = setup_operator(cfg, [-(-rows // pool)] * pool, rank, count)
        batches = [replace(one, x=one.x[:rows], y=one.y[:rows]) for one in batches]
        calls = [SYSTEMS[name](one, lists) for one in batches]
        result: Any = calls[0] if name == "PEFT layer" else partial(getattr, batches[0], "y")
        made[name] = checked(name, [Prepared(call, result, partial(expected, batches[0], lists)) for call in calls])
    return made
