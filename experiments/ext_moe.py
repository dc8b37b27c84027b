"""Extension: the paper's popularity sweep carried to mixtures of experts, with adapters on the experts. A token meets k
experts, and its adapter has weights of its own in each of them: rows that share an adapter share its weights only where
they also share an expert. Claim: batching rows of different adapters still pays, because the experts themselves are
read once. Expected shape: what LoRA adds to a layer grows with the (adapter, expert) pairs that the batch meets, so
popularities are closer together than in a dense layer, closest where experts are many (Qwen3-30B-A3B: 128, 8 of them
per token); with 8 experts (Mixtral 8x7B) Identical stays cheapest. Timed, all systems of a batch and popularity
interleaved, after checks against the reference and against rows alone: the grouping of (token, expert) pairs by adapter
and expert; both LoRA products of one layer, with that grouping where the wrapper asks for it; the layer of experts with
and without LoRA, in turn over those of `layers` layers. Widths are those of the two models over `divisor`. Adapters
have rank 16, and are in FP8 with `figure.fp8=float8_e4m3fn`. `figure.slots` repeats layers with so many slots, all of
which hold adapters: latency follows the adapters of the batch, and is the same at all numbers of slots. The systems
`engine` and `backbone engine` are a step of an engine of `engine_layers` layers, from `Engine.step` to the tokens. They
have the adapters of the popularity, and none, and are timed by the host's clock alone. `conf/recording.yaml` has the
commands of slots and of all of Qwen3-30B-A3B (61 GB of weights, 53 of adapters). Cost at scale=laptop: about 1.5
minutes on two cores, 1 GB.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.schema import Count, Counts, DType
from experiments.harness.settings import slots_for
from experiments.workload.popularity import popularity

LAYER = ("layer", "backbone layer")
ENGINE, BACKBONE_ENGINE = "engine", "backbone engine"


class MoEConf(FigureConf):
    models: list[str] = ["mixtral-8x7b", "qwen3-30b-a3b"]  # of `benches.expert_models.MODELS`
    batch_sizes: Counts = [1, 4, 16]
    slots: Counts | None = None  # a panel for each; null: adapters.slots alone
    layers: Count = 2
    engine_layers: Count  # of the model that the engine serves
    divisor: Count
    context: Count = 64  # cached tokens of every request
    dtype: DType
    fp8: str | None = None  # format of the adapters' slots, as of LoRAConfig; null: dtype


class MixtureOfExperts(Experiment):
    """Latencies of each system per model (the panels), popularity and batch."""

    name, figure, order, conf = "ext_moe", "ext moe", 260, MoEConf
    reads = ("workload", "adapters.ranks", "adapters.slots", *PROTOCOL)
    differing, drawn_by = ("system",), "extensions.draw_moe"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(MoEConf, cfg.figure)
        settings: dict[str, Any] = {
            "layers": figure.layers, "divisor": figure.divisor, "context": figure.context, "dtype": figure.dtype.name,
            **({"fp8": figure.fp8} if figure.fp8 else {}),
        }  # fmt: skip
        own = [name for name in cfg.system.names if name not in (ENGINE, BACKBONE_ENGINE)]
        engine = [name for name in cfg.system.names if name not in own]
        if cfg.timer.name != "host_clock":  # the only one that times the engine's steps
            engine = []
        most = max(figure.batch_sizes)
        sizes = [slots_for(cfg, figure.batch_sizes, slots) for slots in figure.slots or (None,)] if own else []
        kinds = [(own, {**settings, "slots": slots}, slots if figure.slots else None) for slots in sizes]
        kinds.append((engine, {**settings, "engine": True, "layers": figure.engine_layers, "slots": most}, None))
        return [
            Point(panel_of(model, figure.fp8, slots), system, workload, model, batch, figure.context, rank, of_system)
            for model, rank, (systems, of_system, slots) in product(figure.models, cfg.adapters.ranks, kinds)
            for batch, workload, system in product(figure.batch_sizes, cfg.workload.names, systems)
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.expert_models import MoEBench, MoESizes, decode_seconds, engine_of
        from experiments.benches.operators import microseconds, protocol

        first, figure, device = points[0], cast(MoEConf, cfg.figure), cfg.hardware.device
        batch, settings, most = cast(int, first.batch_size), first.settings, max(figure.batch_sizes)
        grid = settings["layers"], settings["divisor"], most, settings["context"], settings["dtype"], figure.fp8
        sizes = MoESizes(first.model, cast(int, first.rank), *grid)
        rows = [int(slot) for slot in popularity(first.workload).slots(batch)]
        if first.system in (ENGINE, BACKBONE_ENGINE):
            engine = self.kept((ENGINE, sizes), lambda: engine_of(sizes, device))
            adapters = {ENGINE: tuple(slot + 1 for slot in rows), BACKBONE_ENGINE: (0,) * batch}
            seconds = decode_seconds(engine, adapters, figure.context, protocol(cfg))
            return [sampled("step_latency", [1e3 * one for one in seconds[point.system]], "ms") for point in points]
        slots = settings["slots"]
        calls = self.kept((sizes, slots), lambda: MoEBench(sizes, slots, device)).checked_calls(rows)
        samples = microseconds(cfg, {point.system: calls[point.system] for point in points})
        metrics = {name: "layer_latency" if name in LAYER else "latency" for name in samples}
        return [sampled(metrics[point.system], samples[point.system], "us") for point in points]


def panel_of(model: str, fp8: str | None, slots: int | None = None) -> str:
    """Name the panel of a model with adapters in the format `fp8` (None: the model's), in `slots` (None: usual)."""
    return ", ".join(part for part in (model, fp8 and f"{fp8} adapters", slots and f"{slots} slots") if part)


EXPERIMENT = main(MixtureOfExperts, __name__)
