"""Figure 11: throughput of serving systems when requests ask for many adapters.

Claim (section 7.2): Punica keeps its throughput whatever the popularity, and is 12 times faster than the best baseline
where requests differ (Distinct), because a baseline's batch holds one adapter and so, nearly always, one request.
Expected shape: Punica flat; baselines low on Distinct, Uniform and Skewed, close to or above Punica on Identical.

Timed: a stream of requests that all wait from the start, served to the end, once, as in the paper (released generator
with its seed, lengths scaled to `scale.max_len`, see `experiments.systems.stream`). Throughput counts prompt and new
tokens (D13); `new_token_throughput` only new ones. A system that would take more than `scale.max_steps` model
invocations serves the longest prefix of the stream within them (row `requests` says how many): on a laptop those are
the baselines at batch 1, whose speed is the same at every moment. The paper's vLLM, FasterTransformer and DeepSpeed are
policy baselines on our engine, without LoRA (`experiments.systems`); Hugging Face with PEFT is the real thing.
Switching adapters is charged to Punica and not to the baselines. `punica_last_admitted` is Punica with the released
harness's index rule (D04).

Before timing, tokens of a few requests are compared with Hugging Face's, one request at a time; this also warms up.
Where all systems involved were measured, ratio rows follow: speed-up over the best baseline, and over PEFT's mixed
batches split into `operator_gain` (punica_static / hf_peft_mixed) and `continuous_batching_gain` (punica /
punica_static).

Cost at scale=laptop: about 6 minutes on two cores, 3 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import MISSING

from experiments.harness import CheckFailed, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings
from experiments.harness.settings import folders
from experiments.harness.source import source_of
from punica.measure.records import read_rows

if TYPE_CHECKING:
    from experiments.systems import Served, World

RATIOS = "ratios"
BASELINES = ("hf_peft", "static_batching", "continuous_batching")
"""One adapter per batch; PEFT's mixed batches are compared on their own."""
WITHOUT_LORA = ("static_batching", "continuous_batching")


@dataclass
class TextgenConf(FigureConf):
    """Figure 11: what is checked before a system is timed."""

    check_requests: int = MISSING
    check_tokens: int = MISSING


