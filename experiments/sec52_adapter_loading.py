"""Section 5.2: loading an adapter from host memory, alone and behind decode steps.

Claim: one layer's LoRA loads in about 50 us and one model's in 2 ms over PCIe Gen4 x16, so a decode step of 30 ms hides
the load of a whole model. Arithmetic disagrees (D03): at rank 16 Llama-2 7B has 2.50 MB per layer and 80.0 MB in all,
0.10 and 3.2 ms at 25 GB/s. Expected shape: time in proportion to the rank beyond a fixed cost, `punica` close to
`link`, `per_tensor` above it by host work per tensor, pageable memory far above; a decode step hardly notices a load.

Timed: from the call on the host until the adapter is in its slot of every layer: of a model of one layer, of the whole
model, and (`overlap`) with a decode step of other adapters at once, which is compared with the same step alone.

    punica      `LoRAModelManager.prefetch_adapter`: on a GPU one kernel on a stream of its own, which reads a
                page-locked image of the adapter through the link; on a CPU copies layer by layer
    per_tensor  `set_lora` layer by layer, on the stream of the model, from page-locked tensors (GPU only).
    pageable    the same from ordinary memory (GPU only).
    link        one plain copy of as many bytes, host to device, page-locked (on a CPU: memory to memory): the roofline

Clock: the host's, which waits for the device after each call; on a GPU also events (`device_time`). `host_time`: until
the call returned. First, a slot full of NaN must hold the adapter after one load, and no step may change beside it.

Cost at scale=laptop: about a minute on two cores, 2 GB.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, cast

from experiments.harness import PROTOCOL, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Count

if TYPE_CHECKING:
    from experiments.benches.adapter_loading import Measured

ALONE = ("layer", "model")
OVERLAP = "overlap"
UNITS = {"layer": ("us", 1e6), "model": ("ms", 1e3), OVERLAP: ("ms", 1e3)}
"""Panel -> unit of its times, and units in a second."""


class LoadingConf(FigureConf):
    overlap_rank: Count = 16
    seq_len: Count  # of the decode steps of panel `overlap`


class AdapterLoading(Experiment):
    """Load time per rank of a layer and of a model, and what a load and a decode step do to each other."""

    name, figure, order, conf = "sec52_adapter_loading", "text 5.2", 65, LoadingConf
    defaults = {"adapters": "loading_ranks", "timer": "host_clock"}
    reads = (
        "model", "workload", "adapters.ranks", "adapters.seed", "scale.model_batch_sizes", "scale.loading_ranks",
        *PROTOCOL,
    )  # fmt: skip
    differing, drawn_by = ("system",), "moves.draw_loading"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(LoadingConf, cfg.figure)
        if cfg.timer.name != "host_clock":
            raise ConfigError(
                f"timer={cfg.timer.name!r} cannot time a load from host memory: leave timer= out, or "
                "choose timer=host_clock (a GPU's events are read beside it)"
            )
        systems = [name for name in cfg.system.names if name in self.known_systems(cfg)]
        settings = {"model": model_settings(cfg.model), "seed": cfg.adapters.seed}
        alone = [
            Point(panel, system, model=cfg.model.name, rank=rank, settings=settings)
            for panel, rank, system in product(ALONE, cfg.adapters.ranks, systems)
        ]
        rows = max(cfg.scale.model_batch_sizes)
        return alone + [
            Point(OVERLAP, system, workload, cfg.model.name, rows, figure.seq_len, figure.overlap_rank, settings)
            for workload, system in product(cfg.workload.names, systems)
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.adapter_loading import Bench, Decode, measured
        from experiments.benches.operators import flush_bytes, protocol

        first, decode = points[0], None
        if first.panel == OVERLAP:
            decode = Decode(first.workload, cast(int, first.batch_size), cast(int, first.seq_len))
        layers, rotate = 1 if first.panel == "layer" else None, flush_bytes(cfg)
        gc.collect()  # a manager refers to itself, and the model of the group before would stay
        bench = Bench(
            cfg.model, cast(int, first.rank), cfg.hardware.device, layers=layers, rotate_bytes=rotate,
            seed=cfg.adapters.seed, decode=decode,
        )  # fmt: skip
        found = measured(bench, [point.system for point in points], protocol(cfg))
        return [_readings(first.panel, found[point.system], bench.bytes) for point in points]


def _readings(panel: str, found: Measured, size: int) -> list[Reading]:
    unit, per_second = UNITS[panel]

    def times(metric: str, seconds: Sequence[float]) -> list[Reading]:
        return sampled(metric, [per_second * value for value in seconds], unit) if seconds else []

    readings = [*times("load_time", found.load), *times("host_time", found.host), Reading("bytes", size, "byte")]
    if panel == OVERLAP:
        pairs = zip(found.step, found.step_alone, strict=True)  # neighbours in time: what drifts hits both
        readings += [*times("step_latency", found.step), *times("step_latency_alone", found.step_alone)]
        return readings + times("stall", [beside - alone for beside, alone in pairs])
    readings += times("device_time", found.device)
    return readings + sampled("bandwidth", [size / seconds / 1e9 for seconds in found.load], "GB/s")


EXPERIMENT = main(AdapterLoading, __name__)
