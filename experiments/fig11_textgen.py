r"""Figure 11: throughput of serving systems when requests ask for many adapters.

Claim (section 7.2): Punica keeps its throughput whatever the popularity, and is 12 times faster than the best baseline
where requests differ (Distinct), because a baseline's batch holds one adapter and so, nearly always, one request.
Expected shape: Punica flat; baselines low on Distinct, Uniform and Skewed, close to or above Punica on Identical.

The stream is the paper's: the released generator with its seed, `scale.requests` requests that all wait from the start
(lengths are scaled to `scale.max_len`). It takes 32 000 steps at batch 32 and a million at batch 1, so what is timed
are windows of it (`experiments.systems.windows`): the scheduler is replayed without a model, runs of consecutive steps
are drawn whose tokens per step, requests, contexts and prompts agree with the stream's when steps with a prefill weigh
as much as in the stream (rows `tokens_per_step` and `stream_tokens_per_step`, and so on), and a system runs them as it
would there: with prefills, joins, departures, adapter loads, over a KV cache full of noise. Every pass takes another
draw, and goes over all systems and workloads by turns, so that a slow minute falls on no system and no workload alone.

`figure.whole_stream=true` serves the stream to its end instead and prints what windows predict beside it; streams of
different lengths have rows side by side. A short one takes about 5 minutes on two cores:

    python -m experiments.fig11_textgen figure.whole_stream=true scale.requests=64 scale.passes=1 scale.tries=0 \
        system=punica workload=distinct draw=false

Throughput counts prompt and new tokens (D13); `new_token_throughput` only new ones. `continuous_batching` and
`static_batching` are our engine without LoRA, one adapter per batch (`experiments.systems`): the policies of the
paper's vLLM, and of its FasterTransformer and DeepSpeed, of which none was run. Hugging Face with PEFT was. All systems
have the same matrix product (on a GPU, Hugging Face has the faster of ours and torch's, which take the device as long:
ours takes longer to launch). Switching adapters is charged to Punica and not to the baselines.
`punica_last_admitted` is Punica with the released harness's index rule (D04). On a GPU all systems of the engine run as
CUDA graphs, captured before the clock.

Before timing, the first tokens of a few requests of each workload are compared with Hugging Face's, one request at a
time, which also warms up; and once for each system on our engine those of `figure.whole_requests` up to
`figure.whole_tokens`: on a GPU 8 requests from end to end, on a laptop 3 up to 32 tokens (`systems.check`).
Where all systems involved were measured, ratio rows follow, per draw: speed-up over the best baseline, and over PEFT's
mixed batches split into `operator_gain` (punica_static / hf_peft_mixed) and `continuous_batching_gain` (punica /
punica_static). `operator_gain` is not the LoRA operator's alone: it holds all that differs between the two stacks but
batching, on a CPU too. On a GPU Transformers launches each kernel from Python, without a CUDA graph. Across workloads,
Punica on Distinct and Identical over the backbone alone on Identical, and over each other. The report holds them
against what was asked of an H200.

Cost at scale=laptop: about 5 minutes on two cores, 6 GB. At scale=paper six windows of 100 steps per cell (10 of PEFT's
mixed batches, whose steps take up to 1.7 seconds), two in each of three passes: on an H200 with model=llama2-7b 2.5
minutes for the first pass of the systems of our engine, checks included, and 40 s for each further one; Hugging Face's,
whose host launches every kernel, are expected to add 3 minutes a pass; 75 and 120 GB, at scale=gpu too (7B's Distinct
alone: 72). A command there ends after 8 minutes (`figure.minutes`), and the same command again goes on where it ended.
In pieces, of 13B the last one split by workloads:

    python -m experiments.fig11_textgen scale=paper model=llama2-7b draw=false \
        system.names=[punica,punica_static,punica_last_admitted,static_batching,continuous_batching]
    python -m experiments.fig11_textgen scale=paper model=llama2-7b
    python -m experiments.fig11_textgen scale=paper model=llama2-13b draw=false \
        system.names=[punica,punica_static,punica_last_admitted,static_batching,continuous_batching]
    python -m experiments.fig11_textgen scale=paper model=llama2-13b draw=false workload.names=[Distinct,Uniform]
    python -m experiments.fig11_textgen scale=paper model=llama2-13b

In full, once: 256 requests per cell, and 1,024 on Distinct; what a serving takes is served once, not in passes:

    python -m experiments.fig11_textgen scale=paper model=llama2-7b figure.whole_stream=true scale.requests=256 \
        scale.passes=1 scale.tries=0 system=punica draw=false
    python -m experiments.fig11_textgen scale=paper model=llama2-13b figure.whole_stream=true scale.requests=256 \
        scale.passes=1 scale.tries=0 system=punica draw=false
    python -m experiments.fig11_textgen scale=paper model=llama2-7b figure.whole_stream=true scale.requests=1024 \
        scale.passes=1 scale.tries=0 system=punica workload=distinct draw=false
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

RATIOS, ACROSS = "ratios", "across workloads"
BACKBONE = "continuous_batching"
BASELINES = ("hf_peft", "static_batching", "continuous_batching")
"""One adapter per batch; PEFT's mixed batches are compared on their own."""
WITHOUT_LORA = ("static_batching", "continuous_batching")
SLOW = ("hf_peft_mixed",)
LENGTHS = ("released", "stated")


