"""Figure 7: one SGMV launch (expand, 16 -> 4096) on the roofline. Claim (section 7.1): with distinct adapters the
arithmetic intensity does not depend on the batch, and FLOP/s rise with it through parallelism alone; with one adapter
intensity and FLOP/s climb with the batch; Uniform and Skewed are between. Expected shape: Distinct moves straight up,
Identical up and to the right. Timed: one expand launch, y += v B^T, after a check against the reference; the segment
plan is built before, as once per step in a server. All popularities of a batch run interleaved. The roof is measured,
and on a known GPU also its data sheet's. Intensity counts the bytes of the dtype that ran. Cost at scale=laptop: about
half a minute on two cores, 0.2 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import Config, Point, Reading, main, sampled
from experiments.measure import roofline
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    from experiments.measure.timing import Call

ROOF, SHEET = "roof", "roof, data sheet"  # panels of the machine's two roofs


class Fig07(OperatorExperiment):
    """FLOP/s, intensity and latency of one expand launch per popularity and batch, and the roof above them."""

    name, figure, order, conf = "fig07_sgmv_roofline", "7", 10, OperatorConf
    differing = ("system", "workload")
    drawn_by = "overlay.draw_roofline"

    def points(self, cfg: Config) -> list[Point]:
        dtype = operator_conf(cfg).dtype.name
        roofs = [Point(panel=ROOF, settings={"dtype": dtype})]
        if cfg.hardware.bandwidth_gb_s and cfg.hardware.tflop_s:
            said = [cfg.hardware.bandwidth_gb_s, cfg.hardware.tflop_s]
            roofs.append(Point(panel=SHEET, settings={"dtype": dtype, "datasheet": said}))
        return [*roofs, *super().points(cfg)]

    def panel(self, workload: str, rank: int) -> str:
        return ""

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        if points[0].panel in (ROOF, SHEET):
            return [_roof(cfg, point.panel) for point in points]
        return super().measure_together(cfg, points)

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        from experiments.benches.operators import prepare_checked

        return prepare_checked(self.problems(cfg, point), "SGMV expand")

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        figure = operator_conf(cfg)
        rows, rank = cast(int, point.batch_size), cast(int, point.rank)
        adapters = popularity(point.workload).number_of_adapters(rows)
        flop = roofline.sgmv_flop(rows, rank, figure.h2)
        io_bytes = roofline.sgmv_io_bytes(rows, adapters, rank, figure.h2, figure.dtype.bytes)
        rates = sampled("achieved_flops", [flop / us * 1e6 for us in samples], "FLOP/s")
        return [
            *sampled("latency", samples, "us"),
            *rates[:3],  # median, p10, p90; the count is latency's
            Reading("flop", flop, "FLOP"),
            Reading("io_bytes", io_bytes, "byte"),
            Reading("arithmetic_intensity", flop / io_bytes, "FLOP/byte"),
            Reading("num_lora_models", adapters, "models"),
        ]


def _roof(cfg: Config, panel: str) -> list[Reading]:
    hardware, dtype = cfg.hardware, operator_conf(cfg).dtype.name
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    if panel == SHEET:
        kind, bandwidth, peak = "datasheet", cast(float, hardware.bandwidth_gb_s) / 1e3, cast(float, hardware.tflop_s)
    else:
        found = roofline.copy_bandwidth(hardware.device), roofline.product_flops(hardware.device, dtype)
        kind, (bandwidth, peak) = "measured", (value / 1e12 for value in found)
    return [
        Reading("memory_bandwidth_line", bandwidth, "TB/s", kind=kind),
        Reading(f"peak_{short}_line", peak, "TFLOP/s", kind=kind),
    ]


EXPERIMENT = main(Fig07, __name__)
