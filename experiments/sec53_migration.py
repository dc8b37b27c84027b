"""Section 5.3: migrating a request by computing its keys and values again, against copying them.

Claim: Punica migrates a request by adding it to the other GPU as a new one with prompt plus generated tokens, whose
prefill recomputes the KV cache; the paper calls that simple and cheap enough, without numbers.
Expected shape: both grow in proportion to the context. Recomputation wins below `break_even_bandwidth`, and costs a
batch `decode_steps`: its time over a decode step of a full batch at this context, each request with an adapter.

    recompute   a step of the engine with the request's tokens as a prompt and nothing else
    copy        of its scattered blocks into another cache on the same device: gather, scatter
    copy_host   gather, page-locked host memory, the device again, scatter (GPU only)
    copy_peer   gather, to the next GPU, scatter (two GPUs)
    ethernet 25G, ...   bytes over a datasheet's bandwidth (`figure.links_gb_s`): computed, rows of kind `datasheet`

First, a copy has to arrive bit for bit, and a prefill has to give the keys and values of prefill and decode.

Cost at scale=laptop: about 20 s on two cores, 3 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, cast

from pydantic import PositiveFloat

from experiments.harness import PROTOCOL, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Counts
from experiments.measure import environment

if TYPE_CHECKING:
    from experiments.benches.migration import Migration, Moves

PEER_COPY, RECOMPUTED = "copy_peer", "recompute"
LATENCY = "migration_latency"


class MigrationConf(FigureConf):
    contexts: Counts
    links_gb_s: dict[str, PositiveFloat]


class MigrationExperiment(Experiment):
    """Time to move a request per context and way."""

    name, figure, order, conf = "sec53_migration", "text 5.3", 66, MigrationConf
    reads = ("model", "adapters.ranks", "scale.model_batch_sizes", *PROTOCOL)
    clock, differing, drawn_by = "host_clock", ("system",), "moves.draw_migration"

    def points(self, cfg: Config) -> list[Point]:
        figure, here = cast(MigrationConf, cfg.figure), self.known_systems(cfg)
        if len(environment.gpu_query("index")) < 2:
            here = [name for name in here if name != PEER_COPY]
        if not any(name in here for name in cfg.system.names):
            raise ConfigError(f"system={PEER_COPY} needs two GPUs: choose system=all or one of {', '.join(here)}")
        settings = {"model": model_settings(cfg.model), "links": dict(figure.links_gb_s)}
        batch = max(cfg.scale.model_batch_sizes)
        return [
            Point("", system, "", cfg.model.name, batch, context, rank, settings)
            for rank, context, system in product(cfg.adapters.ranks, figure.contexts, cfg.system.names)
            if system in here
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.operators import protocol

        context = cast(int, points[0].seq_len)
        links = cast(MigrationConf, cfg.figure).links_gb_s
        timed = [point.system for point in points if point.system not in links]
        moves = self._bench(cfg, cast(int, points[0].rank)).measured(context, timed, protocol(cfg))
        return [
            _over(links[point.system], moves.nbytes) if point.system in links else _readings(point.system, moves)
            for point in points
        ]

    def _bench(self, cfg: Config, rank: int) -> Migration:
        from experiments.benches.migration import Migration

        longest = max(cast(MigrationConf, cfg.figure).contexts)
        batch, device = max(cfg.scale.model_batch_sizes), cfg.hardware.device
        return self.kept((cfg.model.name, rank), lambda: Migration(cfg.model, rank, batch, longest, device))


def _readings(system: str, moves: Moves) -> list[Reading]:
    seconds = moves.seconds[system]
    found = [*sampled(LATENCY, [1e3 * value for value in seconds], "ms"), Reading("bytes", moves.nbytes, "byte")]
    bandwidth = moves.nbytes / median(seconds) / 1e9
    if system != RECOMPUTED:
        return [*found, Reading("bandwidth", bandwidth, "GB/s")]
    found += sampled("decode_step_latency", [1e3 * value for value in moves.decode], "ms")
    found.append(Reading("decode_steps", median(seconds) / median(moves.decode), "ratio"))
    return [*found, Reading("break_even_bandwidth", bandwidth, "GB/s")]


def _over(gb_per_second: float, nbytes: int) -> list[Reading]:
    return [
        Reading(LATENCY, nbytes / gb_per_second / 1e6, "ms", kind="datasheet"),
        Reading("bytes", nbytes, "byte", kind="datasheet"),
        Reading("bandwidth", gb_per_second, "GB/s", kind="datasheet"),
    ]


EXPERIMENT = main(MigrationExperiment, __name__)
