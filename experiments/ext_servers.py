"""Extension: engines and servers that users would pick today beside ours, under the same requests on one machine.

Claim: none of the paper's. With adapters this engine is the faster one, and the more, the more adapters a batch has.
Expected shape: decode steps without adapters close; with one for every request vLLM's kernels, whose grid has a place
for each slot, take at least as long as the base products.

    punica_many, punica    this engine; as many prompts per step as fit, as in vLLM, or the paper's one.
    punica_server          `punica.serve` of the latter, over HTTP; needs the extra `serve`.
    vllm_as_shipped        vLLM with LoRA enabled, all else as it comes, but without its prefix cache.
    vllm                   and `specialize_active_lora`, and LoRA at the seven projections only.
    vllm_dual_stream       and its second stream: `VLLM_LORA_ENABLE_DUAL_STREAM`.
    vllm_punica            `vllm` with this library's LoRA products (`punica.vllm`), installed beside it.
    ..._cached             `punica` and `vllm` with their prefix caches.
    ..._invariant          `punica_many`, `vllm` and `vllm_punica` with batch invariance (`VLLM_BATCH_INVARIANT`).
    figure.url=http://...  any server with OpenAI's API and adapters by model name, and no other system; its API key is
                           the environment's SERVER_API_KEY, and is in no row.

Each system is a process of its own: ours of this interpreter, vLLM's of `figure.vllm_python`, with VLLM_* of the shell.
All get one checkpoint of random weights, PEFT folders with weights of their own, of `adapters.ranks` in turn, and the
same greedy requests to their whole length. Panels, in turns for each popularity, and decode, prompt and stream also
without adapters:

    decode          `step_latency` of a full batch with `seq_len` cached tokens on average: two numbers of new tokens
                    (`new_tokens`) of the same requests, subtracted.
    prompt          `prompt_latency` of a full batch of `seq_len` tokens each, to the first token of each.
    switch          `switch_latency`, of no popularity: to the first token of an adapter behind `seq_len` tokens that
                    were just answered without one. The only work of `..._cached`, as passes repeat their prompts.
    stream          `output_throughput` of a queue of chats; `first_pass`: of its first requests, to warm up.
    company         one request, `repeats` times in random batches of others; `same_tokens`, `same_answers`: share of
                    its most frequent tokens, and with their log-probabilities.
    N in flight     of servers: the next request is sent when one ends (`in_flight`).
    R requests/s    of servers: Poisson arrivals (`rates`), whether others are answered or not; with `workload=trace
                    workload.path=FILE`, which is for loads alone, those of a trace at this rate.
    tokens          `first_token_alone`, `same_alone`: share of a mixed batch that begins as alone, and of tokens before
                    the first difference; `first_token_reference`: as our engine has; `first_token_lead`: largest
                    log-probability by which a first token is ahead of our engine's. `start`: from checkpoint to engine.
                    With too few equal first tokens a system has no rows.

Loads count times from the due time of a request, tokens by the usage at the end of a stream, and errors by kind, whose
tokens do not count. `ended_early`: right answers of fewer tokens, where no field forbids that. `client_is_bottleneck`:
1 where this client's event loop was late by 5 ms and a tenth of the time to first token.

Work of a server here is other work to the witnesses of `harness.passes`, which mark its rows; `scale.tries=0` saves the
repeats. Cost: at scale=gpu with Llama-2 7B on an H200, expected: three minutes per system; 30 GB of disk and of memory.
On a CPU scale=smoke alone, that it runs, and a URL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import Field
from tqdm import tqdm

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import by_cell, model_settings
from experiments.harness.schema import Count, Counts, Seconds
from experiments.servers.stream import NONE, Stream, companies, ids, longest, stream_lengths
from experiments.servers.systems import CACHED, HOW_TO_GET_VLLM, PUNICA, SYSTEMS, versions
from experiments.workload import popularity
from experiments.workload.arrivals import Span
from experiments.workload.traces import TRACE

if TYPE_CHECKING:
    from experiments.servers.bench import Bench
    from experiments.servers.served import Served

TOKENS, DECODE, PROMPT, SWITCH = "tokens", "decode", "prompt", "switch"
STREAM, COMPANY, LOAD = "stream", "company", "load"
"""Methods of `servers.worker.Measurement`; panels, but for loads, which have one each."""
METRICS = {DECODE: "step_latency", PROMPT: "prompt_latency", SWITCH: "switch_latency"}
ASKED, SWITCHES = 4, 1 << 20
"""Tokens behind the context of a switch, and the first seed of its prompts."""
Part = Literal["decode", "prompt", "switch", "stream", "company", "load"]
Pair = Annotated[list[Count], Field(min_length=2, max_length=2)]
Positive = Annotated[float, Field(gt=0)]


class ServersConf(FigureConf):
    url: str = ""  # http://host:port of any server, which is measured alone
    url_adapters: list[str] = []  # model names; none: all that /v1/models lists with a parent
    fields: list[Literal["ignore_eos", "min_tokens"]] = ["ignore_eos", "min_tokens"]  # those that the URL has
    vllm_python: Path | None = None  # an interpreter that has vLLM; null: ours alone
    parts: list[Part] = list(get_args(Part))
    adapters: Count
    batch_size: Count
    contexts: Counts  # mean cached tokens of decode steps, and tokens of a prompt
    new_tokens: Pair  # of the shorter and the longer requests
    rounds: Count = 3
    requests: Count  # of the stream
    lengths: Pair  # mean prompt and output of a chat
    warm: Count  # requests of the stream's first pass
    in_flight: list[Count]
    rates: list[Positive]
    before: Seconds  # of a load: until it is measured ...
    seconds: Positive  # ... measured ...
    after: Seconds  # ... and longest wait for its last answers
    check: Pair  # requests, and new tokens of each
    repeats: Count  # of the request in company
    check_prompt: Count

    @property
    def span(self) -> Span:
        return Span(self.before, self.seconds, self.after)

    def loads(self) -> dict[str, float]:
        """Return the loads by panel: requests in flight (int), and per second (float)."""
        if LOAD not in self.parts:
            return {}
        return {f"{n} in flight": n for n in self.in_flight} | {f"{rate:g} requests/s": rate for rate in self.rates}

    def sizes_of_work(self) -> dict[str, Any]:
        """Return what decides the work of an engine, with the most tokens of a request, in whole blocks."""
        decode = max(self.contexts) + max(ASKED, (self.new_tokens[1] - self.new_tokens[0] + 1) // 2)
        stream, checked = longest(*self.lengths), self.check_prompt + sum(self.check)
        names = {"adapters", "batch_size", "contexts", "new_tokens", "requests", "lengths", "warm", "rounds", "check",
                 "check_prompt", "repeats"}  # fmt: skip
        return {**self.model_dump(include=names), "max_model_len": -(-(max(decode, stream, checked) + 1) // 16) * 16}


class Servers(Experiment):
    """Steps, prompts, streams, loads and tokens (the panels) by popularity and system."""

    name, figure, order, conf, takes_trace = "ext_servers", "ext servers", 291, ServersConf, True
    reads = ("model", "workload", "adapters.ranks", "adapters.seed")
    clock, drawn_by, passes = "host_clock", "serving.draw_servers", 1

    def known_systems(self, cfg: Config) -> Sequence[str]:
        return list(SYSTEMS)

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(ServersConf, cfg.figure)
        loads = [(panel, workload, None) for workload in cfg.workload.names for panel in figure.loads()]
        if figure.url:
            server = _url(cfg).server
            check(cfg, len(server.adapters), f"{server.url} has")
            settings = {"server": asdict(server), "stream": asdict(_stream(cfg, NONE, ())),
                        "load": [*astuple(figure.span)[:-1], figure.fields]}  # fmt: skip
            return [
                Point(panel, server.label, workload, server.base, settings=settings | _of_trace(cfg, workload))
                for panel, workload, _ in loads
            ]
        check(cfg, figure.adapters, "figure.adapters has")
        if cfg.hardware.device == "cpu" and cfg.scale.name != "smoke":
            self._say("on a CPU only figure.url= is measured, a server that runs (scale=smoke tries the rest)")
            return []
        names = (NONE, *(name for name in cfg.workload.names if name != TRACE))  # a trace is a load
        steps = [
            (panel, name, size)
            for panel, size, name in product(METRICS, figure.contexts, names)
            if panel != SWITCH or name == NONE
        ]
        cells = [(TOKENS, NONE, None), (COMPANY, NONE, None), *steps, *((STREAM, name, None) for name in names), *loads]
        wanted, model, rank = {TOKENS, *figure.parts, *figure.loads()}, cfg.model.name, max(cfg.adapters.ranks)
        return [
            Point(panel, system, workload, model, figure.batch_size, size, rank, _settings(cfg, system, workload))
            for system in self._possible(cfg)
            for panel, workload, size in cells
            if panel in wanted
            and panel not in ((*METRICS, COMPANY) if SYSTEMS[system].is_server else figure.loads())
            and (panel in (TOKENS, SWITCH) or not system.endswith(CACHED))
        ]

    def _possible(self, cfg: Config) -> list[str]:
        """Systems that have an interpreter, ours first. `ConfigError` where none of those asked for has one."""
        ours = [name for name in cfg.system.names if SYSTEMS[name].engine == PUNICA]
        others = [name for name in cfg.system.names if name not in ours]
        if not others or cast(ServersConf, cfg.figure).vllm_python:
            return ours + others
        text = f"figure.vllm_python is empty, so {', '.join(others)} cannot run: {HOW_TO_GET_VLLM}"
        if not ours:
            raise ConfigError(text)
        self._say(text)
        return ours

    def _say(self, text: str) -> None:
        tqdm.write(f"{self.name}: {text}", file=sys.stderr)

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """All points of a system, which one process measures; those of a URL one by one."""
        return by_cell(points, *(("panel", "workload", "seq_len") if points[0].system in SYSTEMS else ()))

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        figure, system = cast(ServersConf, cfg.figure), points[0].system
        if figure.url:
            served = self.kept(figure.url, lambda: _url(cfg))
            loaded = served.load(**_loads(cfg, points, served.server.adapters))["readings"]
            found = [loaded[point.panel, point.workload] for point in points]
            fields = " and ".join(sorted(figure.fields)) or "neither ignore_eos nor min_tokens: answers may end early"
            engine = f"{system}; {len(served.server.adapters)} adapters; {fields}"
        else:
            from experiments.servers.bench import Bench

            ranks, seed, sizes = cfg.adapters.ranks, cfg.adapters.seed, figure.sizes_of_work()
            about = cfg.model, cfg.hardware.device, cfg.hardware.threads or 1, ranks, seed, sizes, figure.vllm_python
            bench = self.kept((cfg.model.name, *ranks, seed), lambda: Bench(*about))
            lines = bench.run(system, _parts(cfg, points, bench))
            engines = [name for name, one in SYSTEMS.items() if one.engine == PUNICA and not one.is_server]
            reference = next((name for name in cfg.system.names if name in engines), engines[0])
            tokens = [Reading("start", lines[0]["seconds"], "s"), *bench.shares(system, lines[1], reference)]
            found = [tokens if point.panel == TOKENS else _readings(figure, point, lines) for point in points]
            engine = f"{lines[0]['about']}: {SYSTEMS[system].described()}"
        return [[replace(reading, engine=engine) for reading in readings] for readings in found]


def check(cfg: Config, there: int, where: str) -> None:
    """`ConfigError` for sizes that do not fit each other, or the adapters that are `there`; Distinct's take turns."""
    figure, needed = cast(ServersConf, cfg.figure), dict[str, int]()
    rows, (short, long), longest = figure.batch_size, figure.new_tokens, figure.sizes_of_work()["max_model_len"]
    for name in cfg.workload.names if figure.loads() else ():
        turns = max(figure.in_flight, default=1)
        if name == TRACE:
            needed[name] = len({*cfg.workload.trace(figure.requests).adapters})
        else:
            needed[name] = turns if name == "Distinct" else popularity(name).number_of_adapters(figure.requests)
    most = max(needed, key=lambda name: needed[name], default=NONE)
    for is_right, text in (
        (rows <= short < long, f"new_tokens={figure.new_tokens} must ascend from figure.batch_size={rows} or more: one "
         "request joins per step, and the batch must be full"),
        (min(figure.contexts) > (short + long) // 2, f"contexts={figure.contexts} must be above {(short + long) // 2}, "
         "the mean of figure.new_tokens: the rest is the prompt"),
        (figure.adapters >= rows, f"adapters={figure.adapters} must be at least figure.batch_size={rows}: Distinct has "
         "one for every request"),
        (figure.url or longest <= cfg.model.max_position_embeddings, f"contexts and figure.lengths have requests of "
         f"{longest} tokens, above the {cfg.model.max_position_embeddings} of {cfg.model.name}: choose shorter ones"),
        (needed.get(most, 0) <= there, f"in_flight={figure.in_flight} and figure.requests={figure.requests} of {most} "
         f"need {needed.get(most)} adapters, {where} {there}: choose fewer, or leave it out (workload=)"),
    ):  # fmt: skip
        if not is_right:
            raise ConfigError(f"figure.{text}")


