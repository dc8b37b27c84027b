"""Extension: breakdown of the time of one step of the engine, with and without LoRA.

Claim: what LoRA adds is little beside the base products, and less the longer the context. Expected shape: a decode step
is mostly base products at a short context and attention gains on them at a long one, both bound by bytes; shrink hides
beside the base product on a GPU, expand is what is seen. The decodes that join a prompt's step (the paper's mixed step,
section 5) cost a fraction of their own.

Measured on an `Engine` whose slots are full: a decode step of `batch_size` requests at each of `contexts`, a prompt
alone, and a prompt with `batch_size` - 1 decodes; each without adapters, with one for all (Identical), and with one for
every request (Distinct), in turns. Every step is checked to be the one that was wanted, and adapters to change tokens.
On a GPU also what three switches of the engine cost or save: batch invariance, FP8 keys and values, the prefix cache.

    step_latency           the step by the host's clock, from `Engine.step` to the tokens, as a server sees it
    time_<part>            means that add up to step_latency_watched: on a GPU of a few steps with a profiler
                           (`benches.step_parts`; `gaps`: nothing runs), on a CPU schedule, metadata, and the rest
    inflation              on a GPU step_latency_watched / step_latency: what the profiler costs
    host_<phase>           of the host: schedule, metadata
    added_latency          what the adapters add to the step; added_per_token: over the tokens that it computes
    floor                  the time of the bytes that must move, at the bandwidth of a large copy (copy_bandwidth)

Cost at scale=laptop: about 25 seconds on two cores, 4 GB; at scale=gpu 1.5 minutes per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    from experiments.benches.engine_steps import EngineSteps, StepShape
    from experiments.benches.step_parts import Case

DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
NONE = ""  # the workload of steps without adapters
SWITCHES: dict[str, dict[str, bool]] = {
    "punica": {},
    "batch invariant": {"batch_invariant": True},
    "fp8 cache": {"fp8_kv_cache": True},
    "prefix cache": {"prefix_cache": True},
}
"""System -> switches of the engine."""


class BreakdownConf(FigureConf):
    contexts: Counts  # cached tokens of requests that decode
    prompt: Count  # its tokens


class Breakdown(Experiment):
    """Parts of a step per kind of step (the panels), context and popularity."""

    name, figure, order, conf = "ext_breakdown", "ext breakdown", 245, BreakdownConf
    reads = ("model", "workload", "adapters.ranks", "scale.model_batch_sizes", *PROTOCOL)
    clock, differing, drawn_by = "host_clock", ("workload",), "extensions.draw_breakdown"

    def points(self, cfg: Config) -> list[Point]:
        figure, settings = cast(BreakdownConf, cfg.figure), {"model": model_settings(cfg.model)}
        batch = max(cfg.scale.model_batch_sizes)
        kinds = [(DECODE, batch, context) for context in figure.contexts]
        kinds += [(PREFILL, 1, figure.prompt)] + [(MIXED, batch, figure.prompt)] * (batch > 1)
        return [
            Point(kind, system, workload, cfg.model.name, requests, length, rank, settings)
            for system in cfg.system.names
            if system in self.known_systems(cfg)
            for rank in cfg.adapters.ranks
            for kind, requests, length in kinds
            if kind == DECODE or not SWITCHES[system]
            for workload in (NONE, *cfg.workload.names)
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.operators import protocol
        from experiments.benches.step_parts import measured

        bench = self._bench(cfg, points[0].system, cast(int, points[0].rank))
        cases = measured(bench, {point.workload: _shape(point) for point in points}, protocol(cfg))
        return [_readings(cfg, point, cases) for point in points]

    def _bench(self, cfg: Config, system: str, rank: int) -> EngineSteps:
        from experiments.benches.engine_steps import checked_bench

        figure, batch = cast(BreakdownConf, cfg.figure), max(cfg.scale.model_batch_sizes)
        make = partial(checked_bench, cfg, rank, batch, max(*figure.contexts, figure.prompt))
        return self.kept((cfg.model.name, system, rank), partial(make, **SWITCHES[system]))


def _shape(point: Point) -> StepShape:
    from experiments.benches.engine_steps import StepShape

    requests, length = cast(int, point.batch_size), cast(int, point.seq_len)
    adapters = [0] * requests
    if point.workload:
        adapters = [int(slot) + 1 for slot in popularity(point.workload).slots(requests)]
    prompt = 0 if point.panel == DECODE else length
    return StepShape(requests - bool(prompt), length, prompt, tuple(adapters))


def _readings(cfg: Config, point: Point, cases: dict[str, Case]) -> list[Reading]:
    from experiments.benches.engine_steps import bytes_moved
    from experiments.measure.roofline import copy_bandwidth

    case, shape = cases[point.workload], _shape(point)

    def times(metric: str, seconds: Sequence[float]) -> list[Reading]:
        return sampled(metric, [1e3 * value for value in seconds], "ms")

    found = times("step_latency", case.steps)
    found += [Reading(f"time_{part}", 1e3 * each, "ms") for part, each in case.mean_parts().items()]
    found.append(Reading("step_latency_watched", 1e3 * fmean(case.watched), "ms"))
    if case.watched != case.steps:
        found.append(Reading("inflation", fmean(case.watched) / median(case.steps), "ratio"))
    for phase, seconds in case.host.items():
        found += times(f"host_{phase}", seconds)
    if point.workload and NONE in cases:
        added = [mine - plain for mine, plain in zip(case.steps, cases[NONE].steps, strict=True)]
        found += times("added_latency", added)
        found.append(Reading("added_per_token", 1e6 * median(added) / shape.rows, "us"))
    fp8_cache = SWITCHES[point.system].get("fp8_kv_cache", False)
    moved = bytes_moved(cfg.model, cast(int, point.rank), shape, fp8_cache=fp8_cache)
    bandwidth = copy_bandwidth(cfg.hardware.device)
    found += [Reading("bytes_moved", moved, "byte"), Reading("copy_bandwidth", bandwidth / 1e9, "GB/s")]
    return [*found, Reading("floor", 1e3 * moved / bandwidth, "ms")]


EXPERIMENT = main(Breakdown, __name__)
