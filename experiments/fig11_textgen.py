"""Figure 11: throughput of serving systems when requests ask for many adapters.

Claim (section 7.2): Punica keeps its throughput whatever the popularity, and is 12 times faster than the best baseline
where requests differ (Distinct), because a baseline's batch holds one adapter and so, nearly always, one request.
Expected shape: Punica flat; baselines low on Distinct, Uniform and Skewed, close to or above Punica on Identical.

The stream is the paper's: the released generator with its seed, `scale.requests` requests that all wait from the start
(lengths are scaled to `scale.max_len`). It takes 31 000 steps at batch 32 and a million at batch 1, so what is timed
are windows of it (`experiments.systems.windows`): the scheduler is replayed without a model, runs of consecutive steps
are drawn whose tokens per step, requests and contexts agree with the stream's (rows `tokens_per_step` and
`stream_tokens_per_step`, `mean_context` and `stream_mean_context`), and a system runs them as it would there: with
prefills, joins, departures, adapter loads, over a KV cache full of noise. Every pass takes another draw, and goes over
all systems and workloads, so that a slow minute cannot fall on one column. `figure.whole_stream=true` serves the stream
to its end instead and says what windows predict (choose a short one: `scale.requests=64 scale.passes=1`).

Throughput counts prompt and new tokens (D13); `new_token_throughput` only new ones. The paper's vLLM,
FasterTransformer and DeepSpeed are policy baselines on our engine, without LoRA (`experiments.systems`); Hugging Face
with PEFT is the real thing. All systems have the same matrix product. Switching adapters is charged to Punica and not
to the baselines. `punica_last_admitted` is Punica with the released harness's index rule (D04).

Before timing, the tokens of a few requests are compared with Hugging Face's, one request at a time; this also warms up.
Where all systems involved were measured, ratio rows follow, per draw: speed-up over the best baseline, and over PEFT's
mixed batches split into `operator_gain` (punica_static / hf_peft_mixed) and `continuous_batching_gain` (punica /
punica_static).

Cost at scale=laptop: about 6 minutes on two cores, 6 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from omegaconf import MISSING

from experiments.harness import CheckFailed, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings
from experiments.harness.settings import folders
from experiments.harness.source import source_of
from punica.measure.records import Row, read_rows

if TYPE_CHECKING:
    from experiments.systems import StreamBench

RATIOS = "ratios"
BASELINES = ("hf_peft", "static_batching", "continuous_batching")
"""One adapter per batch; PEFT's mixed batches are compared on their own."""
WITHOUT_LORA = ("static_batching", "continuous_batching")
LENGTHS = ("released", "stated")
DRAWS_OF_A_WHOLE = 6
"""Draws that predict a whole stream, half of them timed before it and half after."""


@dataclass
class TextgenConf(FigureConf):
    """Figure 11: the stream, its windows, and what is checked before a system is timed."""

    lengths: str = MISSING  # released or stated, see systems.stream
    pieces: int = MISSING  # runs of steps in a draw ...
    steps: int = MISSING  # ... and steps in a run
    check_requests: int = MISSING
    check_tokens: int = MISSING
    whole_stream: bool = False


