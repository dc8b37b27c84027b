"""Extension: any server that has OpenAI's API and serves adapters by model name, under the paper's workloads.

Claim: none of the paper's; it had no such test. It compares servers: this repository's, vLLM, SGLang, LoRAX. Expected
shape: latencies flat up to a knee and steep behind it; a server that batches one adapter at a time has its knee early
under Distinct. Start a server, then point this at it::

    python -m punica.serve CHECKPOINT --adapter a=FOLDER --adapter b=FOLDER ... --port 8000
    python -m vllm.entrypoints.openai.api_server --model CHECKPOINT --enable-lora --max-loras 32 --max-lora-rank 16 \\
        --max-num-seqs 32 --no-enable-prefix-caching --lora-modules a=FOLDER b=FOLDER ... --port 8000

    python -m experiments.ext_server figure.url=http://127.0.0.1:8000 scale=gpu
    python -m experiments.ext_server figure.url=http://127.0.0.1:8000 'figure.rates=[1,2,4]' workload=zipf

    url          address of the server; without it nothing is measured, also not by `make reproduce`
    adapters     model names; by default all that /v1/models lists with a parent. Distinct needs one for each of
                 `requests`, others fewer
    server       name in rows, before the version; by default what /v1/models says (`owned_by`)
    loads        `poisson`: arrivals at each of `rates`, in requests per second, whether others are answered or not;
                 `in_flight`: each number in `in_flight` of requests under way, the next one sent when one ends
    requests     length of the stream (`systems.stream`): adapters and lengths, which come again and again; prompts
                 are new each time, so that no server finds them in its cache
    lengths, max_len    as in `ext_latency_under_load`
    prompts      `ids`: random token ids below `vocab_size`; `text`: as many words, for servers that take no ids (LoRAX)
    seed         of arrivals and prompts
    warm, seconds, drain    see `workload.arrivals.Span`

An API key is taken from the environment's SERVER_API_KEY alone, and is in no row. Answers are greedy. `ignore_eos` and
`min_tokens` are sent if the server takes them, and column `engine` says which: with neither, answers may end early
(`ended_early`), and servers are comparable by tokens alone.

    output_throughput, request_rate: tokens and ended requests per second of the measured time. Tokens are those of the
                  usage at the end of a stream, shared out over its pieces; of an answer with an error none counts
    time_to_first_token, time_per_output_token, request_latency: median, p10, p90, _mean, _p95, _max, and _p99 of 100
                  requests or more, of right answers; from the time at which a request should arrive to its first piece.
                  First tokens also of unfinished requests, which waited at least to the end of `drain`
    requests, errors, errors_*: of those that began in the measured time: errors_http_429 and other states,
                  errors_no_connection, errors_broken_stream, errors_error_in_stream, errors_no_usage,
                  errors_wrong_token_count (usage against what was asked for, and against the pieces),
                  errors_unfinished at the end of `drain`. Nothing is sent again
    client_lag, client_is_bottleneck: lateness of this client's event loop, and 1 where that is beyond 5 ms and a tenth
                  of the time to first token: such latencies are the client's, drawn hollow

Column `hardware` is this machine, wherever the server runs. A server on the same machine is other work to the witnesses
of `harness.passes`, which mark its rows; `scale.tries=0` saves the repeats.

Cost: for each popularity and load `warm` + `seconds`, and at most `drain`: at scale=gpu 25 loads of 23 to 83 seconds in
each pass.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from tqdm import tqdm

from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import Count, Counts
from experiments.workload import popularity
from experiments.workload.arrivals import Span

if TYPE_CHECKING:
    from experiments.http_load.about import Server
    from experiments.http_load.client import Job
    from experiments.http_load.loops import Run

POISSON, IN_FLIGHT = "poisson", "in_flight"
IDS, TEXT = "ids", "text"
KEY = "SERVER_API_KEY"
"""Environment variable with the API key."""
MEASURED = "punica.serve"
"""Program whose code is part of the source hash (`harness.source`): rows of our server measure it."""
WORDS = ("the", "of", "and", "to", "in", "is", "it", "on", "as", "at", "by", "we", "he", "or", "an", "be", "do", "so")
"""Words that are one token each in most vocabularies."""


class ServerConf(FigureConf):
    """Address of a server, its adapters, loads and the stream."""

    url: str = ""
    adapters: list[str]
    server: str = ""
    loads: list[str]
    rates: list[float]
    in_flight: Counts
    requests: Count
    lengths: str
    max_len: Count
    prompts: str
    vocab_size: Count
    seed: int = Field(0, ge=0)
    warm: float
    seconds: float
    drain: float
    sizes: dict[str, Any]


class ServerLoad(Experiment):
    """Throughput, waits and errors by load (the panels), server and popularity."""

    name, figure, order, conf = "ext_server", "ext server", 300, ServerConf
    reads = ("workload",)
    clock, drawn_by = "host_clock", ""

    def points(self, cfg: Config) -> list[Point]:
        from experiments.http_load.about import look_up

        figure = cast(ServerConf, cfg.figure)
        check(figure)
        if not figure.url:
            tqdm.write(f"{self.name}: figure.url is empty, so no server is measured; --help says how", file=sys.stderr)
            return []
        server = look_up(figure.url, key(), figure.server, figure.adapters)
        check_adapters(cfg, server)
        loads: list[tuple[str, int | None]] = []
        loads += [(f"{rate:g} requests/s", None) for rate in figure.rates if POISSON in figure.loads]
        loads += [(f"{number} in flight", number) for number in figure.in_flight if IN_FLIGHT in figure.loads]
        settings = _settings(figure, server)
        return [
            Point(panel, server.label, workload, server.base, number, figure.max_len, None, settings)
            for workload in cfg.workload.names
            for panel, number in loads
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.http_load.readings import run_readings

        figure = cast(ServerConf, cfg.figure)
        server, fields = self.kept(figure.url, lambda: _tried(figure))
        run = asyncio.run(_load(figure, server, fields, point))
        found = run_readings(run)
        if point.batch_size is None:
            found.append(Reading("offered_rate", rate_of(point.panel), "request/s"))
        engine = _described(server, fields, figure.prompts)
        return [replace(reading, engine=engine) for reading in found]


def key() -> str:
    """Return the API key, an empty text without one."""
    return os.environ.get(KEY, "")


def rate_of(panel: str) -> float:
    """Return the rate of a panel, in requests per second."""
    return float(panel.split()[0])


def check(figure: ServerConf) -> None:
    """`ConfigError` for a choice that is unknown or out of range."""
    for name, value, known in (
        *(("loads", load, (POISSON, IN_FLIGHT)) for load in figure.loads),
        ("prompts", figure.prompts, (IDS, TEXT)), ("lengths", figure.lengths, ("released", "stated")),
    ):  # fmt: skip
        if value not in known:
            raise ConfigError(f"figure.{name} has {value!r}, must be of {', '.join(known)}")
    if not figure.loads or (POISSON in figure.loads and not figure.rates):
        raise ConfigError("figure.loads or figure.rates is empty: choose figure.loads=[poisson] 'figure.rates=[1,2,4]'")
    for name, values in (("rates", figure.rates), ("in_flight", figure.in_flight), ("seconds", [figure.seconds])):
        if min(values, default=1) <= 0:
            raise ConfigError(f"figure.{name}={values} must be above 0")
    if min(figure.warm, figure.drain) < 0:
        raise ConfigError(f"figure.warm={figure.warm} and figure.drain={figure.drain} must be 0 or more")
    if figure.max_len < 4:
        raise ConfigError(f"figure.max_len={figure.max_len} must be at least 4: a prompt and two new tokens")


def check_adapters(cfg: Config, server: Server) -> None:
    """`ConfigError` for a popularity that names more adapters than the server has."""
    figure, there = cast(ServerConf, cfg.figure), len(server.adapters)
    for workload in cfg.workload.names:
        needed = popularity(workload).number_of_adapters(figure.requests)
        if needed > there:
            raise ConfigError(
                f"{workload} of figure.requests={figure.requests} requests has {needed} adapters, {server.url} serves "
                f"{there}: load more there, choose figure.requests={there}, or leave that popularity out (workload=)"
            )


def jobs(figure: ServerConf, workload: str, adapters: tuple[str, ...], seed: int) -> Iterator[Job]:
    """Yield requests without end: lengths and adapters of the paper's stream again and again, prompts that are new."""
    import numpy as np

    from experiments.http_load.client import Job
    from experiments.systems.stream import paper_stream

    stream = paper_stream(workload, figure.requests, figure.max_len, figure.vocab_size, figure.lengths)
    draws = np.random.Generator(np.random.PCG64(seed))
    while True:
        for one in stream:
            if figure.prompts == IDS:
                prompt = draws.integers(figure.vocab_size, size=len(one.prompt)).tolist()
            else:
                prompt = " ".join(draws.choice(WORDS, size=len(one.prompt)))
            yield Job(adapters[one.adapter_id - 1], prompt, one.new_tokens)


