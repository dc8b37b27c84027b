"""Extension: the engine that users would pick today, vLLM, beside ours, on the same machine in one run.

Claim: with adapters this engine is the faster one, and the more, the more adapters a batch has. Expected shape: decode
steps without adapters close, since both read the same bytes; with one adapter for all further apart; with one for
every request vLLM's kernels, whose grid has a place for each slot, take at least as long as the base products.

Each system is a process and an environment of its own: ours this interpreter, vLLM's `figure.vllm_python`. All get one
checkpoint of random weights, one set of PEFT folders, each with weights of its own, and the same prompts as token ids;
tokens are greedy and end tokens ignored. vLLM's prefix cache is off. Without that interpreter ours is measured alone.
Settings of vLLM other than `vllm` are compared by decode steps alone, unless `figure.decode_only` leaves them out.

    vllm_as_shipped    LoRA enabled, all else as it comes
    vllm               and `specialize_active_lora`, and LoRA at the seven projections only (not embedding and head)
    vllm_dual_stream   and its second stream: `VLLM_LORA_ENABLE_DUAL_STREAM` (ask by `system.names=[...]`)
    vllm_tuned         as vllm, kernel tables of its own benchmark_lora.py in `figure.vllm_tables` (likewise)
    punica_many, punica   this engine; as many prompts per step as fit, as in vLLM, or the paper's one (likewise)

Panels; the first two without adapters, with one (Identical) and with many (Distinct), in turns:

    decode          `step_latency` of a full batch with `seq_len` cached tokens on average: two numbers of new tokens
                    (`new_tokens`) of the same requests, subtracted; the median of `rounds`
    stream          `output_throughput` of a queue with the lengths of chats, all waiting from the start, adapters in
                    turns, in as many rounds as `seconds` hold. `first_pass`: of its first requests, to warm up.
    registration    of all adapters from their folders, in the page cache, into host memory (and slots)
    tokens          isolation, a mixed batch against each of its requests alone: `first_token_alone`, share of requests
                    with the same first token, and `same_alone`, share of tokens before the first difference.
                    `first_token_reference`: as ours has. `start`: from checkpoint to engine, imports done.

With too few equal first tokens a system has no rows.

Cost: at scale=gpu with Llama-2 7B on an H200, expected: two to three minutes per system; 30 GB of disk for temporary
files, 30 GB of memory. On a CPU only scale=smoke, that it runs: vLLM's wheels are made for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import by_cell, model_settings
from experiments.harness.schema import Count, Counts
from experiments.today.measure import DECODE, NONE, PARTS, REGISTRATION, STREAM, TOKENS
from experiments.today.peers import HOW_TO_GET_VLLM, OURS, PEERS, Interpreters

if TYPE_CHECKING:
    from experiments.today.bench import TodayBench


class TodayConf(FigureConf):
    """Interpreter of vLLM, sizes of the work, and its rounds."""

    vllm_python: Path | None = None
    vllm_tables: Path | None = None
    parts: list[str]  # panels
    adapters: Count
    batch_size: Count
    contexts: Counts  # mean cached tokens of decode steps
    new_tokens: Counts  # of the shorter and the longer requests
    requests: Count  # of the stream
    lengths: Counts  # mean prompt and output
    warm: Count  # requests of the first pass
    rounds: Count
    seconds: dict[str, float]  # of stream and registration, which begin no round that would end after them
    decode_only: list[str]  # systems whose other panels are left out
    check: Counts  # requests and new tokens of each
    check_prompt: Count
    sizes: dict[str, Any]  # what depends on the scale


class Today(Experiment):
    """Decode steps, a stream, registration and tokens (the panels) by popularity and system."""

    name, figure, order, conf = "ext_today", "ext today", 291, TodayConf
    reads = ("model", "workload", "adapters.ranks", "adapters.seed")
    clock, drawn_by, passes = "host_clock", "today.draw_today", 1

    def known_systems(self, cfg: Config) -> Sequence[str]:
        return list(PEERS)

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(TodayConf, cfg.figure)
        _check(cfg)
        if cfg.hardware.device == "cpu" and cfg.scale.name != "smoke":
            self._say("nothing to compare on a CPU: vLLM's wheels need a GPU (scale=smoke tries the code)")
            return []
        peers = _interpreters(figure)
        cells: list[tuple[str, str, int | None]] = [(TOKENS, NONE, None), (REGISTRATION, NONE, None)]
        cases = (NONE, *cfg.workload.names)
        cells += [(DECODE, workload, context) for context in figure.contexts for workload in cases]
        cells += [(STREAM, workload, None) for workload in cases]
        return [
            Point(panel, system, workload, cfg.model.name, figure.batch_size, context, cfg.adapters.ranks[0],
                  _settings(cfg, system, peers))
            for system in self._possible(cfg)
            for panel, workload, context in cells
            if panel in (TOKENS, *figure.parts) and (system not in figure.decode_only or panel in (TOKENS, DECODE))
        ]  # fmt: skip

    def _possible(self, cfg: Config) -> list[str]:
        """Systems that have an interpreter, ours first. `ConfigError` where none of those asked for has one."""
        figure = cast(TodayConf, cfg.figure)
        ours = [name for name in cfg.system.names if PEERS[name].worker == OURS]
        others = [name for name in cfg.system.names if name not in ours]
        if others and not figure.vllm_python:
            text = f"figure.vllm_python is empty, so {', '.join(others)} cannot run: {HOW_TO_GET_VLLM}"
            if not ours:
                raise ConfigError(text)
            self._say(text)
            return ours
        return ours + others

    def _say(self, text: str) -> None:
        tqdm.write(f"{self.name}: {text}", file=sys.stderr)

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """All points of a system, which one process measures."""
        return by_cell(points, "panel", "workload", "seq_len")

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        bench, system = self._bench(cfg), points[0].system
        reference = next((name for name in cfg.system.names if PEERS[name].worker == OURS), "punica_many")
        wanted = {panel: any(point.panel == panel for point in points) for panel in (STREAM, REGISTRATION)}
        contexts = dict.fromkeys(point.seq_len for point in points if point.panel == DECODE)
        workloads = dict.fromkeys(point.workload for point in points if point.panel in (DECODE, STREAM))
        lines = bench.run(system, reference, {**wanted, DECODE: list(contexts), "workloads": list(workloads)})
        engine = f"{lines[0]['about']}: {bench.peers.peer(system).described()}"
        found = [_readings(bench, reference, point, lines) for point in points]
        return [[replace(reading, engine=engine) for reading in readings] for readings in found]

    def _bench(self, cfg: Config) -> TodayBench:
        """Folders and processes, and the tokens of systems that ran."""
        from experiments.today.bench import TodayBench

        rank, seed = cfg.adapters.ranks[0], cfg.adapters.seed
        peers = _interpreters(cast(TodayConf, cfg.figure))
        key = (cfg.model.name, rank, seed)
        return self.kept(key, lambda: TodayBench(cfg.model, cfg.hardware.device, rank, seed, _sizes(cfg), peers))


def _interpreters(figure: TodayConf) -> Interpreters:
    return Interpreters(figure.vllm_python, figure.vllm_tables)


def _check(cfg: Config) -> None:
    """`ConfigError` for sizes that do not fit each other."""
    figure = cast(TodayConf, cfg.figure)
    if unknown := [part for part in figure.parts if part not in PARTS]:
        raise ConfigError(f"figure.parts has {unknown[0]!r}, must be some of {', '.join(PARTS)}")
    short, long = figure.new_tokens
    if not figure.batch_size <= short < long:
        raise ConfigError(
            f"figure.new_tokens={figure.new_tokens} must ascend from figure.batch_size={figure.batch_size} or more: "
            "one request joins per step, and the batch must be full"
        )
    if min(figure.contexts) <= (short + long) // 2:
        raise ConfigError(
            f"figure.contexts={figure.contexts} must be above {(short + long) // 2}, the mean of figure.new_tokens: "
            "the rest is the prompt"
        )
    if figure.adapters < figure.batch_size:
        raise ConfigError(
            f"figure.adapters={figure.adapters} must be at least figure.batch_size={figure.batch_size}: Distinct has "
            "one for every request"
        )


def _sizes(cfg: Config) -> dict[str, Any]:
    """Return the sizes of the work. `ConfigError` for requests that the model has no positions for."""
    figure = cast(TodayConf, cfg.figure)
    names = "adapters", "batch_size", "new_tokens", "requests", "lengths", "warm", "rounds", "seconds", "check"
    decode = max(figure.contexts) + (figure.new_tokens[1] - figure.new_tokens[0] + 1) // 2
    stream = 4 * figure.lengths[0] + round(1.6 * figure.lengths[1])
    longest = -(-max(decode, stream, figure.check_prompt + sum(figure.check)) // 16) * 16
    if longest > cfg.model.max_position_embeddings:
        raise ConfigError(
            f"requests of {longest} tokens (figure.contexts, figure.lengths) are above the positions of "
            f"{cfg.model.name}, {cfg.model.max_position_embeddings}: choose shorter ones"
        )
    return {**{name: getattr(figure, name) for name in names}, "check_prompt": figure.check_prompt, "max_len": longest}


def _settings(cfg: Config, system: str, peers: Interpreters) -> dict[str, Any]:
    return {
        "model": model_settings(cfg.model),
        "sizes": _sizes(cfg),
        "engine": [peers.versions(system), peers.peer(system).described()],
        "seed": cfg.adapters.seed,
    }


def _readings(bench: TodayBench, reference: str, point: Point, lines: Sequence[dict[str, Any]]) -> list[Reading]:
    from experiments.today.bench import common, first_tokens

    line = next(one for one in lines if (one["part"], one.get("context")) == (point.panel, point.seq_len))
    if point.panel == DECODE:
        return sampled("step_latency", [1e3 * value for value in line["steps"][point.workload]], "ms")
    if point.panel == REGISTRATION:
        size = Reading("adapter_bytes", bench.folders.adapter_bytes, "byte", "count")
        adapters = Reading("adapters", bench.sizes["adapters"], "adapters", "count")
        return [*sampled("registration", line["seconds"], "s"), adapters, size]
    if point.panel == TOKENS:
        return [
            Reading("start", lines[0]["seconds"], "s"),
            Reading("checked", len(line["alone"]), "requests", "count"),
            Reading("first_token_alone", first_tokens(line["together"], line["alone"]), "share"),
            Reading("same_alone", common(line["together"], line["alone"]), "share"),
            Reading("first_token_reference", bench.agreement(point.system, reference), "share"),
        ]
    output, prompt = bench.stream_tokens()
    return [
        *sampled("output_throughput", [output / seconds for seconds in line["seconds"][point.workload]], "token/s"),
        Reading("first_pass", line["first"][point.workload], "s"),
        Reading("output_tokens", output, "tokens", "count"),
        Reading("prompt_tokens", prompt, "tokens", "count"),
    ]


EXPERIMENT = Today()

if __name__ == "__main__":
    main(EXPERIMENT)
