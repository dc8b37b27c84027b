"""Extension: the price of determinism. Needs a GPU: on a CPU there is one operator, and it is deterministic.

Not in the paper. Claims: SGMV without atomic adds gives the same bits in every run and is not slower than split-K with
atomic adds, which needs a zero-fill; a form that also keeps a row's bits whatever else is in its batch
(`batch_invariant`) costs more, and this says how much. Expected shape: `deterministic` lowest everywhere,
`batch invariant` at or above it, bits that change between runs only for atomics that split K. Bits may depend on the
batch for `deterministic` too, which chooses its kernel by shape.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, rank 16, interleaved, every variant (`benches.determinism`) after a
check against the reference. Measured beside it per variant, popularity and batch: the share of outputs whose
bits differ in any of `figure.runs` runs of one call, and between a row in its batch and alone. Differences are the
largest, absolute and in units in the last place.

Cost at scale=laptop: minutes on a GPU, where kernels are compiled on first use; 4 GB. Nothing on a CPU.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tqdm import tqdm

from experiments.benches.operator_conf import OperatorConf, operator_conf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import Config, Point, Reading, main, sampled
from experiments.harness.schema import low


@dataclass
class DeterminismConf(OperatorConf):
    """`runs`: how often one call is repeated to compare its bits."""

    runs: int = low(2)


class Determinism(OperatorExperiment):
    """Latency and bits of each variant per popularity (the panels) and batch."""

    name, figure, order, conf = "ext_determinism", "ext determinism", 220, DeterminismConf
    drawn_by = "extensions.draw_determinism"

    def points(self, cfg: Config) -> list[Point]:
        if cfg.hardware.device == "cpu":
            text = "nothing to measure on a CPU, whose one operator is deterministic; it needs a GPU"
            tqdm.write(f"{self.name}: {text}", file=sys.stderr)
            return []
        return super().points(cfg)

    def settings(self, cfg: Config) -> dict[str, Any]:
        return {**super().settings(cfg), "runs": cast(DeterminismConf, cfg.figure).runs}

    def samples(self, cfg: Config, points: Sequence[Point]) -> list[list[float]]:
        import experiments.benches.determinism  # noqa: F401  (registers the variants)

        return super().samples(cfg, points)

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        from experiments.benches.determinism import between_runs, from_row_alone
        from experiments.benches.operators import problems

        figure = cast(DeterminismConf, operator_conf(cfg))
        batch = problems(cfg, point.workload, cast(int, point.batch_size), cast(int, point.rank))[0]
        runs, alone = between_runs(batch, point.system, figure.runs), from_row_alone(batch, point.system)
        found = sampled("latency", samples, "us")
        for where, bits in (("between_runs", runs), ("from_row_alone", alone)):
            found.append(Reading(f"outputs_differing_{where}", bits.share, "share"))
            found.append(Reading(f"max_difference_{where}", bits.absolute, "1"))
            found.append(Reading(f"max_ulp_{where}", bits.ulp, "ulp"))
        return found


EXPERIMENT = Determinism()

if __name__ == "__main__":
    main(EXPERIMENT)
