"""The engine of a server's command line, alone: texts of some requests, and throughput with requests in flight.

    python -m experiments.own_server.worker job.json found.json
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from experiments.http_load.client import Job
from experiments.own_server.stream import Stream
from punica.adapters import LoRARequest
from punica.engine import Engine, Request, SamplingParams
from punica.serve.cli import parse
from punica.serve.launch import build_of, settings_of


def texts(engine: Engine, adapters: Mapping[str, LoRARequest], jobs: list[Job]) -> list[str]:
    """Return the text of each request, generated alone."""
    return [
        str(engine.generate([job.prompt], adapters.get(job.model), params_of(job))[0].text) for job in jobs
    ]  # fmt: skip


def saturated(
    engine: Engine, adapters: Mapping[str, LoRARequest], jobs: Iterator[Job], in_flight: int, warm: float,
    seconds: float,
) -> dict[str, float]:  # fmt: skip
    """Keep `in_flight` requests in the engine; return tokens and ended requests per second, after `warm` seconds.

    RuntimeError: a request fails.
    """
    numbers, tokens, ended = itertools.count(), 0, 0

    def add(count: int) -> None:
        for job in itertools.islice(jobs, count):
            name = f"request-{next(numbers)}"
            engine.add_request(Request(name, cast("list[int]", job.prompt), params_of(job), adapters.get(job.model)))

    began = time.perf_counter()
    add(in_flight)
    while (now := time.perf_counter() - began) < warm + seconds:
        output = engine.step()
        if output.failed:
            raise RuntimeError(f"a request failed: {output.failed[0].error}")
        now = time.perf_counter() - began
        if warm <= now < warm + seconds:
            tokens, ended = tokens + len(output.tokens), ended + len(output.finished)
        add(len(output.finished))
    return {"output_throughput": tokens / seconds, "request_rate": ended / seconds}


def params_of(job: Job) -> SamplingParams:
    """Return greedy sampling to the job's number of tokens, asked for as the server's client does."""
    return SamplingParams(job.new_tokens, ignore_eos=True, min_tokens=job.new_tokens)


def main() -> None:
    """Do the job of the command line."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options = parse(job["arguments"])
    settings = settings_of(options)
    engine = build_of(options, settings)()
    adapters = {adapter.lora_name: adapter for adapter in settings.adapters}
    found: dict[str, Any] = {"texts": texts(engine, adapters, [Job(*one) for one in job["check"]])}
    if job["stream"] is not None:
        jobs = Stream(**job["stream"]).jobs()
        found |= saturated(engine, adapters, jobs, job["in_flight"], job["warm"], job["seconds"])
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
