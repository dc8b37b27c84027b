"""Traces of production as request streams: files that a user gives by path, none part of this repository but `SAMPLE`.

    lora      this repository's: requests of tenants, drawn from ServeGen's clients (`commands.trace`)
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StrictInt, TypeAdapter, ValidationError

from experiments.workload.lengths import RequestLengths, rescaled
from experiments.workload.popularity import WORKLOADS, popularity

TRACE = "Trace"  # the workload that is a file
SAMPLE = Path(__file__).with_name("lora-trace-v1.csv")
BLOCK_TOKENS = 512
SESSION = "Session ID"  # older files of BurstGPT have no such column
FITTING = 95  # percent of requests that are scaled to fit a model; the rest are cut
FORMATS = {
    "lora": ("arrival_s", "prompt_tokens", "output_tokens", "client", "", ""),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", "", "", ""),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens", "Model", SESSION, ""),
    "mooncake": ("timestamp", "input_length", "output_length", "", "", "hash_ids"),
}
"""Format -> its columns of the fields of a `TracedRequest`; empty where it has none. Mooncake's time is in ms."""


def _seconds(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        at = datetime.fromisoformat(str(given))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


_Tokens = Annotated[int, BeforeValidator(lambda given: int(str(given)))]  # no true, no 2.0


class TracedRequest(NamedTuple):
    """A request of a trace, in seconds and tokens; ``blocks``: ids of its prompt's full blocks."""

    arrival: Annotated[float, BeforeValidator(_seconds), Field(gt=-1e15, lt=1e15)]
    prompt: Annotated[_Tokens, Field(gt=0, lt=2**31)]
    output: Annotated[_Tokens, Field(ge=0, lt=2**31)]
    client: Annotated[str, Field(min_length=1)] = ""
    session: Annotated[str, BeforeValidator(lambda given: given or "")] = ""
    blocks: tuple[StrictInt, ...] = ()


_REQUEST = TypeAdapter(TracedRequest)


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

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.requests, self.adapters.tolist())).encode()).hexdigest()[:12]

    @cached_property
    def adapters(self) -> NDArray[np.int64]:
        """The adapter of each request, [n], from 0 in order of first use; a request without a key has its own. The
        session of a prompt with ``blocks`` is the first one behind those that all prompts share. ValueError: no request
        has what the rule needs.
        """
        if self.rule in WORKLOADS.names():
            return popularity(self.rule).requests(len(self.requests))
        places = zip(*(one.blocks for one in self.requests), strict=False)
        common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, places))
        sessions = [one.session or one.blocks[common:][:1] for one in self.requests]
        keys: dict[str, list[Any]] = {"client": [one.client for one in self.requests], "session": sessions}
        known = [rule for rule, found in keys.items() if any(found)]
        if self.rule not in known:
            choices = ", ".join([*known, *WORKLOADS.names()])
            raise ValueError(f"it has no {self.rule} to give adapters by: choose workload.adapter={choices}")
        own = [key or number for number, key in enumerate(keys[self.rule])]
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
    """Read a file's first ``most`` requests, and sort them by arrival; those without output (BurstGPT's failures) are
    left out. OSError; ValueError names file, line and column of the first that is wrong, and the remedy.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            asked = (_request(form, row, f"{path}, line {line}") for line, row in _rows(file, form))
            found = list(islice((request for request in asked if request.output), most))
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file ({error}): choose another workload.path or workload.format") from None
    if not found:
        raise ValueError(f"{path} has no request of format {form}: choose another workload.path or workload.format")
    return sorted(found, key=lambda request: request.arrival)


def _rows(file: Any, form: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if form == "mooncake":
        return ((line, _object(text)) for line, text in enumerate(file, 1) if text.strip())
    reader = csv.DictReader(file)
    names = reader.fieldnames or FORMATS[form]  # an empty file has none
    if missing := [name for name in FORMATS[form] if name not in ("", SESSION, *names)]:
        raise ValueError(
            f"{file.name}, line 1: {names!r:.80} has no column {missing[0]}; choose another workload.path, or another "
            f"workload.format than {form}"
        )
    return ((reader.line_num, row) for row in reader)


def _object(text: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}


def _request(form: str, row: Mapping[str, Any], where: str) -> TracedRequest:
    columns = {name: column for name, column in zip(TracedRequest._fields, FORMATS[form], strict=True) if column}
    try:
        found = _REQUEST.validate_python({name: row.get(column) for name, column in columns.items()})
    except ValidationError as error:
        first = error.errors()[0]
        column = columns[str(first["loc"][0])]
        raise ValueError(
            f"{where}, column {column}: {row.get(column)!r:.80} is wrong ({first['msg']}); correct or remove the line, "
            f"or choose another workload.format than {form}"
        ) from None
    arrival = found.arrival * (1e-3 if form == "mooncake" else 1.0)
    return found._replace(arrival=arrival, blocks=found.blocks[: found.prompt // BLOCK_TOKENS])