def _url(cfg: Config) -> Served:
    from experiments.servers.client import KEY, look_up
    from experiments.servers.served import Served

    figure, key = cast(ServersConf, cfg.figure), os.environ.get(KEY, "")
    return Served(look_up(figure.url, key, figure.url_adapters), key, figure.fields)


def _stream(cfg: Config, workload: str, adapters: Sequence[str], repeat: int = 0) -> Stream:
    figure, seed = cast(ServersConf, cfg.figure), cfg.adapters.seed + repeat
    trace = cfg.workload.trace(figure.requests) if workload == TRACE else None
    return Stream(workload, adapters, figure.requests, figure.lengths, cfg.model.vocab_size, seed, trace)


def _of_trace(cfg: Config, workload: str) -> dict[str, str]:
    return {"trace": cfg.workload.trace(cast(ServersConf, cfg.figure).requests).digest} if workload == TRACE else {}


def _settings(cfg: Config, system: str, workload: str) -> dict[str, Any]:
    figure, about = cast(ServersConf, cfg.figure), SYSTEMS[system]
    engine = [versions(about, figure.vllm_python), about.described()]
    load: dict[str, Any] = {"load": list(astuple(figure.span)[:-1])} if about.is_server else {}
    load |= _of_trace(cfg, workload)
    sizes = figure.sizes_of_work() | ({"ranks": cfg.adapters.ranks} if len(cfg.adapters.ranks) > 1 else {})
    return {"model": model_settings(cfg.model), "sizes": sizes, "engine": engine, "seed": cfg.adapters.seed, **load}


