"""Extension: the paper's step, one prompt and many decodes in one batch, by one launch for all of them.

The paper's engine joins one prefill to all running decodes, so that an operator meets one long segment and many of one
row; the paper times SGMV on decodes alone (Figures 7 to 9). Claim: one call for the whole step costs no more than the
prompt and the decodes apart, at any length of the prompt. The long segment needs large tiles, the short ones small
ones. Expected shape: SGMV at or below `apart`, nearest to it where one part dominates; a loop over adapters
pays for 31 decodes whatever the prompt; on a GPU the floor of the bytes comes nearer as the prompt grows. On a CPU,
where a call costs little beside its products, SGMV and `apart` are close together.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, rank 16, 32 requests of 32 adapters, one of them a prompt; every system
after a check against the reference, interleaved. `SGMV` and `apart` are what a layer calls: the device's wrapper at its
defaults, 64 slots, the table of true ranks. Rows also carry the bytes that must move, by arithmetic, and, where
the bandwidth of the hardware is known (`conf/hardware/`), the time that they take.

Cost at scale=laptop: about 10 seconds on two cores, 1.5 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from omegaconf import MISSING

from experiments.benches.operator_conf import OperatorConf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import PROTOCOL, Config, Point, Reading, main, sampled

if TYPE_CHECKING:
    from punica.measure.timing import Call


@dataclass
class PaperStepConf(OperatorConf):
    """`batch_sizes`: requests of a step, one of them a prompt; `prompts`: its rows."""

    prompts: list[int] = MISSING


class PaperStep(OperatorExperiment):
    """Latency of each system per number of requests (the panels) and length of the prompt."""

    name, figure, order, conf = "ext_paper_step", "ext paper step", 230, PaperStepConf
    reads = ("adapters.ranks", "adapters.slots", *PROTOCOL)
    drawn_by = "extensions.draw_paper_step"
    defaults = {"adapters": "r16_slots64"}  # noqa: RUF012 (never written)

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(PaperStepConf, cfg.figure)
        settings = {**self.settings(cfg), "bandwidth_gb_s": cfg.hardware.bandwidth_gb_s}
        return [
            Point(f"{requests} requests", system, "", "", requests, prompt, rank, settings)
            for rank in cfg.adapters.ranks
            for requests in figure.batch_sizes
            for prompt in figure.prompts
            for system in cfg.system.names
        ]

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        from experiments.benches import operators, paper_step

        return operators.prepare_checked(paper_step.steps(cfg, *_shape(point)), point.system)

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        from experiments.benches.paper_step import bytes_moved

        moved, bandwidth = bytes_moved(cfg, *_shape(point)), cfg.hardware.bandwidth_gb_s
        found = [*sampled("latency", samples, "us"), Reading("bytes_moved", moved, "byte")]
        return [*found, Reading("floor", moved / bandwidth / 1e3, "us")] if bandwidth else found


def _shape(point: Point) -> tuple[int, int, int]:
    """Requests, rows of the prompt, rank."""
    return cast(tuple[int, int, int], (point.batch_size, point.seq_len, point.rank))


EXPERIMENT = PaperStep()

if __name__ == "__main__":
    main(EXPERIMENT)
