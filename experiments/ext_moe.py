"""Extension: the paper's popularity sweep carried to mixtures of experts, with adapters on the experts.

Not in the paper, whose models are dense. A token meets k experts, and its adapter has weights of its own in each of
them: rows which share an adapter share its weights only where they also share an expert. Claim: batching rows of
different adapters still pays, because the experts themselves, whatever the adapter, are read once. Expected shape: what
LoRA adds to a layer grows with the (adapter, expert) pairs that the batch meets, so that popularities lie closer
together than in a dense layer, closest where experts are many (Qwen3-30B-A3B: 128, 8 of them per token) and a batch
hardly ever meets an expert twice; with 8 experts (Mixtral 8x7B) Identical stays cheapest. Throughput grows with the
batch, less steeply than a dense model's until every expert is met.

Timed, all systems of a batch and popularity interleaved, after checks against the reference and against rows alone: the
grouping of (token, expert) pairs by adapter and expert; both LoRA products of one layer, with that grouping; the layer
of experts with and without LoRA; and a decode step of a model of `layers` layers with and without it, in tokens per
second. Random weights, rank-16 adapters on all experts, in FP8 with `figure.fp8=float8_e4m3fn`. Widths are those of the
two models over `divisor` (8 at scale=laptop, 1 at scale=paper); numbers of experts are theirs.

Cost at scale=laptop: about 1.5 minutes on two cores, 1 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from omegaconf import MISSING

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.schema import DType

if TYPE_CHECKING:
    from experiments.benches.moe_bench import MoEBench

LAYER, MODEL = ("layer", "backbone layer"), ("model", "backbone model")


@dataclass
class MoEConf(FigureConf):
    """Models (`experiments.benches.moe_bench.MODELS`), how much of them, and batches."""

    models: list[str] = field(default_factory=list)
    batch_sizes: list[int] = MISSING
    layers: int = MISSING
    divisor: int = MISSING
    context: int = MISSING  # cached tokens of every request
    dtype: DType = MISSING
    fp8: str | None = None  # format of the adapters' slots, as of LoRAConfig; null: dtype


class MixtureOfExperts(Experiment):
    """Latencies and throughput of each system per model (the panels), popularity and batch."""

    name, figure, order, conf = "ext_moe", "ext moe", 260, MoEConf
    reads = ("workload", "adapters.ranks", "adapters.slots", *PROTOCOL)
    differing, drawn_by = ("system",), "moe.draw_moe"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(MoEConf, cfg.figure)
        settings = {
            "layers": figure.layers, "divisor": figure.divisor, "context": figure.context, "dtype": figure.dtype.name,
            "slots": self._slots(cfg),
        }  # fmt: skip
        if figure.fp8 is not None:
            settings["fp8"] = figure.fp8
        return [
            Point(model, system, workload, model, batch, figure.context, rank, settings)
            for model in figure.models
            for rank in cfg.adapters.ranks
            for batch in figure.batch_sizes
            for workload in cfg.workload.names
            for system in cfg.system.names
        ]

    def _slots(self, cfg: Config) -> int:
        return cfg.adapters.slots or max(cast(MoEConf, cfg.figure).batch_sizes)

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.operators import microseconds
        from punica.workload.popularity import popularity

        first = points[0]
        batch = cast(int, first.batch_size)
        bench = self._bench(cfg, first.model, cast(int, first.rank))
        calls = bench.checked_calls([int(slot) for slot in popularity(first.workload).slots(batch)])
        samples = microseconds(cfg, {point.system: calls[point.system] for point in points})
        return [_readings(point.system, batch, samples[point.system]) for point in points]

    def _bench(self, cfg: Config, model: str, rank: int) -> MoEBench:
        from experiments.benches.moe_bench import MoEBench

        figure, slots = cast(MoEConf, cfg.figure), self._slots(cfg)
        sizes = (figure.layers, figure.divisor, slots, max(figure.batch_sizes), figure.context)
        key = (model, rank, *sizes, figure.dtype, figure.fp8)
        return self.kept(
            key, lambda: MoEBench(model, rank, *sizes, figure.dtype.name, cfg.hardware.device, fp8=figure.fp8)
        )


def _readings(system: str, batch: int, samples: Sequence[float]) -> list[Reading]:
    """The rows of one point from its microseconds."""
    if system in MODEL:
        return sampled("throughput", [batch * 1e6 / one for one in samples], "token/s")
    return sampled("layer_latency" if system in LAYER else "latency", samples, "us")


EXPERIMENT = MixtureOfExperts()

if __name__ == "__main__":
    main(EXPERIMENT)
