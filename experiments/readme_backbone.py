"""The README's figure of the Punica repository: the backbone's projection X@W, a loop over adapters, and SGMV. Claim:
the backbone's projection is nearly free to batch, and adding LoRA by SGMV stays below it. A loop over adapters costs a
fixed amount per adapter and soon exceeds it. Expected shape: X@W flat on a GPU, where it is bound by memory; on a CPU
it grows once the batch makes it compute-bound. Timed: X@W at 4096 x 11008, Loop and SGMV, as a layer calls it, at rank
16 under Skewed popularity, interleaved, each after a check. Cost at scale=laptop: about half a minute on two cores, 0.5
GB.
"""

from itertools import product

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import Config, Overlay, Point, main

BACKBONE = "backbone X@W"


class ReadmeBackbone(OperatorExperiment):
    """Latency of the backbone's projection and of the two LoRA operators per batch."""

    name, figure, order, conf = "readme_backbone", "README backbone-vs-sgmv", 40, OperatorConf
    overlay = Overlay("README: backbone X@W and LoRA", metric="latency", line="system")
    differing = ("system", "workload", "rank")

    def points(self, cfg: Config) -> list[Point]:
        figure = operator_conf(cfg)
        settings = figure.settings(cfg)
        points = []
        for rows in figure.batch_sizes:
            for system in cfg.system.names:
                cells = product(cfg.workload.names, cfg.adapters.ranks) if system != BACKBONE else [("none", None)]
                points += [Point("", system, workload, "", rows, None, rank, settings) for workload, rank in cells]
        return points


EXPERIMENT = main(ReadmeBackbone, __name__)
