"""Extension: the price of verifying drafts, with adapters and without.

Claim: none of the paper's, whose steps compute one token of a request. A step with k drafts of each request has k + 1
times the rows and reads the same weights. Expected shape: few rows cost little more than one, whatever the adapters;
the more requests, the more tokens drafts must give, since beyond some 64 rows products are bound by compute.

An engine decodes `batch_size` requests of `seq_len` tokens with the panel's adapters; its systems, numbers of given
drafts, take turns. `break_even`: tokens that a step must give for its drafts to pay, as its time over that of a step
without, which the host prepares beside the one before. Random weights tell nothing of acceptance: published ones are
drawn (`paper_results/accept_lengths.csv`). Cost at scale=laptop: 15 seconds on two cores, 1 GB (expected).
"""

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any, cast

from experiments.ext_price_of_lora import EACH, NONE, ONE, adapters_of_rows
from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts

MOST = 7
SYSTEMS = {f"{count} draft{'s' * (count != 1)}": count for count in range(MOST + 1)}
ADAPTERS = NONE, ONE, EACH


class SpeculationConf(FigureConf):
    batch_sizes: Counts
    drafts: list[int]
    context: Count


class Speculation(Experiment):
    """Step time and break-even by adapters (the panels), requests and drafts."""

    name, figure, order, conf = "ext_speculation", "ext speculation", 248, SpeculationConf
    reads = ("model", "adapters.ranks", *PROTOCOL)
    clock, differing, drawn_by = "host_clock", ("system",), "extensions.draw_speculation"

    def points(self, cfg: Config) -> list[Point]:
        figure, rank, model = cast(SpeculationConf, cfg.figure), cfg.adapters.ranks[0], model_settings(cfg.model)
        return [
            Point(panel, system, "", model["name"], batch, figure.context, rank, {"model": model})
            for panel, batch, system in product(ADAPTERS, figure.batch_sizes, cfg.system.names)
            if SYSTEMS[system] in figure.drafts
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.engine_steps import StepShape, steps_in_turns
        from experiments.benches.operators import protocol

        bench, first = self._bench(cfg), points[0]
        batch = cast(int, first.batch_size)
        shape = StepShape(batch, cast(int, first.seq_len), 0, adapters_of_rows(first.panel, batch))
        shapes = dict.fromkeys(("0 drafts", *(point.system for point in points)), shape)
        timed = steps_in_turns(
            bench, shapes, protocol(cfg), lambda system: setattr(bench.engine.scheduler, "most_drafts", SYSTEMS[system])
        )
        for system, steps in timed.items():
            if {step.statistics.num_drafted_tokens for step in steps} != {SYSTEMS[system] * batch}:
                raise CheckFailed(f"a step of {batch} requests did not verify {system} of each")
        samples = {system: [1e3 * step.seconds for step in steps] for system, steps in timed.items()}
        plain, found = median(samples["0 drafts"]), [samples[point.system] for point in points]
        ratios = [Reading("break_even", median(own) / plain, "tokens a step") for own in found]
        return [[*sampled("step_latency", own, "ms"), ratio] for own, ratio in zip(found, ratios, strict=True)]

    def _bench(self, cfg: Config) -> Any:
        from experiments.benches.engine_steps import checked_bench

        figure, rank = cast(SpeculationConf, cfg.figure), cfg.adapters.ranks[0]
        most, context = max(figure.batch_sizes), figure.context

        def checked() -> Any:
            bench = checked_bench(cfg, rank, most, context, speculate=MOST)
            vocab = bench.engine.vocab_size
            given = lambda request, count: [(5 * request.num_tokens + 3 * place) % vocab for place in range(count)]  # noqa: E731
            bench.engine.scheduler.draft = given
            return bench

        return self.kept((cfg.model.name, rank, most, context), checked)


EXPERIMENT = main(Speculation, __name__)
