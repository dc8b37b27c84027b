"""Extension: adapters that continue what the base, or each other, has read: pipelines over one long context.

Claim: none of the paper's, whose adapters share no keys and values. An activated adapter (PEFT's
`alora_invocation_tokens`) changes nothing before its invocation, so its request takes the context's keys and values
from the prefix cache. Expected shape: first tokens after a switch of adapter at the cost of a few rows, whatever the
context; blocks of one context for all adapters.

    recompute           no prefix cache
    plain_lora_cached   a prefix cache, and LoRA on all tokens: its keys differ from the base's
    activated_cached    a prefix cache, and activated adapters

A pipeline: the base reads `seq_len` tokens, then `batch_size` adapters arrive at once, each with the context, its
invocation, 16 tokens, and 32 to generate. Contexts are drawn anew for each.

    first_token   of the adapters' turns, from arrival
    pipeline      from the context's arrival to the last token
    blocks        most in use while adapters run

Panels `trace` (with `figure.trace=FILE`, Mooncake's conversation trace, arXiv 2407.00079): `hit_rate` of the library's
cache with room for `seq_len` tokens, simulated. Each prompt draws its adapter by popularity, as where the turns of a
conversation go to different ones.

Weights are random and positions go beyond those that a model was made for, which changes no time. Cost at scale=laptop:
40 seconds on two cores, 1 GB; on an H200 three minutes, 100 GB (expected).
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts
from experiments.workload import drawn_adapters
from experiments.workload.traces import BLOCK_TOKENS, read_trace

SYSTEMS = ("recompute", "plain_lora_cached", "activated_cached")
TRACE = "trace"


class PrefixConf(FigureConf):
    contexts: Counts
    adapters: Counts
    pipelines: Count
    cache_tokens: Count  # of keys and values
    trace: Path | None = None  # a file of Mooncake's format
    trace_adapters: Count = 32
    trace_tokens: Counts = [262144, 1048576, 16777216]  # that the simulated caches have room for


class PrefixCache(Experiment):
    """First tokens, pipelines and blocks by adapters (the panels), context and system."""

    name, figure, order, conf = "ext_prefix_cache", "ext prefix cache", 295, PrefixConf
    reads = ("model", "workload", "adapters.ranks", "adapters.seed")
    clock, drawn_by = "host_clock", "extensions.draw_prefix_cache"

    def points(self, cfg: Config) -> list[Point]:
        figure, rank = cast(PrefixConf, cfg.figure), cfg.adapters.ranks[0]
        settings = {
            "model": model_settings(cfg.model), "seed": cfg.adapters.seed, "pipelines": figure.pipelines,
            "cache_tokens": figure.cache_tokens, "largest": [max(figure.contexts), max(figure.adapters)],
        }  # fmt: skip
        of_trace = {**_trace(figure), "seed": cfg.adapters.seed}
        traced = [
            Point(TRACE, system, workload, seq_len=tokens, settings=of_trace)
            for workload, tokens, system in product(cfg.workload.names, figure.trace_tokens, cfg.system.names)
            if figure.trace and system != "recompute"
        ]
        return traced + [
            Point(f"adapters: {adapters}", system, "", cfg.model.name, adapters, context, rank, settings)
            for adapters, context, system in product(figure.adapters, figure.contexts, cfg.system.names)
        ]

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone, one system after the other, since one engine exists at a time."""
        return [[point] for point in sorted(points, key=lambda point: SYSTEMS.index(point.system))]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        figure = cast(PrefixConf, cfg.figure)
        if point.panel == TRACE:
            return [_hits(figure, point)]
        from experiments.benches.pipelines import Pipelines

        adapters, context, drawn = cast(int, point.batch_size), cast(int, point.seq_len), cfg.adapters.seed
        sizes = tuple(figure.contexts), max(figure.adapters), cfg.adapters.ranks[0], drawn, figure.cache_tokens
        bench = self.kept((cfg.model.name, *sizes), lambda: Pipelines(cfg.model, cfg.hardware.device, *sizes))
        # no point finds the context of another in the cache that all points of a system share
        seed = drawn + 1000 * context + 10_000_000 * (point.repeat + 1000 * adapters)
        bench.check(point.system, context, adapters, seed)
        found = [bench.run(point.system, context, adapters, seed + turn) for turn in range(1, figure.pipelines + 1)]
        return [
            *sampled("first_token", [1e3 * seconds for turns in found for seconds in turns.first_tokens], "ms"),
            *sampled("pipeline", [1e3 * turns.seconds for turns in found], "ms"),
            Reading("blocks", max(turns.blocks for turns in found), "blocks"),
        ]


def _trace(figure: PrefixConf) -> dict[str, Any]:
    """Return what decides hits. `ConfigError`: the trace cannot be read."""
    if figure.trace is None:
        return {}
    try:
        content = figure.trace.read_bytes()
    except OSError as error:
        raise ConfigError(f"figure.trace={figure.trace} cannot be read ({error}): choose another, or none") from None
    return {"trace": hashlib.sha256(content).hexdigest()[:12], "adapters": figure.trace_adapters}


_prompts = lru_cache(maxsize=1)(partial(read_trace, form="mooncake"))  # the same for every point


def _hits(figure: PrefixConf, point: Point) -> Reading:
    from experiments.simulator.prefix_hits import hit_rate

    prompts = _prompts(cast(Path, figure.trace))
    adapters = drawn_adapters(point.workload, figure.trace_adapters, len(prompts), point.settings["seed"]).tolist()
    capacity = cast(int, point.seq_len) // BLOCK_TOKENS
    rate = hit_rate(prompts, adapters, capacity, activated=point.system == "activated_cached")
    return Reading("hit_rate", rate, "share", kind="simulated", cost_model="no time: blocks of a prefix cache")


EXPERIMENT = main(PrefixCache, __name__)
