"""Extension: our server over HTTP beside the engine that it serves, on the same machine in one run.

Claim: none of the paper's, whose frontend is not measured. Expected shape: the server's throughput is that of its
engine, since requests are read and tokens written while the device computes.

Server and engine alone are processes of their own, one at a time and in turns, and have one command line, thus the same
sizes; so they have the same checkpoint of random weights, adapters and requests: prompts of token ids with the lengths
of chats (those of `ext_today`), greedy, to their whole length. The text of `check` requests, with an adapter each and
without, must be the same from both, else there are no rows.

Panels, for each popularity:

    `in_flight` in flight    `punica_engine` keeps so many requests in its queue and batch; the client of
                    `punica_server` sends the next one when one ends. `output_throughput`, `request_rate`, and of the
                    server `throughput_over_engine`, the ratio to the engine of the same repeat
    load N %        the server with Poisson arrivals, at this part of its request rate above: `offered_rate`

Rows of the server have the metrics of `ext_server`, among them `time_to_first_token_p99` (of 100 requests or more) and
`client_is_bottleneck`. The client is this process.

    python -m experiments.ext_own_server scale=gpu scale.tries=0

Cost: at scale=gpu with Llama-2 7B on an H200, expected: nine minutes for three repeats; 25 GB of disk for temporary
files. On a CPU only scale=smoke, that it runs. Needs the extra `serve`; without it nothing is measured, and that is
said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main
from experiments.harness.on_disk import givers_first, value_on_disk
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts
from experiments.workload import popularity

if TYPE_CHECKING:
    from experiments.own_server.bench import OwnBench
    from experiments.own_server.stream import Stream

ENGINE, SERVER = "punica_engine", "punica_server"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""


class OwnServerConf(FigureConf):
    """Sizes of server and engine, the stream, and the seconds of a point."""

    adapters: Count
    batch_size: Count
    in_flight: Count  # requests that saturate: more than a batch
    load: Count  # percent of the saturated rate
    requests: Count  # different ones of the stream
    lengths: Counts  # mean prompt and output
    warm: float
    seconds: float
    drain: float
    check: Counts  # requests and new tokens of each
    sizes: dict[str, Any]  # what depends on the scale


class OwnServer(Experiment):
    """Throughput and waits by panel, popularity and system."""

    name, figure, order, conf = "ext_own_server", "ext own server", 301, OwnServerConf
    reads = ("model", "workload", "adapters.ranks", "adapters.seed")
    clock, drawn_by = "host_clock", ""

    def points(self, cfg: Config) -> list[Point]:
        check(cfg)
        reason = ""
        if cfg.hardware.device == "cpu" and cfg.scale.name != "smoke":
            reason = "a model for a CPU takes the cores that the server needs (scale=smoke tries the code)"
        elif absent := [name for name in PACKAGES if find_spec(name) is None]:
            reason = f"{', '.join(absent)} missing: pip install 'punica[serve]'"
        if reason:
            tqdm.write(f"{self.name}: nothing is measured: {reason}", file=sys.stderr)
            return []
        return [
            _point(cfg, panel, system, workload)
            for workload in cfg.workload.names
            for panel, system in ((_saturated(cfg), ENGINE), (_saturated(cfg), SERVER), (_load(cfg), SERVER))
            if system in cfg.system.names
        ]

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone: the engine, the saturated server, the server under load, which need each other's rates."""
        return givers_first(points, lambda point: (point.workload, point.panel.startswith("load"), point.system))

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.http_load.readings import run_readings
        from experiments.own_server.bench import OwnBench

        figure = cast(OwnServerConf, cfg.figure)
        bench: OwnBench = self.kept(_settings(cfg), lambda: OwnBench(
            cfg.model, cfg.hardware.device, cfg.hardware.threads or 1, cfg.adapters.ranks[0], cfg.adapters.seed,
            _sizes(cfg),
        ))  # fmt: skip
        stream = _stream(cfg, point, bench)
        if point.system == ENGINE:
            found = bench.engine(stream)
            return [
                Reading("output_throughput", found["output_throughput"], "token/s"),
                Reading("request_rate", found["request_rate"], "request/s"),
            ]
        if point.panel == _saturated(cfg):
            alone = self._of(cfg, point, ENGINE, "output_throughput")
            alone = bench.engine(stream)["output_throughput"] if alone is None else alone
            readings = run_readings(bench.saturated(stream))
            ratio = next(one.value for one in readings if one.metric == "output_throughput") / alone
            return [*readings, Reading("throughput_over_engine", ratio, "ratio")]
        most = self._of(cfg, point, SERVER, "request_rate")
        if most is None:
            readings = run_readings(bench.saturated(stream))
            most = next(one.value for one in readings if one.metric == "request_rate")
        rate = most * figure.load / 100
        return [Reading("offered_rate", rate, "request/s"), *run_readings(bench.loaded(stream, rate))]

    def release(self) -> None:
        """End the server."""
        bench = cast("OwnBench | None", self._kept[1])
        if bench is not None:
            bench.close()
        super().release()

    def _of(self, cfg: Config, point: Point, system: str, metric: str) -> float | None:
        """Return a number of the saturated `system` in the repeat of `point`; None where it was not measured."""
        asked = replace(_point(cfg, _saturated(cfg), system, point.workload), repeat=point.repeat)
        return value_on_disk(self, cfg, asked, metric)


