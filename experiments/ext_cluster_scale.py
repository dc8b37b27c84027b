"""Extension: how large a cluster can be simulated: time and memory of the simulator, by requests and GPUs.

Claim: the simulator replays as many requests as the hour of Figure 13 has (18 020) in seconds on one core. Expected
shape: time in proportion to the steps of all GPUs; memory that hardly grows beside the interpreter's own.

Every point runs in a process of its own; `figure.requests` lists how many requests its hour has, at the rate profile of
Figure 13, on a GPU for every thousand:

    python -m experiments.ext_cluster_scale 'figure.requests=[18000,1000000]'

    wall_time, steps, time_per_step: of the simulation, measured; peak_memory: of its process, interpreter included

Recorded in `results/cpu`, three repeats each: 1 962 requests on 16 GPUs in 1.1 to 1.3 s and 124 MiB, 18 020 on 18 in
5.2 to 5.3 s and 129 MiB, 7.1 to 8.5 us a step. Nothing larger is recorded.

Cost at scale=laptop: 6 to 7 s of simulation a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from omegaconf import MISSING

from experiments.harness import CheckFailed, Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.settings import folders

FEWEST_GPUS, REQUESTS_OF_A_GPU = 16, 1000


@dataclass
class ScaleConf(FigureConf):
    """`requests` of an hour: one point each; `sizes` has them by scale."""

    sizes: dict[str, Any] = MISSING
    requests: list[int] = MISSING


class ClusterScale(Experiment):
    """Time and memory by number of requests (the panels)."""

    name, figure, order, conf = "ext_cluster_scale", "ext cluster scale", 295, ScaleConf
    clock, drawn_by = "host_clock", "cluster.draw_scale"

    def points(self, cfg: Config) -> list[Point]:
        from experiments.cluster.placed import MODEL

        return [
            Point(f"{requests} requests", "punica", "Skewed", MODEL, settings={"requests": requests})
            for requests in cast(ScaleConf, cfg.figure).requests
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.cluster.scaled import replay

        asked = point.settings["requests"]
        gpus = max(FEWEST_GPUS, asked // REQUESTS_OF_A_GPU)
        found = replay(str(folders(cfg).paper), asked, gpus)
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
