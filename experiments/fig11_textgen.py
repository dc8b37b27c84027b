r"""Figure 11: throughput of serving systems when requests ask for many adapters.

Claim (section 7.2): Punica keeps its throughput whatever the popularity, and is 12 times faster than the best baseline
where requests differ (Distinct): a baseline's batch holds one adapter and so, nearly always, one request.
Expected shape: Punica flat; baselines low on Distinct, Uniform and Skewed, close to or above Punica on Identical.

The stream is the paper's: the released generator with its seed, `scale.requests` requests that all wait from the start,
lengths scaled to `scale.max_len`. It takes 32 000 steps at batch 32 and a million at batch 1, so windows of it are
timed (`experiments.systems.windows`). A system runs them as in the stream: with prefills, joins, departures and adapter
loads, over a KV cache full of noise. Every pass takes another draw, the same for all workloads that form the same
batches, and takes systems and workloads by turns, so that a slow minute falls on none alone.
`figure.whole_stream=true` serves the stream to its end and prints what windows predict beside it; streams of different
lengths have rows side by side. A short one takes about 5 minutes on two cores:

    python -m experiments.fig11_textgen figure.whole_stream=true scale.requests=64 scale.passes=1 scale.tries=0 \
        system=punica workload=distinct draw=false

`figure.lengths=stated` has the 101 generated tokens per request that the paper prints (D01) and not the tenfold of the
released generator: prompts are a fifth of all tokens instead of 2.3 %, and on Distinct an adapter is loaded every third
step instead of every thirtieth. Its rows are panels of their own, which no claim reads and no figure draws.

Throughput counts prompt and new tokens (D13); `new_token_throughput` only new ones. `continuous_batching` and
`static_batching` are our engine without LoRA, one adapter per batch: the policies of the paper's vLLM, and of its
FasterTransformer and DeepSpeed, of which none was run. Hugging Face with PEFT was. All systems have the same matrix
product (on a GPU, Hugging Face has the faster of ours and torch's). Switching adapters is charged to Punica and not to
the baselines: `hf_peft` has its one adapter merged into the weights. On a GPU the engine's systems and `hf_peft`'s
decode steps run as CUDA graphs, captured before the clock; `hf_peft_mixed` cannot, and its host launches every kernel
(`ext_hf_baselines` counts them). `punica_last_admitted` has the released harness's index rule (D04), and no bar.

Before timing, the first tokens of a few requests of each workload are compared with Hugging Face's, and once for each
system on our engine `figure.whole_requests` up to `figure.whole_tokens` (`systems.check`). Ratio rows follow, per draw:
speed-up over the best baseline, and over PEFT's mixed batches split into `static_over_hf_peft_mixed` (punica_static /
hf_peft_mixed) and `continuous_batching_gain` (punica / punica_static). The former is no gain of the operator: it holds
all that differs between the two stacks but batching, launches by the host of a GPU among it. Across
workloads, Punica on Distinct and Identical over the backbone alone on Identical, and over each other.

Cost at scale=laptop: about 5 minutes on two cores, 6 GB. At scale=paper six windows of 100 steps per cell (10 of PEFT's
mixed batches), two in each of three passes: on an H200 with model=llama2-7b 2.5 minutes for the first pass of the
engine's systems, checks included, and 40 s for each further one; Hugging Face's are expected to add 3 minutes a pass;
75 and 120 GB, at scale=gpu too (7B's Distinct alone: 72). A command there ends after 8 minutes, and the same command
again continues. In pieces, of 13B the last one split by workloads:

    python -m experiments.fig11_textgen scale=paper model=llama2-7b draw=false \
        system.names=[punica,punica_static,punica_last_admitted,static_batching,continuous_batching]
    python -m experiments.fig11_textgen scale=paper model=llama2-7b
    python -m experiments.fig11_textgen scale=paper model=llama2-13b draw=false \
        system.names=[punica,punica_static,punica_last_admitted,static_batching,continuous_batching]
    python -m experiments.fig11_textgen scale=paper model=llama2-13b draw=false workload.names=[Distinct,Uniform]
    python -m experiments.fig11_textgen scale=paper model=llama2-13b

Whole streams, once: 256 requests per cell, and 1,024 on Distinct:

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
from typing import TYPE_CHECKING, Any, ClassVar, cast

from experiments.facts.systems import STATED_LENGTHS, SYSTEMS, measured_baselines
from experiments.harness import CheckFailed, Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings
from experiments.harness.schema import Count
from experiments.harness.settings import folders
from experiments.harness.source import source_of
from experiments.measure.records import Row, read_rows

if TYPE_CHECKING:
    from experiments.systems.bench import StreamBench, StreamConf
    from experiments.systems.weights import Limits

RATIOS, ACROSS = "ratios", "across workloads"
BACKBONE = "continuous_batching"
LENGTHS = ("released", "stated")


class TextgenConf(FigureConf):
    """Figure 11: the stream, its windows, and the checks before a system is timed."""

    lengths: str  # released or stated, see systems.stream
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
        whole = cast(TextgenConf, cfg.figure).whole_stream
        panel = f"{cfg.model.paper_name} Model{other_stream(cfg)}"

        def point(panel: str, system: str, workload: str, rank: int | None, slow: bool = False) -> Point:
            limit, settings = cfg.engine.max_batch_size, settings_of(cfg, slow)
            return Point(panel, system, workload, cfg.model.name, limit, None, rank, settings)

        points = []
        compared = {"punica", "punica_static", "hf_peft_mixed", *measured_baselines()} <= systems
        for workload in cfg.workload.names:
            for rank in cfg.adapters.ranks:
                for one in map(SYSTEMS.get, cfg.system.names):
                    points.append(point(panel, one.name, workload, rank if one.lora else None, one.slow))
                if compared and not whole:
                    points.append(point(f"{panel} {RATIOS}", "punica", workload, rank))
        if {"punica", BACKBONE} <= systems and {"Distinct", "Identical"} <= workloads and not whole:
            across = f"{panel}, {ACROSS} {RATIOS}"
            points += [point(across, "punica", "Distinct", rank) for rank in cfg.adapters.ranks]
        return points

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Take each alone, rank by rank (systems without LoRA with the first), systems and workloads by turns."""
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
        """Build systems, adapters and backbone once per rank; systems without LoRA take what is there."""
        from experiments.systems.bench import StreamBench
        from experiments.systems.world import World

        figure, adapters = cast(TextgenConf, cfg.figure), cfg.adapters
        limits, stream = sizes_of(cfg)
        rank = point.rank or adapters.ranks[0]
        asked = figure.whole_requests, figure.whole_tokens
        whole = None if None in asked else cast(tuple[int, int], asked)

        def build() -> StreamBench:
            world = World(cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
            return StreamBench(world, stream, figure.check_requests, figure.check_tokens, whole)

        key = (cfg.model.name, rank, limits.max_batch_size, limits.max_len, figure.lengths, cfg.hardware.device)
        return self.kept(key, build)

    def _ratios(self, cfg: Config, point: Point) -> list[Reading]:
        panel, across = point.panel.removesuffix(f" {RATIOS}"), point.panel.endswith(f"{ACROSS} {RATIOS}")
        workloads = ("Distinct", "Identical") if across else (point.workload,)
        systems = ("punica", BACKBONE) if across else cfg.system.names
        cells = [(system, workload) for system in systems for workload in workloads]
        panel = panel.removesuffix(f", {ACROSS}")
        found = self.on_disk(cfg, point, panel, cells, "{0} on {1}" if across else "{0}")
        disturbed = any(found[*cell, "throughput"].disturbed for cell in cells)
        values = {cell: found[*cell, "throughput"].value for cell in cells}
        if across:
            return across_workloads(values, disturbed)
        return ratios({system: value for (system, _), value in values.items()}, disturbed)

    def on_disk(
        self, cfg: Config, point: Point, panel: str, cells: Iterable[tuple[str, str]], called: str = "{0} on {1}"
    ) -> dict[tuple[str, str, str], Row]:
        """Read the rows of the repeat of `point` and today's code, by system, workload and metric. `CheckFailed` when
        the throughput of one of `cells` is missing, because its check failed or for want of time.
        """
        source = source_of(self)
        cell = (panel, point.model, point.batch_size, cfg.scale.name, cfg.timer.name, point.repeat)

        def belongs(row: Row) -> bool:
            mine = (row.panel, row.model, row.batch_size, row.scale, row.timer, row.repeat)
            return mine == cell and row.rank in (None, point.rank) and row.source_hash == source

        file = folders(cfg).fresh_rows / f"{self.name}.csv"
        rows = filter(belongs, read_rows(file) if file.exists() else [])
        found = {(row.system, row.workload, row.metric): row for row in rows}
        if missing := [called.format(*one) for one in cells if (*one, "throughput") not in found]:
            raise CheckFailed(f"no throughput of {', '.join(missing)} to compare with; see the messages above")
        return found


def other_stream(cfg: Config) -> str:
    """Return the suffix of a panel of stated lengths and of whole streams, each of which is another panel."""
    figure = cast(TextgenConf, cfg.figure)
    whole = f", whole stream, {cfg.scale.requests} requests" if figure.whole_stream else ""
    return (STATED_LENGTHS if figure.lengths == "stated" else "") + whole


def sizes_of(cfg: Config) -> tuple[Limits, StreamConf]:
    """Build the limits of a batch, and the stream with its windows."""
    from experiments.systems.bench import StreamConf
    from experiments.systems.weights import Limits
    from experiments.systems.whole_stream import DRAWS

    figure, scale, engine = cast(TextgenConf, cfg.figure), cfg.scale, cfg.engine
    windows = (DRAWS if figure.whole_stream else scale.passes, figure.pieces, figure.steps, figure.slow_steps)
    limits = Limits(engine.max_batch_size, scale.max_len, engine.block_size, engine.num_blocks)
    return limits, StreamConf(figure.lengths, scale.requests, scale.max_len, *windows)


def ratios(throughput: Mapping[str, float], disturbed: bool | None = None) -> list[Reading]:
    """Compute Punica's gains, from the throughput of each system on one workload."""
    punica, static, mixed = (throughput[name] for name in ("punica", "punica_static", "hf_peft_mixed"))
    found = {
        "speedup_over_best_baseline": punica / max(throughput[name] for name in measured_baselines()),
        "speedup_over_hf_peft_mixed": punica / mixed,
        "static_over_hf_peft_mixed": static / mixed,
        "continuous_batching_gain": punica / static,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in found.items()]


def across_workloads(throughput: Mapping[tuple[str, str], float], disturbed: bool | None = None) -> list[Reading]:
    """Compute what different adapters, and adapters at all, cost Punica, from throughputs by system and workload."""
    distinct, identical = (throughput["punica", workload] for workload in ("Distinct", "Identical"))
    backbone = throughput[BACKBONE, "Identical"]
    found = {
        "distinct_over_backbone_identical": distinct / backbone,
        "identical_over_backbone_identical": identical / backbone,
        "distinct_over_own_identical": distinct / identical,
    }
    return [Reading(name, value, "ratio", disturbed=disturbed) for name, value in found.items()]


def settings_of(cfg: Config, slow: bool = False) -> dict[str, Any]:
    """Return what decides the numbers beside the columns of a point."""
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
    """Raise `ConfigError` for unknown lengths, a stream beyond the model's positions or the KV pool, and a whole stream
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