def check(cfg: Config) -> None:
    """`ConfigError` for sizes that do not fit each other."""
    figure = cast(OwnServerConf, cfg.figure)
    if figure.in_flight < figure.batch_size:
        raise ConfigError(
            f"figure.in_flight={figure.in_flight} must be at least figure.batch_size={figure.batch_size}: fewer "
            "requests do not saturate the engine"
        )
    if not 0 < figure.load < 100:
        raise ConfigError(f"figure.load={figure.load} must be in (0, 100), percent of the saturated rate")
    if figure.seconds <= 0 or min(figure.warm, figure.drain) < 0:
        raise ConfigError(
            f"figure.seconds={figure.seconds} must be above 0, figure.warm={figure.warm} and figure.drain="
            f"{figure.drain} must be 0 or more"
        )
    named = [popularity(name).number_of_adapters(figure.requests) for name in cfg.workload.names]
    needed = max(figure.check[0], *named)
    if needed > figure.adapters:
        raise ConfigError(
            f"figure.adapters={figure.adapters} must be at least {needed}: the popularities (workload=) of "
            f"figure.requests={figure.requests} requests, or figure.check, have so many"
        )
    longest, positions = _sizes(cfg)["max_model_len"], cfg.model.max_position_embeddings
    if longest > positions:
        raise ConfigError(
            f"requests of up to {longest} tokens (figure.lengths) are above the positions of {cfg.model.name}, "
            f"{positions}: choose shorter ones"
        )


def _sizes(cfg: Config) -> dict[str, Any]:
    figure = cast(OwnServerConf, cfg.figure)
    names = "adapters", "batch_size", "in_flight", "lengths", "warm", "seconds", "drain", "check"
    prompt, new = figure.lengths
    longest = 4 * prompt + max(round(1.6 * new), figure.check[1]) + 1  # see `stream_lengths`
    return {**{name: getattr(figure, name) for name in names}, "max_model_len": -(-longest // 16) * 16}


def _stream(cfg: Config, point: Point, bench: OwnBench) -> Stream:
    from experiments.own_server.stream import Stream

    figure, seed = cast(OwnServerConf, cfg.figure), cfg.adapters.seed + point.repeat
    return Stream(point.workload, figure.requests, figure.lengths, cfg.model.vocab_size, bench.names, seed)


def _saturated(cfg: Config) -> str:
    return f"{cast(OwnServerConf, cfg.figure).in_flight} in flight"


def _load(cfg: Config) -> str:
    return f"load {cast(OwnServerConf, cfg.figure).load} %"


def _point(cfg: Config, panel: str, system: str, workload: str) -> Point:
    figure, rank = cast(OwnServerConf, cfg.figure), cfg.adapters.ranks[0]
    return Point(panel, system, workload, cfg.model.name, figure.batch_size, None, rank, _settings(cfg))


def _settings(cfg: Config) -> dict[str, Any]:
    requests = cast(OwnServerConf, cfg.figure).requests
    return {
        "model": model_settings(cfg.model), "sizes": _sizes(cfg), "requests": requests, "seed": cfg.adapters.seed,
    }  # fmt: skip


EXPERIMENT = OwnServer()

if __name__ == "__main__":
    main(EXPERIMENT)
