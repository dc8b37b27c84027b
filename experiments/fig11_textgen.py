"""Figure 11: throughput of serving systems when requests ask for many adapters. Claim (section 7.2): Punica keeps its
throughput whatever the popularity, and is 12 times faster than the best baseline where requests differ (Distinct): a
baseline's batch holds one adapter and so, nearly always, one request. Expected shape: Punica flat; baselines low on
Distinct, Uniform and Skewed, close to or above Punica on Identical. The stream is the paper's: the released generator
with its seed, `scale.requests` requests that all wait from the start, lengths scaled to `scale.max_len`. Windows of it
are timed (`experiments.systems.windows`), another draw in every pass, over a KV cache full of noise, in random order.
`figure.whole_stream=true` serves the stream to its end and prints what windows predict beside it.
`figure.lengths=stated` has the 101 generated tokens per request that the paper prints (D01), a tenth of the released
generator's. Both have panels of their own, which no claim reads and no figure draws. Throughput counts prompt and new
tokens (D13). `continuous_batching` and `static_batching` are our engine without LoRA, one adapter per batch: the
policies of the paper's vLLM, and of its FasterTransformer and DeepSpeed, of which none was run. Hugging Face with PEFT
was. All systems have the same matrix product (on a GPU, PEFT's mixed batches torch's, which the host launches faster).
Switching adapters is charged to Punica and not to the baselines: `hf_peft` has its one adapter merged. On a GPU steps
are CUDA graphs, captured before the clock, but for `hf_peft_mixed`, whose host launches every kernel.
`punica_last_admitted` has the released harness's index rule (D04), and no bar. Before timing, logits of a few requests
of each workload are compared with Hugging Face's, and once for each system on our engine those of
`figure.whole_requests` up to `figure.whole_tokens` (`systems.check`). Ratio rows follow, per draw: over the best
baseline and PEFT's mixed batches, and across workloads. Cost at scale=laptop: about 5 minutes on two cores, 6 GB. At
scale=paper a command ends after 8 minutes, and the same command again continues (`conf/recording.yaml` has pieces); 7B
and 13B need 75 and 120 GB.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from experiments.facts.systems import STATED_LENGTHS, SYSTEMS, measured_baselines
from experiments.harness import CheckFailed, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings
from experiments.harness.resume import row_on_disk
from experiments.harness.schema import Count, Lengths
from experiments.measure.records import Row

if TYPE_CHECKING:
    from experiments.systems.bench import StreamBench, StreamConf
    from experiments.systems.weights import Limits

RATIOS, ACROSS = "ratios", "across workloads"
BACKBONE = "continuous_batching"


class TextgenConf(FigureConf):
    """Figure 11: the stream, its windows, and the checks before a system is timed."""

    lengths: Lengths
    pieces: Count  # runs of steps in a draw ...
    steps: Count  # ... and steps in a run ...
    slow_steps: Count  # ... and in one of a slow system
    check_requests: Count
    check_tokens: Count
    whole_requests: Count | None = None  # of those that are compared over whole sequences; none: none are
    whole_tokens: Count | None = None
    whole_stream: bool = False


class Fig11(Experiment):
    """Throughput per model (the panels), popularity and system."""

    name, figure, order = "fig11_textgen", "11", 70
    conf: ClassVar[type[FigureConf]] = TextgenConf
    reads = (
        "model", "workload", "engine", "adapters.ranks", "adapters.alpha", "adapters.seed", "scale.requests",
        "scale.max_len",
    )  # fmt: skip
    clock, drawn_by = "host_clock", "serving.draw_serving"

    def points(self, cfg: Config) -> list[Point]:
        check_sizes(cfg)
        systems, workloads = set(cfg.system.names), set(cfg.workload.names)
        windows = not cast(TextgenConf, cfg.figure).whole_stream
        compared = windows and {"punica", "punica_static", "hf_peft_mixed", *measured_baselines()} <= systems
        points = []
        for workload in cfg.workload.names:
            for rank in cfg.adapters.ranks:
                points += [self.point(cfg, name, workload, rank) for name in cfg.system.names]
                points += [self.point(cfg, "punica", workload, rank, f" {RATIOS}")] if compared else []
        if windows and {"punica", BACKBONE} <= systems and {"Distinct", "Identical"} <= workloads:
            across = f", {ACROSS} {RATIOS}"
            points += [self.point(cfg, "punica", "Distinct", rank, across) for rank in cfg.adapters.ranks]
        return points

    def point(self, cfg: Config, system: str, workload: str, rank: int, suffix: str = "") -> Point:
        """Build a point of the model's panel, which `suffix` ends; other streams and whole ones are other panels."""
        figure, scale, engine, facts = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine, SYSTEMS.get(system)
        stream = (STATED_LENGTHS if figure.lengths == "stated" else "") + (
            f", whole stream, {scale.requests} requests" if figure.whole_stream else ""
        )
        settings = {
            "model": model_settings(cfg.model),
            "stream": {"lengths": figure.lengths, "requests": scale.requests, "max_len": scale.max_len},
            "windows": {"pieces": figure.pieces, "steps": figure.slow_steps if facts.slow else figure.steps},
            "engine": {"block_size": engine.block_size, "num_blocks": engine.num_blocks},
            "adapters": {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed},
            "check": [figure.check_requests, figure.check_tokens, figure.whole_requests, figure.whole_tokens],
        }
        panel, used = f"{cfg.model.paper_name} Model{stream}{suffix}", rank if facts.lora else None
        return Point(panel, system, workload, cfg.model.name, engine.max_batch_size, None, used, settings)

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Take each alone, rank by rank (systems without LoRA with the first), in an order that is random but fixed."""
        ranks = [None, *dict.fromkeys(point.rank for point in points if point.rank is not None)]
        shuffled = random.Random(0).sample(points, len(points))
        return [[point] for point in sorted(shuffled, key=lambda point: max(1, ranks.index(point.rank)))]

    def is_derived(self, point: Point) -> bool:
        return point.panel.endswith(RATIOS)

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if self.is_derived(point):
            return self._ratios(cfg, point)
        bench = self._bench(cfg, point)
        if not cast(TextgenConf, cfg.figure).whole_stream:
            return bench.measure(point.system, point.workload, point.repeat)
        from tqdm import tqdm

        readings = bench.whole(point.system, point.workload)
        served, predicted, error = (reading.value for reading in readings[:3])
        tqdm.write(  # on stdout, past the bar
            f"{point.system} on {point.workload}: {served:.4g} token/s; windows predict {predicted:.4g} "
            f"({100 * (predicted / served - 1):+.1f} %), two standard errors {2 * error:.2g}"
        )
        return readings

    def _bench(self, cfg: Config, point: Point) -> StreamBench:
        from experiments.systems.bench import StreamBench
        from experiments.systems.world import World

        figure, adapters = cast(TextgenConf, cfg.figure), cfg.adapters
        limits, stream = sizes_of(cfg)
        rank = point.rank or adapters.ranks[0]
        asked = figure.whole_requests, figure.whole_tokens
        whole = None if None in asked else cast(tuple[int, int], asked)

        def build() -> StreamBench:
            world = World(cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
            return StreamBench(world, stream, (figure.check_requests, figure.check_tokens), whole)

        return self.kept((cfg.model.name, rank, limits, figure.lengths, cfg.hardware.device), build)

    def _ratios(self, cfg: Config, point: Point) -> list[Reading]:
        across = point.panel.endswith(f"{ACROSS} {RATIOS}")
        systems, workloads = ("punica", BACKBONE), ("Distinct", "Identical")
        cells = list(itertools.product(*((systems, workloads) if across else (cfg.system.names, [point.workload]))))
        rows = self.rows_of(cfg, point, cells)
        values, disturbed = {cell: row.value for cell, row in rows.items()}, any(row.disturbed for row in rows.values())
        if across:
            return across_workloads(values, disturbed)
        return ratios({system: value for (system, _), value in values.items()}, disturbed)

    def rows_of(
        self, cfg: Config, point: Point, cells: Iterable[tuple[str, str]], metric: str = "throughput"
    ) -> dict[tuple[str, str], Row]:
        """The rows of `point`'s repeat and today's code, by system and workload; `CheckFailed` if one is missing."""
        rank, rows = cast(int, point.rank), dict[tuple[str, str], Row]()
        for cell in cells:
            row = row_on_disk(self, cfg, replace(self.point(cfg, *cell, rank), repeat=point.repeat), metric)
            if row is None:
                raise CheckFailed(f"no {metric} of {' on '.join(cell)} to compare with; see the messages above")
            rows[cell] = row
        return rows


def sizes_of(cfg: Config) -> tuple[Limits, StreamConf]:
    from experiments.systems.bench import WHOLE_DRAWS, StreamConf
    from experiments.systems.weights import Limits

    figure, scale, engine = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine
    windows = (WHOLE_DRAWS if figure.whole_stream else scale.passes, figure.pieces, figure.steps, figure.slow_steps)
    limits = Limits(engine.max_batch_size, scale.max_len, engine.block_size, engine.num_blocks)
    return limits, StreamConf(figure.lengths, scale.requests, scale.max_len, *windows)


def ratios(throughput: Mapping[str, float], disturbed: bool | None = None) -> list[Reading]:
    punica, static, mixed = (throughput[name] for name in ("punica", "punica_static", "hf_peft_mixed"))
    gains = {
        "speedup_over_best_baseline": punica / max(throughput[name] for name in measured_baselines()),
        "speedup_over_hf_peft_mixed": punica / mixed,
        "static_over_hf_peft_mixed": static / mixed,
        "continuous_batching_gain": punica / static,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in gains.items()]


def across_workloads(throughput: Mapping[tuple[str, str], float], disturbed: bool | None = None) -> list[Reading]:
    """Compute what different adapters, and adapters at all, cost Punica, from throughputs by system and workload."""
    distinct, identical = (throughput["punica", workload] for workload in ("Distinct", "Identical"))
    backbone = throughput[BACKBONE, "Identical"]
    costs = {
        "distinct_over_backbone_identical": distinct / backbone,
        "identical_over_backbone_identical": identical / backbone,
        "distinct_over_own_identical": distinct / identical,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in costs.items()]


def check_sizes(cfg: Config) -> None:
    """Raise `ConfigError` for a stream beyond the model or the KV pool, and a whole stream that is to be drawn."""
    scale, engine, figure = cfg.scale, cfg.engine, cast(TextgenConf, cfg.figure)
    if figure.whole_stream and cfg.draw:
        raise ConfigError("figure.whole_stream=true compares numbers and has nothing to draw: choose draw=false")
    check_length(cfg, "scale.max_len", scale.max_len)
    needed = -(-scale.max_len // engine.block_size)
    if engine.num_blocks is not None and engine.num_blocks < needed:
        raise ConfigError(
            f"engine.num_blocks={engine.num_blocks} cannot hold one request of scale.max_len={scale.max_len} tokens: "
            f"choose engine.num_blocks={needed} or more, or null"
        )


def check_length(cfg: Config, key: str, max_len: int) -> None:
    """Raise `ConfigError` for requests that the model has no positions for, or without room for two new tokens."""
    positions = cfg.model.max_position_embeddings
    if not 4 <= max_len <= positions:
        raise ConfigError(
            f"{key}={max_len} must lie in [4, {positions}]: room for a prompt and two new tokens, within the "
            f"positions of {cfg.model.name} (model.max_position_embeddings)"
        )


EXPERIMENT = Fig11()

if __name__ == "__main__":
    main(EXPERIMENT)
