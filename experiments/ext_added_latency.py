"""Extension: latency that LoRA adds to a projection, measured as in a layer, after the base product.

The paper compares the operator's own latency with the projection's (README figure); a user feels what the operator adds
to a layer. Claim: what it adds is small beside the projection, at every batch and popularity, and no more than the
operator costs on its own: the shrink runs beside the product, and both read adapters that the product's weights have
driven out of the caches. Expected shape: Identical nearly flat, Distinct growing with the bytes
of its adapters, Uniform and Skewed between them; on a GPU, whose projection is bound by memory, the ratio to it follows
the added time; on a CPU, whose projection grows with the batch, it need not. There the small difference of two large
times is uncertain: p10 and p90 say by how much.

Timed: y = x W, alone and followed by y += x A^T B^T, at h1 = 4096, h2 = 11008, rank 16. Both are checked against the
reference, and all popularities of one batch are interleaved. Added latency is the difference between neighbouring
samples; both are kept beside it. LoRA is a layer's call: the device's wrapper at its defaults, the table of true ranks.
On a GPU product and operator are one CUDA graph, in decode steps with the shrink beside the product
(`punica.layers.dual_stream`); on a CPU they run one after the other.

Cost at scale=laptop: about 25 seconds on two cores, 1 GB.
"""

from collections.abc import Sequence
from typing import Any, cast

from experiments.benches.operator_conf import OperatorConf, operator_conf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import Config, Point, Reading, main, sampled

BASE = "base"


class AddedLatency(OperatorExperiment):
    """Added latency, and that of the projection with and without LoRA, per popularity and batch."""

    name, figure, order, conf = "ext_added_latency", "ext added latency", 240, OperatorConf
    differing, drawn_by = ("workload",), "extensions.draw_added_latency"

    def panel(self, workload: str, rank: int) -> str:
        return f"rank {rank}"

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches import operators
        from experiments.benches.added_latency import checked_calls, projection

        figure = operator_conf(cfg)
        weights = self.kept((figure.h1, figure.h2, figure.dtype), lambda: projection(cfg))
        calls: dict[str, Any] = {}
        for point in points:
            rows, rank = cast(int, point.batch_size), cast(int, point.rank)
            batches = operators.problems(cfg, point.workload, rows, rank)
            calls[point.workload] = checked_calls(batches, weights, with_lora=True)
            if BASE not in calls:
                calls[BASE] = checked_calls(batches, weights, with_lora=False)
        samples = operators.microseconds(cfg, calls)
        return [_readings(samples[point.workload], samples[BASE]) for point in points]


def _readings(with_lora: Sequence[float], base: Sequence[float]) -> list[Reading]:
    """The rows of one point from microseconds in measuring order."""
    added = [both - alone for both, alone in zip(with_lora, base, strict=True)]
    samples = {"added_latency": added, "base_latency": base, "latency": with_lora}
    return [reading for metric, values in samples.items() for reading in sampled(metric, values, "us")]


EXPERIMENT = AddedLatency()

if __name__ == "__main__":
    main(EXPERIMENT)
