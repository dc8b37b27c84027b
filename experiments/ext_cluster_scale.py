"""Extension: how large a cluster can be simulated: time and memory of the simulator, by requests and GPUs.

Claim: the simulator replays an hour of a million requests on 1,000 GPUs on one core, in an expected three minutes.
Expected shape: time in proportion to the requests, under the rules whose order of GPUs the policy keeps (`punica`,
`least_loaded`, `round_robin`); other rules scan all GPUs, for time in proportion to requests times GPUs. Memory for a
few numbers per request, and per second of each GPU.

Every point runs in a process of its own, under a scheduling rule (the systems; `punica` alone by default);
`figure.requests` lists how many requests its hour has, at the rate profile of Figure 13, on a GPU for every thousand,
16 at least. The curve from 16 to 1,000 GPUs:

    python -m experiments.ext_cluster_scale scale=paper 'system.names=[punica,least_loaded,round_robin]'

    wall_time, steps, time_per_step: of the simulation, measured; peak_memory: of its process, interpreter included

Cost at scale=laptop: 3 to 4 s of simulation a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from experiments.harness import CheckFailed, Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import Counts
from experiments.harness.settings import folders

FEWEST_GPUS, REQUESTS_OF_A_GPU = 16, 1000


class ScaleConf(FigureConf):
    """`requests` of an hour: one point each; `sizes` has them by scale."""

    sizes: dict[str, Any]
    requests: Counts


class ClusterScale(Experiment):
    """Time and memory by number of requests (the panels) and scheduling rule (the systems)."""

    name, figure, order, conf = "ext_cluster_scale", "ext cluster scale", 295, ScaleConf
    clock, drawn_by = "host_clock", ""

    def known_systems(self, cfg: Config) -> Sequence[str]:
        from experiments.simulator.rules import SCHEDULING_RULES

        return SCHEDULING_RULES.names()

    def points(self, cfg: Config) -> list[Point]:
        from experiments.cluster.placed import MODEL

        return [
            Point(f"{requests} requests", rule, "Skewed", MODEL, settings={"requests": requests})
            for requests in cast(ScaleConf, cfg.figure).requests
            for rule in cfg.system.names
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.cluster.scaled import replay

        asked = point.settings["requests"]
        gpus = max(FEWEST_GPUS, asked // REQUESTS_OF_A_GPU)
        found = replay(str(folders(cfg).paper), asked, gpus, point.system)
        if found.finished != found.requests:
            raise CheckFailed(f"{found.finished} of {found.requests} requests came to their end")
        return [
            Reading("requests", found.requests, "requests", "count"),
            Reading("gpus", gpus, "GPUs", "count"),
            Reading("steps", found.steps, "steps", "count"),
            Reading("wall_time", found.seconds, "s"),
            Reading("time_per_step", 1e6 * found.seconds / max(1, found.steps), "us"),
            Reading("peak_memory", found.peak_bytes / 2**20, "MiB"),
        ]


EXPERIMENT = ClusterScale()

if __name__ == "__main__":
    main(EXPERIMENT)
