"""Extension: latency that LoRA adds to a projection, measured as in a layer, after the base product.

Claim: it is small beside the projection, at every batch and popularity, and no more than the operator costs alone.
Expected shape: Identical nearly flat, Distinct growing with the bytes of its adapters, the others between. On a CPU the
small difference of two large times is uncertain. Timed: y = x W, alone and followed by y += x A^T B^T as a layer calls
it. Sizes: h1 = 4096, h2 = 11008, rank 16, all popularities of a batch interleaved. The added latency is the difference
of neighbouring samples. On a GPU both are one CUDA graph, the shrink beside the product. Cost at scale=laptop: about 25
seconds on two cores, 1 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import Config, Point, Reading, main, sampled

if TYPE_CHECKING:
    import torch

    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call

BASE = "base"


class AddedLatency(OperatorExperiment):
    """Added latency, and that of the projection with and without LoRA, per popularity and batch."""

    name, figure, order, conf = "ext_added_latency", "ext added latency", 240, OperatorConf
    differing, drawn_by = ("workload",), "extensions.draw_added_latency"

    def panel(self, workload: str, rank: int) -> str:
        return f"rank {rank}"

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches import operators

        figure = operator_conf(cfg)
        weights = self.kept((figure.h1, figure.h2, figure.dtype), lambda: operators.projection(cfg))
        calls: dict[str, list[Call]] = {}
        for point in points:
            batches = self.problems(cfg, point)
            calls[point.workload] = checked_calls(batches, weights, with_lora=True)
            if BASE not in calls:
                calls[BASE] = checked_calls(batches, weights, with_lora=False)
        samples = operators.microseconds(cfg, calls)
        return [_readings(samples[point.workload], samples[BASE]) for point in points]


def checked_calls(batches: Sequence[Problem], weights: torch.Tensor, with_lora: bool) -> list[Call]:
    """Prepare y = x W of every batch and, `with_lora`, a layer's LoRA behind it; `CheckFailed` if one is wrong."""
    import torch

    from experiments.benches import operators
    from punica.layers.dual_stream import DualStream
    from punica.ops.interface import Beside

    first, turn = batches[0], len(weights)
    calls: list[Call] = [partial(torch.mm, one.x, weights[i % turn], out=one.y) for i, one in enumerate(batches)]
    streams = DualStream(first.x.device) if first.x.is_cuda else None

    def beside(product: Call, call: Callable[..., object]) -> None:
        aside = streams.begin(first.x) if streams is not None else None
        product()
        call(**({} if aside is None else {"beside": Beside(aside)}))

    if with_lora:
        pairs = zip(calls, map(operators.layer_call, batches), strict=True)
        calls = [partial(beside, *pair) for pair in pairs]

    def expected() -> torch.Tensor:
        y = first.x.double() @ weights[0].double()
        return y + first.expected() if with_lora else y

    name = f"base projection {'with' if with_lora else 'without'} LoRA"
    return operators.checked(name, [operators.Prepared(call, lambda: first.y, expected) for call in calls])


def _readings(with_lora: Sequence[float], base: Sequence[float]) -> list[Reading]:
    """The rows of one point from microseconds in measuring order."""
    added = [both - alone for both, alone in zip(with_lora, base, strict=True)]
    samples = {"added_latency": added, "base_latency": base, "latency": with_lora}
    return [reading for metric, values in samples.items() for reading in sampled(metric, values, "us")]


EXPERIMENT = AddedLatency()

if __name__ == "__main__":
    main(EXPERIMENT)
