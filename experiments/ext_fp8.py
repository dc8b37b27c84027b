"""Extension: adapters in FP8, their savings and costs.

Claim: weight-only FP8 is faster than 16 bits where weights dominate (Distinct, large batches, high ranks), and no
slower where one adapter serves all; the H200's rows miss the second part. On a CPU FP8 saves memory and no time. Timed:
y += x A^T B^T at h1 = 4096, h2 = 11008 as layers call it, interleaved, after a check; systems

    SGMV       weights as wide as the activations
    FP8 e4m3   weights in float8_e4m3fn with scales per channel; activations as they are (weight-only)
    FP8 e5m2   the same in float8_e5m2
    FP8 w8a8   e4m3; x and the rank vector quantised per token, which is part of the time

`error` is relative to the reference on unrounded weights. Panel `quality`: `logit error` and changed greedy tokens of a
random model, the pessimistic end. Cost at scale=laptop: about 45 seconds on two cores, 3 GB.
"""

from collections.abc import Sequence
from itertools import product
from typing import cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import PROTOCOL, Config, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count
from experiments.workload.popularity import popularity

QUALITY, WITH_QUALITY = "quality", ("FP8 e4m3", "FP8 e5m2")


class Fp8Conf(OperatorConf):
    requests: Count = 8  # prompts of panel `quality`, each with an adapter of its own
    prompt: Count  # tokens of each


class Fp8(OperatorExperiment):
    """Latency, error and bytes of each system per popularity, rank and batch; error and changed tokens of a model."""

    name, figure, order, conf = "ext_fp8", "ext fp8", 250, Fp8Conf
    reads = ("model", "workload", "adapters.ranks", "adapters.slots", "adapters.seed", *PROTOCOL)
    drawn_by, host_clock_too = "extensions.draw_fp8", False  # errors and bytes, most of its cost, have no clock
    defaults = {"adapters": "fp8_ranks"}

    def panel(self, workload: str, rank: int) -> str:
        return f"{workload}, rank {rank}"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(Fp8Conf, cfg.figure)
        settings = {"model": model_settings(cfg.model), "seed": cfg.adapters.seed}
        return super().points(cfg) + [
            Point(QUALITY, system, "", cfg.model.name, figure.requests, figure.prompt, rank, settings)
            for rank, system in product(cfg.adapters.ranks, [one for one in cfg.system.names if one in WITH_QUALITY])
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches import fp8_operator, operators

        first, figure = points[0], operator_conf(cfg)
        rows, rank = cast(int, first.batch_size), cast(int, first.rank)
        if first.panel == QUALITY:
            systems = [point.system for point in points]
            return fp8_operator.model_errors(cfg, systems, rows, cast(int, first.seq_len), rank)
        batches, adapters = self.problems(cfg, first), popularity(first.workload).number_of_adapters(rows)
        checked = {point.system: fp8_operator.checked_calls(batches, point.system) for point in points}
        samples = operators.microseconds(cfg, {system: calls for system, (calls, _) in checked.items()})
        return [
            [
                *sampled("latency", samples[point.system], "us"),
                Reading("error", checked[point.system][1], "ratio"),
                Reading("bytes_read", bytes_read(figure, rows, adapters, rank, point.system), "byte"),
            ]
            for point in points
        ]


def bytes_read(figure: OperatorConf, rows: int, adapters: int, rank: int, system: str) -> int:
    """Bytes that one batch reads: A and B of its adapters with their scales, x [T, h1] and the old y [T, h2]."""
    wide, is_wide = figure.dtype.bytes, system == "SGMV"
    weights = rank * (figure.h1 + figure.h2) * (wide if is_wide else 1)
    scales = 0 if is_wide else 4 * (rank + figure.h2)
    return adapters * (weights + scales) + wide * rows * (figure.h1 + figure.h2)


EXPERIMENT = main(Fp8, __name__)