def _loads(cfg: Config, points: Sequence[Point], adapters: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `Served.load` that measure those of `points` that are loads; empty without any."""
    figure = cast(ServersConf, cfg.figure)
    loads, points = figure.loads(), [point for point in points if point.panel in figure.loads()]
    streams = {point.workload: _stream(cfg, point.workload, adapters, point.repeat) for point in points}
    return {"streams": streams, "loads": {point.panel: loads[point.panel] for point in points}, "span": figure.span}


def _parts(cfg: Config, points: Sequence[Point], bench: Bench) -> list[tuple[str, dict[str, Any]]]:
    figure, parts = cast(ServersConf, cfg.figure), list[tuple[str, dict[str, Any]]]()
    rows, mean = figure.batch_size, sum(figure.new_tokens) // 2
    names = dict.fromkeys(point.workload for point in points if point.panel in (*METRICS, STREAM))
    full = {name: ids(name, rows, figure.adapters) for name in names}
    for panel, size in dict.fromkeys((point.panel, point.seq_len or 0) for point in points if point.panel in METRICS):
        if panel == SWITCH:  # in no cache from another part
            lengths = {"prompts": size, "asked": ASKED}
            turns = {name: bench.prompts([n] * (figure.rounds + 1), SWITCHES + n) for name, n in lengths.items()}
            parts.append((panel, {"context": size, **turns}))
            continue
        given = {"context": size, "cases": full}
        if panel == PROMPT:
            given |= {"prompts": bench.prompts([size] * rows, size)}
        else:
            given |= {"prompts": bench.prompts([size - mean] * rows, size), "new_tokens": figure.new_tokens}
        parts.append((panel, given))
    if any(point.panel == COMPANY for point in points):
        parts.append((COMPANY, {**bench.check, "batches": companies(figure.check[0], rows, figure.repeats)}))
    if any(point.panel == STREAM for point in points):
        prompts, new = zip(*stream_lengths(figure.requests, *figure.lengths), strict=True)
        cases = {name: ids(name, figure.requests, figure.adapters) for name in names}
        given = {"prompts": bench.prompts(prompts, 1), "cases": cases, "new_tokens": list(new), "warm": figure.warm}
        parts.append((STREAM, given))
    loads = _loads(cfg, points, list(bench.adapters))
    return [*parts, (LOAD, loads)] if loads["loads"] else parts


def _readings(figure: ServersConf, point: Point, lines: Sequence[dict[str, Any]]) -> list[Reading]:
    part = LOAD if point.panel in figure.loads() else point.panel
    line = next(one for one in lines if (one["part"], one.get("context")) == (part, point.seq_len))
    if part == LOAD:
        return list(line["readings"][point.panel, point.workload])
    if part == COMPANY:
        return [Reading(f"same_{name}", line[name], "share") for name in ("tokens", "answers")]
    seconds = line["seconds"][point.workload]
    if part in METRICS:
        return sampled(METRICS[part], [1e3 * value for value in seconds], "ms")
    prompt, output = map(sum, zip(*stream_lengths(figure.requests, *figure.lengths), strict=True))
    return [
        *sampled("output_throughput", [output / value for value in seconds], "token/s"),
        Reading("first_pass", line["first"][point.workload], "s"),
        Reading("output_tokens", output, "tokens", "count"),
        Reading("prompt_tokens", prompt, "tokens", "count"),
    ]


EXPERIMENT = main(Servers, __name__)