class Fig11(Experiment):
    """Throughput per model (the panels), popularity and system."""

    name, figure, order, conf = "fig11_textgen", "11", 70, TextgenConf
    reads = (
        "model", "workload", "engine", "adapters.ranks", "adapters.alpha", "adapters.seed", "scale.requests",
        "scale.max_len",
    )  # fmt: skip
    clock, drawn_by = "host_clock", "serving_bars.draw_serving"

    def points(self, cfg: Config) -> list[Point]:
        _check_sizes(cfg)
        whole = cast(TextgenConf, cfg.figure).whole_stream
        panel, settings = f"{cfg.model.paper_name} Model{', whole stream' if whole else ''}", _settings(cfg)
        limit, points = cfg.engine.max_batch_size, []
        for workload in cfg.workload.names:
            for rank in cfg.adapters.ranks:
                for system in cfg.system.names:
                    used = None if system in WITHOUT_LORA else rank
                    points.append(Point(panel, system, workload, cfg.model.name, limit, None, used, settings))
                if not whole and {"punica", "punica_static", "hf_peft_mixed", *BASELINES} <= set(cfg.system.names):
                    ratio_panel = f"{panel} {RATIOS}"
                    points.append(Point(ratio_panel, "punica", workload, cfg.model.name, limit, None, rank, settings))
        return points

    def is_derived(self, point: Point) -> bool:
        return point.panel.endswith(RATIOS)

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if self.is_derived(point):
            return self._ratios(cfg, point)
        bench = self._bench(cfg, point)
        if cast(TextgenConf, cfg.figure).whole_stream:
            return whole_stream(bench, point.system, point.workload)
        return bench.measure(point.system, point.workload, point.repeat)

    def _bench(self, cfg: Config, point: Point) -> StreamBench:
        """Systems, adapters and backbone, built once per rank; systems without LoRA take what is there."""
        from experiments.systems import Limits, StreamBench, StreamConf, World

        figure, scale, engine, adapters = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine, cfg.adapters
        rank = point.rank or adapters.ranks[0]
        key = (cfg.model.name, rank, engine.max_batch_size, scale.max_len, figure.lengths, cfg.hardware.device)
        limits = Limits(engine.max_batch_size, scale.max_len, engine.block_size, engine.num_blocks)
        draws = DRAWS_OF_A_WHOLE if figure.whole_stream else scale.passes
        stream = StreamConf(figure.lengths, scale.requests, scale.max_len, draws, figure.pieces, figure.steps)

        def build() -> StreamBench:
            world = World(cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
            return StreamBench(world, stream, figure.check_requests, figure.check_tokens)

        return self.kept(key, build)

    def _ratios(self, cfg: Config, point: Point) -> list[Reading]:
        """From the rows on disk of the same repeat. `CheckFailed` when one is missing because its check failed."""
        rows = read_rows(folders(cfg).fresh_rows / f"{self.name}.csv")
        panel, source = point.panel.removesuffix(f" {RATIOS}"), source_of(self)
        cell = (panel, point.workload, point.model, point.batch_size, cfg.scale.name, cfg.timer.name, point.repeat)

        def belongs(row: Row) -> bool:
            mine = (row.panel, row.workload, row.model, row.batch_size, row.scale, row.timer, row.repeat)
            return mine == cell and row.rank in (None, point.rank) and row.source_hash == source

        found = {row.system: row for row in rows if row.metric == "throughput" and belongs(row)}
        if missing := [name for name in cfg.system.names if name not in found]:
            raise CheckFailed(f"no throughput of {', '.join(missing)} to compare with; see the messages above")
        disturbed = any(row.disturbed for row in found.values())
        return ratios({name: row.value for name, row in found.items()}, disturbed)


def ratios(throughput: Mapping[str, float], disturbed: bool | None = None) -> list[Reading]:
    """What Punica gains, from the throughput of each system on one workload."""
    punica, static, mixed = (throughput[name] for name in ("punica", "punica_static", "hf_peft_mixed"))
    found = {
        "speedup_over_best_baseline": punica / max(throughput[name] for name in BASELINES),
        "speedup_over_hf_peft_mixed": punica / mixed,
        "operator_gain": static / mixed,
        "continuous_batching_gain": punica / static,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in found.items()]


def whole_stream(bench: StreamBench, system: str, workload: str) -> list[Reading]:
    """The stream served to its end, between two halves of the windows that predict it."""
    half = DRAWS_OF_A_WHOLE // 2
    predicted = [_throughput(bench.measure(system, workload, draw)) for draw in range(half)]
    served = bench.serve_whole(system, workload)
    predicted += [_throughput(bench.measure(system, workload, draw)) for draw in range(half, DRAWS_OF_A_WHOLE)]
    mean = sum(predicted) / len(predicted)
    return [
        Reading("stream_throughput", served.throughput, "token/s"),
        Reading("predicted_throughput", mean, "token/s"),
        Reading("prediction_over_stream", mean / served.throughput, "ratio"),
        Reading("stream_mean_batch_size", (served.rows - served.idle_rows) / served.steps, "requests"),
        Reading("stream_requests", len(served.jobs), "requests", "count"),
        Reading("stream_steps", served.steps, "steps", "count"),
    ]


def _throughput(readings: list[Reading]) -> float:
    return next(reading.value for reading in readings if reading.metric == "throughput")


def _settings(cfg: Config) -> dict[str, Any]:
    """What decides the numbers beside the columns of a point."""
    figure, scale, engine = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine
    return {
        "model": model_settings(cfg.model),
        "stream": {"lengths": figure.lengths, "requests": scale.requests, "max_len": scale.max_len},
        "windows": {"pieces": figure.pieces, "steps": figure.steps},
        "engine": {"block_size": engine.block_size, "num_blocks": engine.num_blocks},
        "adapters": {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed},
        "check": [figure.check_requests, figure.check_tokens],
    }


def _check_sizes(cfg: Config) -> None:
    """Raise `ConfigError` for unknown lengths and for a stream that the model or the KV pool cannot hold."""
    scale, engine, positions = cfg.scale, cfg.engine, cfg.model.max_position_embeddings
    lengths = cast(TextgenConf, cfg.figure).lengths
    if lengths not in LENGTHS:
        raise ConfigError(f"figure.lengths={lengths!r} must be one of {', '.join(LENGTHS)}: choose {LENGTHS[0]}")
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
