"""Figure 11: throughput of serving systems when requests ask for many adapters. Claim (section 7.2): Punica keeps its
throughput whatever the popularity, and is 12 times faster than the best baseline where requests differ (Distinct): a
baseline's batch holds one adapter and so, nearly always, one request. Expected shape: Punica flat; baselines low on
Distinct, Uniform and Skewed, close to or above Punica on Identical. The stream is the paper's: the released generator
with its seed, `scale.requests` requests that all wait from the start, lengths scaled to `scale.max_len`. Windows of it
are timed (`experiments.systems.windows`), another draw in every pass, over a KV cache full of noise, in random order.
`figure.whole_stream=true` serves the stream to its end, with rows of what windows predict beside it.
`figure.lengths=stated` has the 101 generated tokens per request that the paper prints (D01), a tenth of the released
generator's. `workload=trace workload.path=FILE` serves the requests of a trace. All have panels of their own, which no
claim reads and no figure draws. Throughput counts prompt and new tokens (D13). `continuous_batching` and
`static_batching` are our engine without LoRA, one adapter per batch: the policies of the paper's vLLM, and of its
FasterTransformer and DeepSpeed, of which none was run. Hugging Face with PEFT was. All systems have the same matrix
product (on a GPU, PEFT's mixed batches torch's, which the host launches faster). Switching adapters is charged to
Punica and not to the baselines: `hf_peft` has its one adapter merged. On a GPU steps are CUDA graphs, captured before
the clock, but for `hf_peft_mixed`, whose host launches every kernel. `punica_last_admitted` has the released harness's
index rule (D04), and no bar. Before timing, logits of a few requests of each workload are compared with Hugging Face's,
and once for each system on our engine those of `figure.whole_requests` up to `figure.whole_tokens` (`systems.check`).
Cost at scale=laptop: about 5 minutes on two cores, 6 GB. At scale=paper a command ends after 8 minutes, and the same
command again continues (`conf/recording.yaml` has pieces); 7B and 13B need 75 and 120 GB.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from experiments.facts.systems import OF_A_TRACE, STATED_LENGTHS, SYSTEMS
from experiments.harness import Config, ConfigError, Experiment, FigureConf, main
from experiments.harness.points import Point, Reading, model_settings
from experiments.harness.schema import Count, Lengths
from experiments.workload.traces import TRACE

if TYPE_CHECKING:
    from experiments.systems.bench import StreamBench, StreamConf
    from experiments.systems.weights import Limits


class TextgenConf(FigureConf):
    lengths: Lengths = "released"  # or stated (D01), in panels of their own
    pieces: Count  # runs of steps in a draw ...
    steps: Count  # ... and steps in a run ...
    slow_steps: Count  # ... and in one of a slow system
    check_requests: Count
    check_tokens: Count
    whole_requests: Count | None  # of those that are compared over whole sequences; none: none are
    whole_tokens: Count | None
    whole_stream: bool = False


class Fig11(Experiment):
    """Throughput per model (the panels), popularity and system."""

    name, figure, order = "fig11_textgen", "11", 70
    conf: ClassVar[type[FigureConf]] = TextgenConf
    reads = (
        "model", "workload", "engine", "adapters.ranks", "adapters.alpha", "adapters.seed", "scale.requests",
        "scale.max_len",
    )  # fmt: skip
    clock, drawn_by, takes_trace = "host_clock", "serving.draw_serving", True

    def points(self, cfg: Config) -> list[Point]:
        check_sizes(cfg)
        names, grid = cfg.system.names, itertools.product(cfg.workload.names, cfg.adapters.ranks)
        return [self.point(cfg, system, workload, rank) for workload, rank in grid for system in names]

    def point(self, cfg: Config, system: str, workload: str, rank: int) -> Point:
        """Build a point of the model's panel; other streams and whole ones are other panels."""
        figure, scale, facts = cast(TextgenConf, cfg.figure), cfg.scale, SYSTEMS.get(system)
        stream = (STATED_LENGTHS if figure.lengths == "stated" else "") + (
            f", whole stream, {scale.requests} requests" if figure.whole_stream else ""
        )
        trace = cfg.workload.trace(scale.requests) if workload == TRACE else None
        stream += f"{OF_A_TRACE}{trace.path.stem} by {trace.rule}" if trace else ""
        settings = {
            "model": model_settings(cfg.model),
            "stream": {"lengths": figure.lengths, "requests": scale.requests, "max_len": scale.max_len},
            "windows": {"pieces": figure.pieces, "steps": figure.slow_steps if facts.slow else figure.steps},
            "adapters": {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed},
            "check": [figure.check_requests, figure.check_tokens, figure.whole_requests, figure.whole_tokens],
            **({"trace": trace.digest} if trace else {}),
        }
        panel, used = f"{cfg.model.paper_name} Model{stream}", rank if facts.lora else None
        return Point(panel, system, workload, cfg.model.name, cfg.engine.max_batch_size, None, used, settings)

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Take each alone, rank by rank (systems without LoRA with the first), in an order that is random but fixed."""
        ranks = [None, *dict.fromkeys(point.rank for point in points if point.rank is not None)]
        shuffled = random.Random(0).sample(points, len(points))
        return [[point] for point in sorted(shuffled, key=lambda point: max(1, ranks.index(point.rank)))]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        bench = self._bench(cfg, point)
        if cast(TextgenConf, cfg.figure).whole_stream:
            return bench.whole(point.system, point.workload)
        return bench.measure(point.system, point.workload, point.repeat)

    def _bench(self, cfg: Config, point: Point) -> StreamBench:
        from experiments.systems.bench import StreamBench
        from experiments.systems.serving import World

        figure, adapters = cast(TextgenConf, cfg.figure), cfg.adapters
        limits, stream = sizes_of(cfg)
        rank = point.rank or adapters.ranks[0]
        asked = figure.whole_requests, figure.whole_tokens
        whole = None if None in asked else cast(tuple[int, int], asked)

        def build() -> StreamBench:
            world = World(cfg.model, cfg.hardware.device, limits, rank, adapters.alpha, adapters.seed)
            return StreamBench(world, stream, (figure.check_requests, figure.check_tokens), whole)

        return self.kept((cfg.model.name, rank, limits, figure.lengths, cfg.hardware.device), build)


def sizes_of(cfg: Config) -> tuple[Limits, StreamConf]:
    from experiments.systems.bench import WHOLE_DRAWS, StreamConf
    from experiments.systems.weights import Limits

    figure, scale = cast(TextgenConf, cfg.figure), cfg.scale
    windows = (WHOLE_DRAWS if figure.whole_stream else scale.passes, figure.pieces, figure.steps, figure.slow_steps)
    limits = Limits(cfg.engine.max_batch_size, scale.max_len)
    trace = cfg.workload.trace(scale.requests) if TRACE in cfg.workload.names else None
    return limits, StreamConf(figure.lengths, scale.requests, scale.max_len, *windows, trace)


def check_sizes(cfg: Config) -> None:
    if cast(TextgenConf, cfg.figure).whole_stream and cfg.draw:
        raise ConfigError("figure.whole_stream=true compares numbers and has nothing to draw: choose draw=false")
    check_length(cfg, "scale.max_len", cfg.scale.max_len)


def check_length(cfg: Config, key: str, max_len: int) -> None:
    """Raise `ConfigError` for requests that the model has no positions for, or without room for two new tokens."""
    positions = cfg.model.max_position_embeddings
    if not 4 <= max_len <= positions:
        raise ConfigError(
            f"{key}={max_len} must lie in [4, {positions}]: room for a prompt and two new tokens, within the "
            f"positions of {cfg.model.name} (model.max_position_embeddings)"
        )


EXPERIMENT = main(Fig11, __name__)
