"""Figure 8: six ways to compute the LoRA operator for a batch of many adapters. Claim (section 7.1): SGMV beats Loop
and Gather-BMM at every batch size in every workload; its latency grows about threefold over batch 1 to 64 when every
row has its own adapter, and hardly when rows share them. Expected shape: Loop grows with the number of adapters, Gather
and Gather-BMM with the number of rows, SGMV stays lowest. Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, rank 16 (the
paper's script may have run shrink twice, D05). Gather copies each row's A and B; BMM multiplies copies made beforehand;
Gather-BMM does both; `grouped_mm` is torch's grouped matmul, which the paper did not have. SGMV is what a layer calls,
its wrapper on the weights of all slots; the operator on tensors alone is a column of `ext_operator_tables`. All run
interleaved on the same inputs, each after a check against the reference. On a CPU, Gather and Gather-BMM jump once a
copy exceeds 32 MB, from where glibc maps fresh pages for every call. Cost at scale=laptop: about 1 minute on two cores,
0.5 GB.
"""

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment
from experiments.harness import Overlay, main


class Fig08(OperatorExperiment):
    """Latency of each implementation per popularity (the panels) and batch."""

    name, figure, order, conf = "fig08_lora_operator", "8", 20, OperatorConf
    overlay = Overlay("Figure 8: LoRA operator", metric="latency", panel="workload", line="system")


EXPERIMENT = main(Fig08, __name__)