@dataclass
class TextgenConf(FigureConf):
    """Figure 11: the stream, its windows, and what is checked before a system is timed."""

    lengths: str = MISSING  # released or stated, see systems.stream
    pieces: int = MISSING  # runs of steps in a draw ...
    steps: int = MISSING  # ... and steps in a run ...
    slow_steps: int = MISSING  # ... and in one of a system of `SLOW`
    check_requests: int = MISSING
    check_tokens: int = MISSING
    whole_requests: int | None = None  # of those that are compared over whole sequences; none: none are
    whole_tokens: int | None = None
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
        check_sizes(cfg)
        whole = cast(TextgenConf, cfg.figure).whole_stream
        panel = f"{cfg.model.paper_name} Model{whole_stream(cfg)}"
        limit, points = cfg.engine.max_batch_size, []
        for workload in cfg.workload.names:
            for rank in cfg.adapters.ranks:
                for system in cfg.system.names:
                    used = None if system in WITHOUT_LORA else rank
                    settings = settings_of(cfg, slow=system in SLOW)
                    points.append(Point(panel, system, workload, cfg.model.name, limit, None, used, settings))
                if not whole and {"punica", "punica_static", "hf_peft_mixed", *BASELINES} <= set(cfg.system.names):
                    ratio_panel = f"{panel} {RATIOS}"
                    settings = settings_of(cfg)
                    points.append(Point(ratio_panel, "punica", workload, cfg.model.name, limit, None, rank, settings))
        across = {"punica", BACKBONE} <= set(cfg.system.names) and {"Distinct", "Identical"} <= set(cfg.workload.names)
        if across and not whole:
            for rank in cfg.adapters.ranks:
                place = f"{panel}, {ACROSS} {RATIOS}", "punica", "Distinct", cfg.model.name, limit, None, rank
                points.append(Point(*place, settings_of(cfg)))
        return points

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone, rank by rank (systems without LoRA with the first), systems and workloads by turns."""
        workloads, systems, ranks = (
            list(dict.fromkeys(found))
            for found in zip(*[(point.workload, point.system, point.rank) for point in points], strict=True)
        )
        ranks = [rank for rank in ranks if rank is not None]
        circle = math.lcm(len(systems), len(workloads))  # after so many both would begin again with the same
        turns = {
            (systems[i % len(systems)], workloads[(i + i // circle) % len(workloads)]): i
            for i in range(len(systems) * len(workloads))
        }

        def turn(point: Point) -> tuple[int, int]:
            return 0 if point.rank is None else ranks.index(point.rank), turns[point.system, point.workload]

        return [[point] for point in sorted(points, key=turn)]

    def is_derived(self, point: Point) -> bool:
        return point.panel.endswith(RATIOS)

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if self.is_derived(point):
            return self._ratios(cfg, point)
        bench = self._bench(cfg, point)
        if cast(TextgenConf, cfg.figure).whole_stream:
            return self._whole(bench, point)
        return bench.measure(point.system, point.workload, point.repeat)

    def _whole(self, bench: StreamBench, point: Point) -> list[Reading]:
        from tqdm import tqdm

        from experiments.systems.whole_stream import compare

        found = compare(bench, point.system, point.workload)
        tqdm.write(f"\n{found}\n")  # on stdout, past the bar
        return found.readings()

    def _bench(self, cfg: Config, point: Point) -> StreamBench:
        """Systems, adapters and backbone, built once per rank; systems without LoRA take what is there."""
        from experiments.systems import Limits, StreamBench, StreamConf, World
        from experiments.systems.whole_stream import DRAWS

        figure, scale, engine, adapters = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine, cfg.adapters
        rank = point.rank or adapters.ranks[0]
        key = (cfg.model.name, rank, engine.max_batch_size, scale.max_len, figure.lengths, cfg.hardware.device)
        limits = Limits(engine.max_batch_size, scale.max_len, engine.block_size, engine.num_blocks)
        draws = DRAWS if figure.whole_stream else scale.passes
        windows = (draws, figure.pieces, figure.steps, figure.slow_steps)
        stream = StreamConf(figure.lengths, scale.requests, scale.max_len, *windows)

        asked = figure.whole_requests, figure.whole_tokens
        whole = None if None in asked else cast(tuple[int, int], asked)

        def build() -> StreamBench:
            world = World(cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
            return StreamBench(world, stream, figure.check_requests, figure.check_tokens, whole)

        return self.kept(key, build)

    def _ratios(self, cfg: Config, point: Point) -> list[Reading]:
        """From the rows on disk of the same repeat. `CheckFailed` when one is missing because its check failed."""
        panel, across = point.panel.removesuffix(f" {RATIOS}"), point.panel.endswith(f"{ACROSS} {RATIOS}")
        found = self._throughputs(cfg, point, panel.removesuffix(f", {ACROSS}"))
        workloads = ("Distinct", "Identical") if across else (point.workload,)
        systems = ("punica", BACKBONE) if across else cfg.system.names
        cells = [(system, workload) for system in systems for workload in workloads]
        if missing := [system if not across else f"{system} on {load}" for system, load in cells
                       if (system, load) not in found]:  # fmt: skip
            raise CheckFailed(f"no throughput of {', '.join(missing)} to compare with; see the messages above")
        disturbed = any(found[cell].disturbed for cell in cells)
        values = {cell: found[cell].value for cell in cells}
        if across:
            return across_workloads(values, disturbed)
        return ratios({system: value for (system, _), value in values.items()}, disturbed)

    def _throughputs(self, cfg: Config, point: Point, panel: str) -> dict[tuple[str, str], Row]:
        """By system and workload, of the repeat of `point` and the code of today."""
        rows = read_rows(folders(cfg).fresh_rows / f"{self.name}.csv")
        source = source_of(self)
        cell = (panel, point.model, point.batch_size, cfg.scale.name, cfg.timer.name, point.repeat)

        def belongs(row: Row) -> bool:
            mine = (row.panel, row.model, row.batch_size, row.scale, row.timer, row.repeat)
            return mine == cell and row.rank in (None, point.rank) and row.source_hash == source

        return {(row.system, row.workload): row for row in rows if row.metric == "throughput" and belongs(row)}


def whole_stream(cfg: Config) -> str:
    """What a panel of whole streams adds to its name; streams of other lengths are other panels."""
    whole = cast(TextgenConf, cfg.figure).whole_stream
    return f", whole stream, {cfg.scale.requests} requests" if whole else ""


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


def across_workloads(throughput: Mapping[tuple[str, str], float], disturbed: bool | None = None) -> list[Reading]:
    """What different adapters, and adapters at all, cost Punica, from throughputs by system and workload."""
    distinct, identical = (throughput["punica", workload] for workload in ("Distinct", "Identical"))
    backbone = throughput[BACKBONE, "Identical"]
    found = {
        "distinct_over_backbone_identical": distinct / backbone,
        "identical_over_backbone_identical": identical / backbone,
        "distinct_over_own_identical": distinct / identical,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in found.items()]


def settings_of(cfg: Config, slow: bool = False) -> dict[str, Any]:
    """What decides the numbers beside the columns of a point."""
    figure, scale, engine = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine
    return {
        "model": model_settings(cfg.model),
        "stream": {"lengths": figure.lengths, "requests": scale.requests, "max_len": scale.max_len},
        "windows": {"pieces": figure.pieces, "steps": figure.slow_steps if slow else figure.steps},
        "engine": {"block_size": engine.block_size, "num_blocks": engine.num_blocks},
        "adapters": {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed},
        "check": [figure.check_requests, figure.check_tokens, figure.whole_requests, figure.whole_tokens],
    }


def check_sizes(cfg: Config) -> None:
    """Raise `ConfigError` for unknown lengths, a stream that the model or the KV pool cannot hold, and a whole stream
    that is to be drawn.
    """
    scale, engine, positions = cfg.scale, cfg.engine, cfg.model.max_position_embeddings
    lengths = cast(TextgenConf, cfg.figure).lengths
    if cast(TextgenConf, cfg.figure).whole_stream and cfg.draw:
        raise ConfigError("figure.whole_stream=true compares numbers and has nothing to draw: choose draw=false")
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
