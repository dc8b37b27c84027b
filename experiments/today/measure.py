"""Measurements of one engine, the same for all: standard library alone, since any interpreter runs them.

    python -m experiments.today.worker_vllm job.json lines.jsonl

A job names folders, limits, options of the engine, prompts as token ids, and parts; each part gives one JSON line. All
requests are greedy, ignore end tokens, and wait from the start.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

DECODE, STREAM, REGISTRATION, TOKENS = PARTS = "decode", "stream", "registration", "tokens"
"""Methods of `Measurement`."""
NONE = ""
"""Popularity of requests without adapters."""
Cases = dict[str, list[int]]
"""Popularity -> adapter id of each request; 0 is no adapter."""


class PeerEngine(Protocol):
    """An engine with the adapters 1, 2, ... of a job."""

    about: str
    """Versions and settings."""

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        """Continue every prompt by exactly its number of new tokens."""

    def register(self, adapter_id: int) -> None:
        """Read an adapter's folder into host memory."""

    def forget(self, adapter_id: int) -> None:
        """Drop a registered adapter."""


class Measurement:
    """Parts of a job on one engine."""

    def __init__(self, engine: PeerEngine, job: dict[str, Any]) -> None:
        self.engine, self.job = engine, job

    def tokens(self, prompts: list[list[int]], adapters: list[int], new_tokens: int) -> dict[str, Any]:
        """Generate for all requests in one batch, for each alone, and in one batch without adapters."""
        counts = [new_tokens] * len(prompts)
        together = self._timed(prompts, adapters, counts)[1]
        alone = [self._timed([p], [a], [new_tokens])[1][0] for p, a in zip(prompts, adapters, strict=True)]
        plain = self._timed(prompts, [0] * len(prompts), counts)[1]
        return {"together": together, "alone": alone, "plain": plain}

    def decode(self, context: int, prompts: list[list[int]], cases: Cases, new_tokens: list[int]) -> dict[str, Any]:
        """Time a full batch that decodes, per step: two lengths of the same requests, subtracted.

        Prefill, and steps in which the batch fills or empties, are in both and drop out. `context` is the mean number
        of cached tokens in the steps that remain.
        """
        short, long = new_tokens
        steps: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(self.job["rounds"] + 1):  # the first is to warm up
            for name in in_turns(cases, turn):
                seconds = {
                    count: self._timed(prompts, cases[name], [count] * len(prompts))[0]
                    for count in in_turns([short, long], turn)
                }
                if turn:
                    steps[name].append((seconds[long] - seconds[short]) / (long - short))
        return {"context": context, "steps": steps}

    def registration(self, adapters: int) -> dict[str, Any]:
        """Time the registration of all adapters, none of which the engine knows."""
        seconds = []
        for _ in self._rounds(REGISTRATION):
            for adapter_id in range(1, adapters + 1):
                self.engine.forget(adapter_id)
            began = time.perf_counter()
            for adapter_id in range(1, adapters + 1):
                self.engine.register(adapter_id)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def stream(self, prompts: list[list[int]], cases: Cases, new_tokens: list[int], warm: int) -> dict[str, Any]:
        """Time all requests of a queue, from the call to the last token; `first`: a pass over `warm` of them before."""
        first = {name: self._timed(prompts[:warm], ids[:warm], new_tokens[:warm])[0] for name, ids in cases.items()}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for turn in self._rounds(STREAM):
            for name in in_turns(cases, turn):
                seconds[name].append(self._timed(prompts, cases[name], new_tokens)[0])
        return {"seconds": seconds, "first": first}

    def _rounds(self, part: str) -> Iterator[int]:
        """Yield rounds of a part: one, and up to the job's number of them that will end within its seconds."""
        began, longest = time.perf_counter(), 0.0
        for turn in range(self.job["rounds"]):
            start = time.perf_counter()
            if turn and start - began + longest > self.job["seconds"][part]:
                return
            yield turn
            longest = max(longest, time.perf_counter() - start)

    def _timed(self, prompts: list[list[int]], adapters: list[int], counts: list[int]) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        tokens = self.engine.generate(prompts, adapters, counts)
        seconds = time.perf_counter() - began
        if [len(one) for one in tokens] != counts:
            raise RuntimeError(f"asked for {counts} new tokens, got {[len(one) for one in tokens]}")
        return seconds, tokens


def in_turns(cases: Any, turn: int) -> list[Any]:
    """Return `cases` forth in even turns and back in odd ones, which cancels a drift."""
    return list(cases)[:: -1 if turn % 2 else 1]


def serve(build: Callable[[dict[str, Any]], PeerEngine]) -> None:
    """Do the job of the command line on the engine that `build` makes of it; write a line per part."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began = time.perf_counter()
    engine = build(job)
    lines = [{"part": "start", "seconds": time.perf_counter() - began, "about": engine.about}]
    measurement = Measurement(engine, job)
    for part, given in job["parts"]:
        lines.append({"part": part, **getattr(measurement, part)(**given)})
    Path(sys.argv[2]).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
