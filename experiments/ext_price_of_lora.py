"""Extension: the price of LoRA on a base that is read in fewer bytes.

Claim: none of the paper's, whose base has 16 bits. Expected shape: with weights and cache in FP8 a step reads half the
bytes and the adapters' are what they were, so their share about doubles; adapters in FP8 win it back. On an H200 the
share of 32 requests stays about the same: steps shrink less than their bytes, and what adapters add shrinks, too.
Adapters in FP8 lower it there, and raise that of one request.

An engine decodes `batch_size` requests of `context` tokens over each of `BASES`, the panels; its systems take turns.
The last has slots in FP8. `added_latency` is to the step without adapters of the same engine, `floor` the time of the
bytes that must move at the measured bandwidth of a large copy. Weights are random: quality is not judged. A CPU
dequantises weights in each step. Cost at scale=laptop: 20 seconds on two cores, 3 GB (expected).
"""

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts

BASES = {"plain": (False, False), "FP8 weights": (True, False), "FP8 cache": (False, True), "FP8 both": (True, True)}
"""Panel -> whether weights of linear layers, and keys and values, are in FP8 instead of the model's dtype."""
NONE, ONE, EACH, FP8_EACH = "no adapter", "one adapter", "one each", "one each, FP8"


class PriceConf(FigureConf):
    bases: list[str]  # names of `BASES`
    batch_sizes: Counts
    context: Count  # tokens of each request


class PriceOfLora(Experiment):
    """Step and added time by base (the panels), requests and adapters."""

    name, figure, order, conf = "ext_price_of_lora", "ext price of lora", 247, PriceConf
    reads = ("model", "adapters.ranks", *PROTOCOL)
    clock, differing, drawn_by = "host_clock", ("system",), "extensions.draw_price_of_lora"

    def points(self, cfg: Config) -> list[Point]:
        figure, rank, model = cast(PriceConf, cfg.figure), cfg.adapters.ranks[0], model_settings(cfg.model)
        return [
            Point(base, system, "", model["name"], batch, figure.context, rank, {"model": model, "fp8_adapters": fp8})
            for base, fp8, batch, system in product(figure.bases, (False, True), figure.batch_sizes, cfg.system.names)
            if (system == FP8_EACH) == fp8
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.engine_steps import StepShape, bytes_moved, checked_bench, steps_in_turns
        from experiments.benches.operators import protocol
        from experiments.measure.roofline import copy_bandwidth

        most, bandwidth = max(cast(PriceConf, cfg.figure).batch_sizes), copy_bandwidth(cfg.hardware.device)
        batch, context, rank = cast("tuple[int, int, int]", (points[0].batch_size, points[0].seq_len, points[0].rank))
        (weights, cache), slots = BASES[points[0].panel], points[0].settings["fp8_adapters"]
        form = {"fp8_weights": weights, "fp8_slots": slots, "fp8_kv_cache": cache}
        key = cfg.model.name, points[0].panel, slots, rank, most, context
        bench = self.kept(key, lambda: checked_bench(cfg, rank, most, context, **form))
        systems = NONE, *(point.system for point in points)
        shapes = {system: StepShape(batch, context, 0, adapters_of_rows(system, batch)) for system in systems}
        timed = steps_in_turns(bench, shapes, protocol(cfg))
        samples = {system: [1e3 * step.seconds for step in steps] for system, steps in timed.items()}
        found = []
        for point in points:
            own, shape = samples[point.system], shapes[point.system]
            moved = bytes_moved(cfg.model, rank, shape, weights, cache, slots)
            added = [mine - plain for mine, plain in zip(own, samples[NONE], strict=True)]
            share = Reading("share_of_step", 100 * median(added) / median(own), "percent")
            price = [] if point.system == NONE else [*sampled("added_latency", added, "ms"), share]
            floor = Reading("bytes_moved", moved, "byte"), Reading("floor", 1e3 * moved / bandwidth, "ms")
            found.append([*sampled("step_latency", own, "ms"), *price, *floor])
        return found


def adapters_of_rows(system: str, batch: int) -> tuple[int, ...]:
    """Return the adapter of each row of a step; 0: none."""
    return {NONE: (0,) * batch, ONE: (1,) * batch}.get(system, tuple(range(1, batch + 1)))


EXPERIMENT = main(PriceOfLora, __name__)