class Fig11(Experiment):
    """Throughput per model (the panels), popularity and system."""

    name, figure, order, conf = "fig11_textgen", "11", 70, TextgenConf
    reads = (
        "model", "workload", "engine", "adapters.ranks", "adapters.alpha", "adapters.seed", "scale.requests",
        "scale.max_len", "scale.max_steps",
    )  # fmt: skip
    clock, drawn_by = "host_clock", "serving_bars.draw_serving"

    def points(self, cfg: Config) -> list[Point]:
        _check_sizes(cfg)
        panel, settings = f"{cfg.model.paper_name} Model", _settings(cfg)
        limit, points = cfg.engine.max_batch_size, []
        for workload in cfg.workload.names:
            for rank in cfg.adapters.ranks:
                for system in cfg.system.names:
                    used = None if system in WITHOUT_LORA else rank
                    points.append(Point(panel, system, workload, cfg.model.name, limit, None, used, settings))
                if {"punica", "punica_static", "hf_peft_mixed", *BASELINES} <= set(cfg.system.names):
                    ratio_panel = f"{panel} {RATIOS}"
                    points.append(Point(ratio_panel, "punica", workload, cfg.model.name, limit, None, rank, settings))
        return points

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if point.panel.endswith(RATIOS):
            return ratios(_throughputs(cfg, point))
        from experiments.systems import SYSTEMS, check_tokens, paper_stream, prefix_of_steps
        from experiments.systems.stream import shortened

        figure, scale = cast(TextgenConf, cfg.figure), cfg.scale
        jobs = paper_stream(point.workload, scale.requests, scale.max_len, cfg.model.vocab_size)
        system = SYSTEMS.get(point.system)(self._world(cfg, point))
        check_tokens(system, shortened(jobs, figure.check_requests, figure.check_tokens))
        limit = cfg.engine.max_batch_size
        return readings(system.serve(prefix_of_steps(jobs, system.admission, limit, scale.max_steps)))

    def _world(self, cfg: Config, point: Point) -> World:
        """Backbone and adapters, built once per rank; systems without LoRA take what is there."""
        from experiments.systems import Limits, World

        rank = point.rank or cfg.adapters.ranks[0]
        key = (cfg.model.name, rank, cfg.engine.max_batch_size, cfg.scale.max_len, cfg.hardware.device)
        engine, adapters = cfg.engine, cfg.adapters
        limits = Limits(engine.max_batch_size, cfg.scale.max_len, engine.block_size, engine.num_blocks)
        make = partial(World, cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
        return self.kept(key, make)


def readings(served: Served) -> list[Reading]:
    """The rows of one served stream."""
    total = served.prompt_tokens + served.new_tokens
    return [
        Reading("throughput", served.throughput, "token/s"),
        Reading("new_token_throughput", served.new_tokens / served.seconds, "token/s"),
        Reading("step_latency", 1e3 * served.seconds / served.steps, "ms"),
        Reading("mean_batch_size", served.mean_batch_size, "requests"),
        Reading("idle_share", served.idle_rows / served.rows, "ratio"),
        Reading("wall_time", served.seconds, "s"),
        *(Reading(f"{phase}_time", seconds, "s") for phase, seconds in served.phases.items()),
        Reading("requests", len(served.jobs), "requests", "count"),
        Reading("total_tokens", total, "tokens", "count"),
        Reading("new_tokens", served.new_tokens, "tokens", "count"),
        Reading("steps", served.steps, "steps", "count"),
    ]


def ratios(throughput: Mapping[str, float]) -> list[Reading]:
    """What Punica gains, from the throughput of each system on one workload."""
    punica, static, mixed = (throughput[name] for name in ("punica", "punica_static", "hf_peft_mixed"))
    found = {
        "speedup_over_best_baseline": punica / max(throughput[name] for name in BASELINES),
        "speedup_over_hf_peft_mixed": punica / mixed,
        "operator_gain": static / mixed,
        "continuous_batching_gain": punica / static,
    }
    return [Reading(name, value, "ratio") for name, value in found.items()]


def _throughputs(cfg: Config, point: Point) -> dict[str, float]:
    """Throughput by system on the workload of a ratio `point`, from the rows on disk. `CheckFailed` when one is missing
    because its check failed.
    """
    rows = read_rows(folders(cfg).fresh_rows / f"{EXPERIMENT.name}.csv")
    panel, source = point.panel.removesuffix(f" {RATIOS}"), source_of(EXPERIMENT)
    cell = (panel, point.workload, point.model, point.batch_size, cfg.scale.name, cfg.timer.name)
    found = {
        row.system: row.value
        for row in rows
        if row.metric == "throughput" and row.rank in (None, point.rank) and row.source_hash == source
        if (row.panel, row.workload, row.model, row.batch_size, row.scale, row.timer) == cell
    }
    if missing := [name for name in cfg.system.names if name not in found]:
        raise CheckFailed(f"no throughput of {', '.join(missing)} to compare with; see the messages above")
    return found


def _settings(cfg: Config) -> dict[str, Any]:
    """What decides the numbers beside the columns of a point."""
    figure, scale, engine = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine
    return {
        "model": model_settings(cfg.model),
        "stream": {"requests": scale.requests, "max_len": scale.max_len, "max_steps": scale.max_steps},
        # the words of the recorded rows, whose configuration this is part of
        "engine": {"page_size": engine.block_size, "num_pages": engine.num_blocks},
        "adapters": {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed},
        "check": [figure.check_requests, figure.check_tokens],
    }


def _check_sizes(cfg: Config) -> None:
    """Raise `ConfigError` for a stream that the model or the KV pool cannot hold."""
    scale, engine, positions = cfg.scale, cfg.engine, cfg.model.max_position_embeddings
    if not 4 <= scale.max_len <= positions:
        raise ConfigError(
            f"scale.max_len={scale.max_len} must lie in [4, {positions}]: room for a prompt and two new tokens, within "
            f"the positions of {cfg.model.name} (model.max_position_embeddings)"
        )
    needed = -(-scale.max_len // engine.block_size)
    if engine.num_blocks is not None and engine.num_blocks < needed:
        raise ConfigError(
            f"engine.num_blocks={engine.num_blocks} cannot hold one request of scale.max_len={scale.max_len} tokens: "
            f"choose engine.num_blocks={needed} or more, or null"
        )


EXPERIMENT = Fig11()

if __name__ == "__main__":
    main(EXPERIMENT)
