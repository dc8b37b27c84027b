"""Extension: many adapters trained in one batch. Claim: none of the paper's. Expected shape: a mixed batch, whose rows
share one base product, wins where those of one adapter leave it bound by memory (below 233, the ridge of an H200).
Timed, interleaved, after a check of outputs and gradients: forward and backward of a projection, or of the seven of a
layer, each on rows of its own, in float32 on a CPU and bfloat16 on a GPU: `one by one`, each adapter in a batch of its
own; in one batch `loop`, two products for each adapter, `grouped_mm`, torch's grouped products, and `SGMV`,
`punica.ops.gradients.lora_linear`. `lora_latency`, `lora_forward`: without the base product, and the backward;
`lora_backward`: the difference. Not measured: LoRAFusion's kernels (arXiv 2510.00206), which no package index has. Cost
at scale=laptop: 25 seconds.
"""

from collections.abc import Sequence
from itertools import chain, product
from statistics import median
from typing import Any, Literal, cast

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts, ModelConf

KINDS = {"latency": (True, True), "lora_latency": (False, True), "lora_forward": (False, False)}  # base, backward
LAYER = ("q_proj", "k_proj", "k_proj", "q_proj", "gate_proj", "gate_proj", "down_proj")


class TrainingConf(FigureConf):
    parts: list[Literal["q_proj", "k_proj", "gate_proj", "down_proj", "layer"]]
    adapters: Counts
    tokens: Counts  # of each adapter
    most_rows: Count  # larger batches are left out


class TrainingTogether(Experiment):
    """Latencies per part and adapters (the panels), tokens of each (seq_len) and system."""

    name, figure, order, conf = "ext_training", "ext training", 297, TrainingConf
    reads, passes = ("model", "adapters.ranks", *PROTOCOL), 1
    differing, drawn_by = ("system",), "extensions.draw_training"

    def points(self, cfg: Config) -> list[Point]:
        figure, name, settings = cast(TrainingConf, cfg.figure), cfg.model.name, model_settings(cfg.model)
        grid = product(figure.parts, cfg.adapters.ranks, figure.adapters, figure.tokens, cfg.system.names)
        return [
            Point(f"{name}, {part}, adapters: {adapters}", system, "", name, adapters, tokens, rank, settings)
            for part, rank, adapters, tokens, system in grid
            if adapters * tokens <= figure.most_rows
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        import torch

        from experiments.benches.operators import copies, grouped_mm_available, microseconds
        from experiments.benches.training import Training

        device, one = cfg.hardware.device, points[0]
        like = torch.empty(0, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
        shapes, numbers = _shapes(cfg.model, one.panel), cast(Any, (one.batch_size, one.seq_len, one.rank))
        count = copies(cfg, sum(k * n for k, n in shapes) * like.itemsize)
        batches = [[Training(k, n, numbers, like, seed) for k, n in shapes] for seed in range(count)]
        widths = {one.rank, *chain(*shapes)}
        has_grouped, calls = all(grouped_mm_available(device, like.dtype, cast(int, width)) for width in widths), {}
        for system in [point.system for point in points if has_grouped or point.system != "grouped_mm"]:
            for part in batches[0] if system in ("grouped_mm", "SGMV") else ():
                part.check(system)
            for metric in KINDS if system != "one by one" else ["latency"]:
                how = system, *KINDS[metric]
                calls[system, metric] = [lambda b=b, how=how: [part.run(*how) for part in b] for b in batches]
        samples = microseconds(cfg, calls)
        readings: dict[str, list[Reading]] = {point.system: [] for point in points}
        for (system, metric), found in samples.items():
            readings[system] += sampled(metric, found, "us")
            if metric == "lora_forward":
                backward = median(samples[system, "lora_latency"]) - median(found)
                readings[system].append(Reading("lora_backward", backward, "us"))
        return [readings[point.system] for point in points]


def _shapes(model: ModelConf, panel: str) -> list[tuple[int, int]]:
    """Return K and N of the projections of a panel."""
    hidden, inner, part = model.hidden_size, model.intermediate_size, panel.split(", ")[1]
    kv = hidden // model.num_attention_heads * model.num_key_value_heads
    widths = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "gate_proj": (hidden, inner)}
    return [widths.get(name, (inner, hidden)) for name in (LAYER if part == "layer" else [part])]


EXPERIMENT = main(TrainingTogether, __name__)
