"""Section 6: the norm in one kernel instead of one for each of its operations. Claim: fusing takes a norm from 110 to 4
us; shape and dtype are not given. The released code norms by the root mean square, `y = x / sqrt(mean(x^2) + eps) *
weight`, and so do we, over hidden states [T, 4096]. Expected shape: unfused, the cost of its launches, whatever T is;
fused, one launch; the ratio falls where T keeps the processor busy. `unfused` is a norm in plain tensor operations, as
in Hugging Face's Llama. `fused` is our models': a Triton kernel on a GPU; on a CPU torch's own, the same operations in
turn, so nothing is saved there. Both are timed by the host's clock, which counts launches, and on a GPU inside a CUDA
graph, on hidden states in the caches, and checked against float64 before. Cost at scale=laptop: a few seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.schema import Count, Counts, DType

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5


class NormConf(FigureConf):
    hidden: Count
    batch_sizes: Counts = [1, 4, 16, 32, 64, 512]
    dtype: DType


class Norm(Experiment):
    """Latency of both forms over the rows of a step."""

    name, figure, order, conf = "sec6_norm", "text 6", 68, NormConf
    differing, drawn_by, host_clock_too = ("system",), "overlay.draw_norms", True
    reads = PROTOCOL

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(NormConf, cfg.figure)
        settings = {"hidden": figure.hidden, "dtype": figure.dtype.name}
        return [
            Point("RMSNorm", system, batch_size=rows, settings=settings)
            for rows in figure.batch_sizes
            for system in cfg.system.names
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.operators import protocol
        from experiments.measure.timing import time_side_by_side

        calls = {point.system: [checked(cfg, point.system, cast(int, point.batch_size))] for point in points}
        samples = time_side_by_side(calls, replace(protocol(cfg), flush_mib=0))
        return [sampled("norm_latency", [1e6 * value for value in samples[point.system]], "us") for point in points]


def checked(cfg: Config, system: str, rows: int) -> "Callable[[], Tensor]":
    """Make the call of a form on `rows` hidden states. `CheckFailed` when it differs from float64."""
    import torch

    from experiments.benches.operators import TOLERANCE
    from experiments.harness.experiment import check

    figure = cast(NormConf, cfg.figure)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((rows, figure.hidden), (figure.hidden,)))
    dtype, device = getattr(torch, figure.dtype.name), cfg.hardware.device
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    norm = FORMS[system]
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    check(system, norm(x, weight), exact, 2 * TOLERANCE[figure.dtype])
    return lambda: norm(x, weight)


def unfused(x: "Tensor", weight: "Tensor") -> "Tensor":
    """Norm by one operation after the other; `x [T, hidden]`, `weight [hidden]`."""
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return weight * (wide * scale).to(x.dtype)


def fused(x: "Tensor", weight: "Tensor") -> "Tensor":
    from punica.ops.backbone import add_rms_norm

    return add_rms_norm(x, None, weight, EPS)


FORMS = {"unfused": unfused, "fused": fused}
EXPERIMENT = main(Norm, __name__)
