"""Figure 1: prefill and decode latency over the batch. Claim (section 3.2): batching hardly slows a decode step of
short contexts (11 to 13 ms from batch 1 to 32), about twofold at 2048 tokens, because weights are read once for the
whole batch; prefill takes time in proportion to it. Expected shape: nearly flat decode lines that fan out with the
context, straight prefill lines. Timed: one batched invocation of the backbone without LoRA and without sampling:
`prefill` computes `batch` prompts of the full length, `decode` one token of `batch` requests with that many cached
tokens. Clock: the host's, a step at a time; a prefill longer than `scale.seconds_per_point` is timed once per pass. On
a GPU steps replay CUDA graphs, as in the engine, but for prompts of more rows than its steps have. First, decoding
through the paged cache is checked against computing the whole sequence at once. Cost at scale=laptop: about 1 minute on
two cores, 3 GB; at scale=gpu a minute per model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from experiments.harness import PROTOCOL, Config, ConfigError, Experiment, FigureConf, Overlay, main
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Counts

if TYPE_CHECKING:
    import pandas as pd

MODES = ("prefill", "decode")


class BatchingConf(FigureConf):
    batch_sizes: Counts
    seq_lens: Counts
    prefill_seq_lens: Counts  # prefill costs in proportion to its tokens: minutes on a CPU


def fits(seq_lens: list[int], cfg: Config) -> list[int]:
    """Keep the lengths that the model has positions for; `ConfigError` when none is left."""
    limit = cfg.model.max_position_embeddings
    if min(seq_lens) > limit:
        raise ConfigError(
            f"all of the lengths {seq_lens} are beyond model.max_position_embeddings={limit}: choose shorter ones"
        )
    return [length for length in seq_lens if length <= limit]


class Fig01(Experiment):
    """Step latency of the backbone per mode (the panels), context length and batch."""

    name, figure, order, conf = "fig01_batching", "1", 50, BatchingConf
    reads, clock = ("model", *PROTOCOL), "host_clock"
    overlay = Overlay("Figure 1: a step of the backbone", metric="step_latency", panel="panel", line="length")

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(BatchingConf, cfg.figure)
        lengths = {"prefill": figure.prefill_seq_lens, "decode": figure.seq_lens}
        return [
            Point(mode, system, "", cfg.model.name, batch, length, settings={"model": model_settings(cfg.model)})
            for system in cfg.system.names
            for mode in MODES
            for length in fits(lengths[mode], cfg)
            for batch in figure.batch_sizes
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches import model_steps
        from experiments.benches.operators import protocol
        from experiments.measure.timing import time_side_by_side

        def checked() -> model_steps.Invocation:
            figure = cast(BatchingConf, cfg.figure)
            longest = max(fits(figure.seq_lens + figure.prefill_seq_lens, cfg))
            # the check has two requests of 20 tokens
            needed = max(model_steps.step_tokens(2, 20), model_steps.step_tokens(max(figure.batch_sizes), longest))
            model = model_steps.random_llama(cfg.model, cfg.hardware.device)
            invocation = model_steps.Invocation(model, needed, max(2, *figure.batch_sizes))
            model_steps.check_decode(invocation)
            return invocation

        invocation, clock = self.kept(cfg.model.name, checked), protocol(cfg)
        rows, length = cast(int, point.batch_size), cast(int, point.seq_len)
        if point.panel == "decode":
            step = invocation.decode_step(rows, length)
        else:
            step = invocation.prefill_step(rows, length)
            # a first call's extra time is lost in that of many rows, and on a CPU of any
            warm = cfg.hardware.device == "cuda" and rows * length <= model_steps.MOST_CAPTURED_ROWS
            clock = replace(clock, warmup=int(warm), min_repeats=1)  # seconds each: once is enough
        samples = time_side_by_side({"step": [step]}, clock)["step"]
        return sampled("step_latency", [1e3 * seconds for seconds in samples], "ms")

    def shown(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Name lines by context length, and panels by the model of the paper that was played."""
        from experiments.plots.frames import role_of

        models = frame["model"].map(lambda name: role_of(name) or name).astype(str)
        lengths = "len " + frame["seq_len"].astype("Int64").astype(str)
        return frame.assign(length=lengths, panel=models + ", " + frame["panel"])


EXPERIMENT = main(Fig01, __name__)
