"""Extension: throughput *and* latency of requests that arrive by the clock, as a Poisson process (an open loop).

Claim: where the best baseline saturates, Punica is far from it, and its users wait a few steps. Expected shape:
latencies flat up to a knee and steep behind it; the baselines' knee is at a fraction of Punica's rate. The paper's rule
of one prefill per step bounds what a step costs those who decode, and queues bursts; without the limit (`punica_many`)
first tokens come sooner and single gaps between tokens have the longer tail.

A system's rates are parts (`loads`) of its own capacity, which each repeat measures first (panel `capacity`). `punica`
and `punica_many` are also loaded with the rate at which the better baseline saturates (panel `baseline capacity`).

    time_to_first_token, time_per_output_token, request_latency: from the time at which the request should arrive to
                  the end of the step; median, p10, p90 and _p95, _max and, of 100 samples or more, _p99
    inter_token_latency: of every gap between two tokens of a request; steps_to_first_token: in steps
    throughput, busy: of the measured time, how much of it the engine stepped
    requests, unfinished, lost, doubled, starved: of those who arrived in it; a lost one costs the point its rows
    ttft_bound:   in panel `baseline capacity`: five decode steps and the step of a prompt; ttft_p99_over_bound

Lengths are those that the paper states (D01), scaled to `max_len`. Baselines run without LoRA, and switching their
adapter costs nothing. Cost at scale=laptop: about 60 seconds on two cores, 3 GB. On an H200 a command measures one
repeat of what it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from experiments.facts.systems import without_lora
from experiments.fig11_textgen import check_length
from experiments.harness import Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.points import model_settings
from experiments.harness.resume import row_on_disk
from experiments.harness.schema import Count, Counts, Lengths, Seconds
from experiments.workload.arrivals import Span

if TYPE_CHECKING:
    from experiments.systems.loaded import LoadBench
    from experiments.systems.stream import Job

CAPACITY, AT_BASELINE = "capacity", "baseline capacity"
WITHOUT_LORA = tuple(without_lora())
DECODE_STEPS = 5
"""Decode steps in the bound on Punica's p99 time to first token, beside the step of its own prompt."""


class ArrivalsConf(FigureConf):
    """The stream of requests that arrive by the clock, and the seconds of a point."""

    requests: Count  # different ones of the stream, which come again and again
    lengths: Lengths = "stated"  # D01: 101 new tokens on average at max_len 2048
    max_len: Count
    warm: Seconds
    seconds: Seconds  # of arrivals that are measured
    least: Seconds  # requests to be expected in them; where a rate is too low for that, they are more seconds
    longest: Seconds  # up to these, but for the baseline's capacity, whose p99 the claim is about
    drain: Seconds  # of patience with them

    @property
    def span(self) -> Span:
        return Span(self.warm, self.seconds, self.drain, self.least, self.longest)


class LoadConf(ArrivalsConf):
    loads: Counts  # rates as percent of a system's capacity


class LatencyUnderLoad(Experiment):
    """Latency by load (the panels), system and popularity."""

    name, figure, order, conf = "ext_latency_under_load", "ext latency under load", 280, LoadConf
    reads = ("model", "workload", "engine", "adapters.ranks", "adapters.alpha", "adapters.seed")
    clock, drawn_by = "host_clock", "load.draw_load"

    def points(self, cfg: Config) -> list[Point]:
        figure, names, points = cast(LoadConf, cfg.figure), cfg.system.names, []
        check_length(cfg, "figure.max_len", figure.max_len)
        compared = WITHOUT_LORA if set(names) - set(WITHOUT_LORA) else ()
        for workload in cfg.workload.names:
            points += [self._point(cfg, CAPACITY, name, workload) for name in dict.fromkeys((*names, *compared))]
            for system in names:
                panels = [f"load {percent} %" for percent in figure.loads]
                panels += [] if system in WITHOUT_LORA else [AT_BASELINE]
                points += [self._point(cfg, panel, system, workload) for panel in panels]
        return points

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone, and all capacities before the loads, whose rates they are."""
        return [[point] for point in sorted(points, key=lambda point: point.panel != CAPACITY)]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.systems import loaded, open_loop

        bench = self._bench(cfg)
        system, (jobs, span) = bench.system(point.system), self._stream(cfg, bench, point.workload)
        if point.panel == CAPACITY:
            return loaded.capacity_of(system, jobs, span.seconds)
        own = self._capacity(cfg, point, point.system)
        readings = [Reading("own_capacity", own, "request/s")]
        if point.panel == AT_BASELINE:
            rate, span = max(self._capacity(cfg, point, name) for name in WITHOUT_LORA), replace(span, longest=math.inf)
            readings.append(Reading("baseline_capacity", rate, "request/s"))
        else:
            rate = own * int(point.panel.split()[1]) / 100
        span = span.at(rate)
        trace = loaded.load(system, jobs, rate, span, cfg.adapters.seed + point.repeat)
        readings += [
            Reading("offered_rate", rate, "request/s"),
            Reading("load", rate / own, "share"),
            *open_loop.user_readings(open_loop.users_of(trace, span), trace),
            *open_loop.step_readings(trace, span),
        ]
        return readings + (bound(readings) if point.panel == AT_BASELINE else [])

    def _capacity(self, cfg: Config, point: Point, system: str) -> float:
        asked = replace(self._point(cfg, CAPACITY, system, point.workload), repeat=point.repeat)
        known = row_on_disk(self, cfg, asked, "capacity")
        return self.measure(cfg, asked)[0].value if known is None else known.value

    def _point(self, cfg: Config, panel: str, system: str, workload: str) -> Point:
        rank, settings = None if system in WITHOUT_LORA else cfg.adapters.ranks[0], settings_of(cfg)
        return Point(panel, system, workload, cfg.model.name, cfg.engine.max_batch_size, None, rank, settings)

    def _stream(self, cfg: Config, bench: LoadBench, workload: str) -> tuple[list[Job], Span]:
        return bench.jobs(workload), cast(LoadConf, cfg.figure).span

    def _bench(self, cfg: Config) -> LoadBench:
        from experiments.systems.loaded import LoadBench
        from experiments.systems.weights import Limits

        limits = Limits(cfg.engine.max_batch_size, cast(LoadConf, cfg.figure).max_len)
        key = (cfg.model.name, cfg.adapters.ranks[0], limits, cfg.hardware.device)
        return self.kept(key, lambda: LoadBench(cfg, limits))


def bound(readings: list[Reading]) -> list[Reading]:
    """The bound on the p99 of the first token, and p99 over it where there is one; nothing when no step decoded."""
    values = {reading.metric: reading.value for reading in readings}
    if not {"decode_step", "prefill_step"} <= set(values):
        return []
    limit = Reading("ttft_bound", DECODE_STEPS * values["decode_step"] + values["prefill_step"], "ms")
    tail = values.get("time_to_first_token_p99")
    return [limit] if tail is None else [limit, Reading("ttft_p99_over_bound", tail / limit.value, "ratio")]


def settings_of(cfg: Config) -> dict[str, Any]:
    """Return what decides the numbers of requests by the clock beside the columns of a point."""
    figure, adapters = cast(ArrivalsConf, cfg.figure), cfg.adapters
    return {
        "model": model_settings(cfg.model),
        "stream": [figure.lengths, figure.requests, figure.max_len],
        "seconds": [figure.warm, figure.seconds, figure.drain, figure.least, figure.longest],
        "adapters": [adapters.alpha, adapters.seed],
    }


EXPERIMENT = main(LatencyUnderLoad, __name__)
