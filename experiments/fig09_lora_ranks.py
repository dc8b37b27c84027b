"""Figure 9: the LoRA operator at ranks 8, 16, 32 and 64. Claim (section 7.1): the latency of a single row does not
depend on the rank; with distinct adapters latency at batch 64 rises with it; where rows share adapters it is flat over
the batch at every rank. Expected shape: Distinct fans out with the rank, the other three stay together near the bottom.
Timed: `SGMV` is shrink and expand as a layer calls them, 4096 -> r -> 4096; `SGMV expand`, dotted, the expand launch
alone, which the paper's script times; its plotted values are twice that (D06). Each is checked against the reference
first. All popularities of a batch run interleaved, after one emptying of the caches per round. Cost at scale=laptop:
about half a minute on two cores, 1 GB.
"""

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment
from experiments.harness import Overlay, main


class Fig09(OperatorExperiment):
    """Latency per rank (the panels), popularity and batch."""

    name, figure, order, conf = "fig09_lora_ranks", "9", 30, OperatorConf
    differing = ("system", "workload")
    defaults = {"adapters": "paper_ranks"}
    overlay = Overlay(
        "Figure 9: SGMV at four ranks", metric="latency", panel="panel", line="workload", part="SGMV expand"
    )

    def panel(self, workload: str, rank: int) -> str:
        return f"r={rank}"


EXPERIMENT = main(Fig09, __name__)