async def _load(figure: ServerConf, server: Server, fields: frozenset[str], point: Point) -> Run:
    from experiments.http_load.client import Client
    from experiments.http_load.loops import closed_loop, open_loop

    span, seed = Span(figure.warm, figure.seconds, figure.drain), figure.seed + point.repeat
    stream = jobs(figure, point.workload, server.adapters, seed)
    async with Client(server, key(), fields) as client:
        if point.batch_size is not None:
            return await closed_loop(client, stream, point.batch_size, span)
        return await open_loop(client, stream, span.arrivals(rate_of(point.panel), seed).tolist(), span)


def _tried(figure: ServerConf) -> tuple[Server, frozenset[str]]:
    """Return the server and the fields that it takes, after one request to it."""
    from experiments.http_load.about import look_up
    from experiments.http_load.fields import accepted

    server = look_up(figure.url, key(), figure.server, figure.adapters)
    first = next(jobs(figure, "Identical", server.adapters, figure.seed))
    return server, accepted(server, key(), first, figure.warm + figure.drain)


def _described(server: Server, fields: frozenset[str], prompts: str) -> str:
    taken = " and ".join(sorted(fields)) or "neither ignore_eos nor min_tokens: answers may end early"
    version = "" if server.version else " of unknown version"
    return f"{server.label}{version}; {len(server.adapters)} adapters; {taken}; prompts as {prompts}"


def _settings(figure: ServerConf, server: Server) -> dict[str, Any]:
    return {
        "server": [server.url, server.version, server.base, *server.adapters],
        "stream": [figure.lengths, figure.requests, figure.max_len, figure.prompts, figure.vocab_size, figure.seed],
        "seconds": [figure.warm, figure.seconds, figure.drain],
    }


EXPERIMENT = ServerLoad()

if __name__ == "__main__":
    main(EXPERIMENT)
