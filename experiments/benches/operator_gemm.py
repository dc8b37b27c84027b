"""Latency that the LoRA operator adds to a layer's base projection, both in one CUDA graph.

The operator adds into y = x W; its added latency is the time of both less that of the product. The weights W [K, N]
rotate as the adapters do: they come from HBM, and evict the adapters from the L2 cache.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from experiments.benches.operator_columns import TORCH_TOLERANCE, Beside, Call, Columns, check
from experiments.benches.operator_lines import ADDED
from experiments.benches.operator_sets import ROTATING_BYTES, OperatorSets
from experiments.measure.timing import seconds_between_events

BASE = "base"


class Projection:
    """The base projection of an operator's sets: y[i] = x[i] W, the weights of set i being one of `count`."""

    def __init__(self, sets: OperatorSets) -> None:
        self.sets = sets
        k, n = sets.operator.k, sum(sets.operator.widths)
        self.count = max(2, -(-ROTATING_BYTES // (2 * k * n)))
        generator = torch.Generator(sets.x.device).manual_seed(1)
        weights = torch.empty(self.count, k, n, device=sets.x.device, dtype=torch.float16)
        self.weights = weights.normal_(generator=generator).mul_(k**-0.5)

    def alone(self, i: int) -> None:
        """y[i] = x[i] W."""
        torch.mm(self.sets.x[i], self.weights[i % self.count], out=self.sets.y[i])

    def before(self, call: Call) -> Call:
        """y[i] = x[i] W, then `call(i)`, which adds into y[i]."""

        def both(i: int) -> None:
            if isinstance(call, Beside):
                call.behind(partial(self.alone, i), self.sets.x[i], i)
            else:
                self.alone(i)
                call(i)

        return both

    def error(self, i: int, with_lora: bool) -> float:
        """Relative error of y[i] as the last call left it."""
        expected = self.sets.x[i].float() @ self.weights[i % self.count].float()
        if with_lora:
            expected += self.sets.reference(i)
        return float((self.sets.y[i].float() - expected).norm() / expected.norm())

    def check(self, name: str) -> None:
        """Raise `CheckFailed` unless the first and the last set hold what `name` computes."""
        for i in (0, self.sets.count - 1):
            check(name, self.error(i, with_lora=name != BASE), TORCH_TOLERANCE)


def microseconds_behind(sets: OperatorSets, operators: Columns, calls: int, replays: int) -> dict[str, float]:
    """Medians in a graph of at least `calls` calls: `base`, `base + <operator>`, and `added by <operator>`, the median
    of the differences between replays side by side.

    Every result is checked after one call and after a whole replay; `CheckFailed` when it is wrong.
    """
    projection = Projection(sets)
    chains: Columns = {BASE: projection.alone}
    chains |= {f"{BASE} + {name}": projection.before(call) for name, call in operators.items()}
    graphs = {}
    for name, chain in chains.items():
        for i in (0, sets.count - 1):
            chain(i)
        projection.check(name)
        graph, rounds = sets.captured(chain, calls)
        sets.y.fill_(torch.nan)
        graph.replay()
        projection.check(name)
        graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            samples[name].append(seconds_between_events(graph.replay) * 1e6 / (rounds * sets.count))
    found = {name: statistics.median(times) for name, times in samples.items()}
    for name in operators:
        pairs = zip(samples[f"{BASE} + {name}"], samples[BASE], strict=True)
        found[f"{ADDED}{name}"] = statistics.median(both - alone for both, alone in pairs)
    return found
