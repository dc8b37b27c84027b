"""Figure 13: one hour of requests on 16 GPUs, under Punica's scheduling. Claim (section 7.3): the cluster's throughput
follows the offered load, GPUs that work do so at full batches, and few GPUs work while the load is low. Expected shape:
active GPUs rise and fall with the request rate, at batch 31 or 32 nearly always; an idle GPU stays idle.

`runtime` chooses the world that serves the hour; the scheduling policy is the same object in all of them:

    python -m experiments.fig13_cluster runtime=simulated [figure.cost=h200] [figure.gpus=1000]
    python -m experiments.fig13_cluster runtime=ray [figure.kill=true] [address=host:6379]

`simulated` is a virtual clock around the policy (`experiments.simulator`) with a cost model fitted to the paper's
Figures 1 and 10. Its rows are `kind=simulated` and name the model; Figures 11 to 13 are predictions. `figure.cost`
gives the GPUs another machine's steps, `figure.gpus` is another number of them with as much more load: each is an hour
in a panel of its own, which no claim is held against, and of the latter its totals.

`ray` are `figure.runners` engines in processes of their own that serve a model with time, load and lengths scaled down
(`experiments.cluster.ray_hour`), here or on the Ray cluster at `address`: a tiny one on CPUs, Llama-2 7B on GPUs, one
for each runner. Rows are `kind=measured`, beside the same trace by a simulator fitted to these runners. Rules are
chosen as in `system.names=[punica,least_loaded]`. `figure.kill=true` serves the hour once more and kills a runner in
its middle.

Cost: simulated about a minute, on one core; on Ray five minutes, with `figure.kill` nine, on two cores; on four GPUs
an hour takes a minute.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import cast

from pydantic import Field

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import Count


class ClusterConf(FigureConf):
    gpus: Count = 16  # of the paper; any other number has as much more load, in a panel of its own
    seconds: int = Field(ge=1, le=3600)  # of the hour, from its start
    requests: Count  # of the stream of Figure 11, predicted beside it
    seeds: Count = 3  # of every simulation: the first one's rows, with the span over all
    cost: str = "a100"  # cost model: the paper's (a100), or a machine with recorded rows (h200)
    runners: Count = 4  # on Ray ...
    model: str
    speed_up: Count  # ... seconds of the hour in one there ...
    max_len: int = Field(ge=4)
    kill: bool = False  # ... and whether to kill a runner


class Fig13(Experiment):
    """One panel per world: a module with `points(cfg)` and `measure(cfg, point)`; readings are `served.readings`."""

    # after the figures whose recorded rows its costs are fitted to
    name, figure, order, conf = "fig13_cluster", "13", 285, ClusterConf
    reads = ("runtime", "address")
    clock, drawn_by = "host_clock", "cluster.draw_hour"
    passes = 1  # a simulation repeats itself
    watched = False  # nothing disturbs a virtual clock; on Ray runners would pass for the work of others

    def known_systems(self, cfg: Config) -> Sequence[str]:
        from experiments.simulator.other_systems import SCHEDULING_RULES

        return SCHEDULING_RULES.names()

    def points(self, cfg: Config) -> list[Point]:
        return _world(cfg).points(cfg)

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        return _world(cfg).measure(cfg, point)


def _world(cfg: Config) -> ModuleType:
    from experiments.cluster import ray_hour, simulated_hour

    figure = cast(ClusterConf, cfg.figure)
    for key, given in (("address", cfg.address), ("figure.kill", figure.kill)):
        if given and cfg.runtime != "ray":
            raise ConfigError(f"{key}={given} is read with runtime=ray alone: choose that, or leave it out")
    return {"simulated": simulated_hour, "ray": ray_hour}[cfg.runtime]


EXPERIMENT = main(Fig13, __name__)
