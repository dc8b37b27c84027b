"""Figure 10: one transformer layer with LoRA, a decode step of many adapters. Claim (section 7.1): the layer's latency
is nearly the same whatever the popularity, and grows moderately from batch 1 to 32 (by 72 % in the text, which fits
length 2048; by 28 to 49 % at length 512, D02). Expected shape: four lines close together, Distinct slightly above,
steeper at the longer context. Timed: one decoder layer (norms, seven projections with rank-16 adapters, paged
attention, SwiGLU) on one row per request, all with the same context length; segment metadata is set before, as once per
step in a server. On a GPU many calls make one CUDA graph over more weights than the caches hold. Every slot holds an
adapter of its own. First, rows of the batch are checked against the same rows run alone, with and without their
adapter. Cost at scale=laptop: about 1 minute on two cores, 2 GB; at scale=gpu 40 seconds per model.
"""

from functools import partial
from itertools import product
from typing import cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Overlay, main
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Counts
from experiments.harness.settings import slots_for
from experiments.workload.popularity import popularity


class LayerConf(FigureConf):
    batch_sizes: Counts
    seq_lens: Counts


class Fig10(Experiment):
    """Latency of one layer per context length (the panels), popularity and batch."""

    name, figure, order, conf = "fig10_layer", "10", 60, LayerConf
    reads, host_clock_too = ("model", "workload", "adapters.ranks", "adapters.slots", *PROTOCOL), True
    overlay = Overlay("Figure 10: one layer with LoRA, decode", metric="layer_latency", panel="panel", line="workload")

    def points(self, cfg: Config) -> list[Point]:
        figure, model = cast(LayerConf, cfg.figure), cfg.model
        settings = {"model": model_settings(model), "slots": self._slots(cfg)}
        sizes = product(cfg.system.names, cfg.adapters.ranks, figure.seq_lens, figure.batch_sizes, cfg.workload.names)
        return [
            Point(f"{model.paper_name}, len={length}", system, workload, model.name, batch, length, rank, settings)
            for system, rank, length, batch, workload in sizes
        ]

    def _slots(self, cfg: Config) -> int:
        return slots_for(cfg, cast(LayerConf, cfg.figure).batch_sizes)

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches.model_steps import LayerBench, step_tokens
        from experiments.benches.operators import microseconds

        figure, device = cast(LayerConf, cfg.figure), cfg.hardware.device
        batch, length, rank = cast("tuple[int, int, int]", (point.batch_size, point.seq_len, point.rank))
        tokens = step_tokens(max(figure.batch_sizes), max(figure.seq_lens))
        make = partial(LayerBench, cfg.model, rank, self._slots(cfg), tokens, device)
        adapter_ids = [int(slot) + 1 for slot in popularity(point.workload).slots(batch)]
        layer = self.kept((cfg.model.name, rank), make).checked_call(adapter_ids, length)
        return sampled("layer_latency", microseconds(cfg, {"layer": [layer]})["layer"], "us")


EXPERIMENT = main(Fig10, __name__)
