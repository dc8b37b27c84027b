"""Extension: the paper's step, one prompt and many decodes in one batch, by one launch for all of them.

Claim: one call for the whole step costs no more than the prompt and the decodes apart, at any length of the prompt.
Expected shape: SGMV at or below `apart`; a loop over adapters pays for 31 decodes; on a GPU the floor of the bytes
comes nearer as the prompt grows. Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, rank 16, 32 requests of 32 adapters,
interleaved, after a check. `SGMV` is one call of a layer, `apart` one for the prompt, then one for the decodes; `Loop`
has a product pair per adapter, `grouped_mm` is torch's. Bytes are arithmetic, and their time where the bandwidth is
known. Cost at scale=laptop: about 10 seconds on two cores, 1.5 GB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.benches.operator_lines import Operator
from experiments.harness import PROTOCOL, Config, Point, Reading, main, sampled
from experiments.harness.schema import Counts

if TYPE_CHECKING:
    from experiments.benches.operators import Problem


class PaperStepConf(OperatorConf):
    """`batch_sizes`: requests of a step, one of them a prompt; `prompts`: its rows."""

    prompts: Counts


class PaperStep(OperatorExperiment):
    """Latency of each system per number of requests (the panels) and length of the prompt."""

    name, figure, order, conf = "ext_paper_step", "ext paper step", 230, PaperStepConf
    reads = ("adapters.ranks", "adapters.slots", *PROTOCOL)
    drawn_by = "extensions.draw_paper_step"
    defaults = {"adapters": "r16_slots64"}

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

    def problems(self, cfg: Config, point: Point) -> list[Problem]:
        from experiments.benches.operators import copies, setup_operator

        count = copies(cfg, bytes_moved(cfg, point))
        return setup_operator(cfg, sizes_of(point), cast(int, point.rank), count)

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        moved, bandwidth = bytes_moved(cfg, point), cfg.hardware.bandwidth_gb_s
        found = [*sampled("latency", samples, "us"), Reading("bytes_moved", moved, "byte")]
        return [*found, Reading("floor", moved / bandwidth / 1e3, "us")] if bandwidth else found


def sizes_of(point: Point) -> tuple[int, ...]:
    """Rows of each adapter: the prompt's, then one for each of the other requests, all of different adapters."""
    return (cast(int, point.seq_len), *[1] * (cast(int, point.batch_size) - 1))


def bytes_moved(cfg: Config, point: Point) -> int:
    """Bytes that the step must move: A and B of its adapters, x [T, h1] read, y [T, h2] read and written."""
    figure = operator_conf(cfg)
    halves = Operator(figure.h1, (figure.h2,), cast(int, point.rank), sizes_of(point)).bytes()
    return halves * figure.dtype.bytes // 2


EXPERIMENT = PaperStep()

if __name__ == "__main__":
    main(EXPERIMENT)
