"""Extension: a decode step of Hugging Face with PEFT, the baseline of Figure 11, in every way that it offers.

Claim: with one adapter a baseline that is given the best decodes about as fast as its weights are read; PEFT's mixed
batches do not, since each layer loops over the adapters and the host launches every kernel. Measured: a decode step
behind `figure.context` tokens, of one request and of a full batch; every way is compared with the reference's logits
first.

    launches_per_step, kernels_per_step   what the host gives the device, and what that runs, by the profiler
    device_time, launch_time              time in which the device ran something; the host's time for an empty kernel
    device_share, launch_share            both over the step

Cost at scale=laptop: about 20 seconds on two cores, 2 GB; at scale=gpu three to five minutes per model, 27 and 45 GB.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts

if TYPE_CHECKING:
    from experiments.systems.hf_systems import HfBench


class HfBaselinesConf(FigureConf):
    """Rows of a step, and tokens behind each."""

    batch_sizes: Counts
    context: Count


class HfBaselines(Experiment):
    """Latency and launches of a step per batch (the panels) and way."""

    name, figure, order, conf = "ext_hf_baselines", "ext hf baselines", 225, HfBaselinesConf
    reads = ("model", "adapters.ranks", "adapters.alpha", "adapters.seed", *PROTOCOL)
    clock = "host_clock"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(HfBaselinesConf, cfg.figure)
        adapters = {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed}
        settings = {"model": model_settings(cfg.model), "adapters": adapters}
        return [
            Point(f"batch {batch}", system, "Distinct" if system == "mixed" else "Identical", cfg.model.name, batch,
                  figure.context, rank, settings)
            for rank in cfg.adapters.ranks
            for batch in figure.batch_sizes
            for system in cfg.system.names
            if system in self.known_systems(cfg)
        ]  # fmt: skip

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches.operators import protocol
        from experiments.benches.step_parts import seconds_per_launch

        batch, context = cast(int, point.batch_size), cast(int, point.seq_len)
        timed = self._bench(cfg, cast(int, point.rank)).measure(point.system, batch, context, protocol(cfg))
        readings = sampled("step_latency", [1e3 * seconds for seconds in timed.steps], "ms")
        if timed.launches is None:
            return readings
        launch, step = seconds_per_launch(), median(timed.steps)
        return [
            *readings,
            Reading("launches_per_step", timed.launches.launches, "launches", "count"),
            Reading("kernels_per_step", timed.launches.kernels, "kernels", "count"),
            Reading("device_time", 1e3 * timed.launches.busy, "ms"),
            Reading("launch_time", 1e6 * launch, "us"),
            Reading("device_share", timed.launches.busy / step, "share"),
            Reading("launch_share", timed.launches.launches * launch / step, "share"),
        ]

    def _bench(self, cfg: Config, rank: int) -> HfBench:
        from experiments.systems.hf_systems import HfBench
        from experiments.systems.weights import Limits
        from experiments.systems.world import World

        figure, adapters, device = cast(HfBaselinesConf, cfg.figure), cfg.adapters, cfg.hardware.device
        steps = cfg.scale.warmup + max(cfg.scale.repeats, cfg.scale.min_repeats)
        limits = Limits(max(figure.batch_sizes), figure.context + steps + 2)
        key = (cfg.model.name, rank, limits, device)
        return self.kept(key, lambda: HfBench(World(cfg.model, device, limits, rank, adapters.alpha, adapters.seed)))


EXPERIMENT = HfBaselines()

if __name__ == "__main__":
    main(EXPERIMENT)
