"""Traces of production as request streams: files that a user gives by path, none part of this repository but `SAMPLE`.

    lora      this repository's: requests of tenants, drawn from ServeGen's clients (`workload.servegen`)
    azure     Azure LLM inference 2023, conversations or code (CC-BY)
    burstgpt  BurstGPT (arXiv 2401.17644), with sessions or without
    mooncake  Mooncake (arXiv 2407.00079): JSON lines, in `hash_ids` one id for each 512 tokens of the prompt. Equal ids
              are equal tokens behind equal tokens

Adapters are given by a rule: of the client, of the session, or by a popularity.
"""

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.workload.lengths import RequestLengths, rescaled
from experiments.workload.popularity import WORKLOADS, popularity

TRACE = "Trace"  # the workload that is a file
SAMPLE = Path(__file__).with_name("lora-trace-v1.csv")
BLOCK_TOKENS = 512
FITTING = 95  # percent of requests that are scaled to fit a model; the rest are cut


class Columns(NamedTuple):
    """Names of a format's columns, empty where it has none, and the seconds of its unit of time."""

    arrival: str
    prompt: str
    output: str
    client: str = ""
    session: str = ""
    blocks: str = ""
    unit_s: float = 1.0


FORMATS = {
    "lora": Columns("arrival_s", "prompt_tokens", "output_tokens", client="client"),
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens", client="Model", session="Session ID"),
    "mooncake": Columns("timestamp", "input_length", "output_length", blocks="hash_ids", unit_s=1e-3),
}


class TracedRequest(NamedTuple):
    """A request of a trace, in seconds and tokens; ``blocks``: ids of its prompt's full blocks."""

    arrival: float
    prompt: int
    output: int
    client: str = ""
    session: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The first ``most`` requests of a file (None: all), with adapters by ``rule``; read when first needed."""

    path: Path
    form: str
    rule: str
    most: int | None = None

    @cached_property
    def requests(self) -> list[TracedRequest]:
        return read_trace(self.path, self.form, self.most)

    @property
    def name(self) -> str:
        return f"{self.path.stem} by {self.rule}"

    @property
    def digest(self) -> str:
        """Twelve hex digits over requests and adapters."""
        return hashlib.sha256(repr((self.requests, self.adapters.tolist())).encode()).hexdigest()[:12]

    @cached_property
    def adapters(self) -> NDArray[np.int64]:
        """The adapter of each request, [n], from 0 in order of first use; a request without a key has its own. The
        session of a prompt with ``blocks`` is the first one behind those that all prompts share. ValueError: no request
        has what the rule needs.
        """
        if self.rule in WORKLOADS.names():
            return popularity(self.rule).requests(len(self.requests))
        places = zip(*(request.blocks for request in self.requests), strict=False)
        common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, places))
        keys = [
            request.client if self.rule == "client" else request.session or request.blocks[common : common + 1]
            for request in self.requests
        ]
        if self.rule not in ("client", "session") or not any(keys):
            known = ", ".join(["client", "session", *WORKLOADS.names()])
            raise ValueError(f"it has no {self.rule} to give adapters by: choose workload.adapter={known}")
        own = [key or number for number, key in enumerate(keys)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(own))}
        return np.array([numbers[key] for key in own])

    def lengths(self, max_len: int) -> RequestLengths:
        """Lengths in the trace's proportions, such that `FITTING` percent fit ``max_len`` tokens; the rest are cut."""
        prompt, output = (np.array([request[field] for request in self.requests]) for field in (1, 2))
        longest = max(max_len, int(np.percentile(prompt + output, FITTING)))
        return rescaled(RequestLengths(prompt, output), max_len, longest)

    def arrivals(self, rate: float, end: float) -> NDArray[np.float64]:
        """Times in [0, ``end``) s at which requests arrive: the trace's bursts at ``rate`` per second, repeated."""
        times = np.array([request.arrival for request in self.requests])
        whole, turns = len(times) / rate, math.ceil(end * rate / len(times))
        scale = (whole - 1 / rate) / ((times[-1] - times[0]) or 1.0)
        found = (scale * (times - times[0]) + whole * np.arange(turns)[:, None]).ravel()
        return found[found < end]


def read_trace(path: Path, form: str, most: int | None = None) -> list[TracedRequest]:
    """Read the first ``most`` requests, by arrival; those without output (BurstGPT's failures) are left out. OSError;
    ValueError names file, line and column of the first that is wrong, and the remedy.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        asked = (_request(form, row, f"{path}, line {line}") for line, row in _rows(file, form))
        found = list(islice((request for request in asked if request.output), most))
    if not found:
        raise ValueError(f"{path} has no request of format {form}: choose another workload.path or workload.format")
    return sorted(found, key=lambda request: request.arrival)


def _rows(file: Any, form: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if FORMATS[form].blocks:
        for line, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
            except ValueError:
                row = None
            yield line, row if isinstance(row, dict) else {}
    else:
        reader = csv.DictReader(file)
        yield from ((reader.line_num, row) for row in reader)


def _request(form: str, row: Mapping[str, Any], where: str) -> TracedRequest:
    columns, found = FORMATS[form], dict[str, Any]()
    for name, (parse, is_right, what) in PARSERS.items():
        if column := getattr(columns, name):
            try:
                found[name] = parse(row.get(column))
            except (ValueError, TypeError, OverflowError):
                found[name] = None
            if found[name] is None or not is_right(found[name]):
                raise ValueError(
                    f"{where}, column {column}: {row.get(column)!r:.80} and not {what}; correct or remove the line, or "
                    f"choose another workload.format than {form}"
                )
    found["arrival"] *= columns.unit_s
    found["blocks"] = found.get("blocks", ())[: found["prompt"] // BLOCK_TOKENS]
    return TracedRequest(**found)


def _seconds(given: Any) -> float:
    try:
        return float(given)
    except ValueError:
        return datetime.fromisoformat(given).replace(tzinfo=UTC).timestamp()


def _whole(given: Any) -> int:
    return int(str(given))  # so that 1.5 is none


def _ids(given: Any) -> tuple[int, ...] | None:
    return tuple(map(_whole, given)) if isinstance(given, list) else None


PARSERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    "arrival": (_seconds, math.isfinite, "a time"),
    "prompt": (_whole, lambda tokens: 0 < tokens < 2**31, "a number of tokens above 0"),
    "output": (_whole, lambda tokens: 0 <= tokens < 2**31, "a number of tokens"),
    "client": (lambda given: given, bool, "a name"),
    "session": (lambda given: given or "", lambda _: True, "a name"),  # older files of BurstGPT have no such column
    "blocks": (_ids, lambda _: True, "a list of numbers"),
}
"""Field of a request -> its parser, check, and what that needs."""
