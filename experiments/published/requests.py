"""Files of requests, the streams of Figure 11, one per popularity, and of answers to them, with their schemas."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from experiments.harness.schema import ConfigError, Count, Lengths, Seconds, Settings, sentence
from experiments.systems.stream import paper_stream
from experiments.workload import RELEASED_SEED, WORKLOADS

ABOUT = "about.json"
Index = Annotated[int, Field(ge=0)]
Line = TypeVar("Line", "Request", "Answer")


class Request(Settings):
    """A request: one line of <popularity>.jsonl, in order of arrival."""

    id: Index = Field(description="place in the stream, from 0")
    arrival_s: Seconds = Field(description="seconds from the start of the run; 0: it waits from the start")
    adapter: str = Field(description="LoRA adapter that the request names")
    prompt: list[Index] = Field(min_length=1, description="token ids below the vocabulary")
    new_tokens: Count = Field(description="to generate, with no stop token")


class Answer(Settings):
    """An answer: one line per request, in any order."""

    id: Index = Field(description="of its request")
    token_s: list[Seconds] = Field(description="seconds from the start of the run at which each token came, ascending")
    error: str = Field("", description="why the request has no or too few tokens; absent after success")


class Stream(Settings):
    """Choices of a stream, which decide every byte of its file."""

    count: Count = 1000  # requests, the paper's number
    max_len: int = Field(2048, ge=4, le=2048)  # most tokens of prompt and output, to which lengths are scaled
    vocab_size: Count = 32000  # of the model, Llama 2's
    lengths: Lengths = "released"
    rate: float | None = Field(None, gt=0, allow_inf_nan=False)  # per second; null: all wait from the start

    def arrivals(self) -> NDArray[np.float64]:
        """Seconds from the start at which requests arrive, [count], ascending: a Poisson process of `rate`."""
        if self.rate is None:
            return np.zeros(self.count)
        return np.random.Generator(np.random.PCG64(RELEASED_SEED)).exponential(1 / self.rate, self.count).cumsum()

    def lines(self, popularity: str) -> Iterator[str]:
        """Yield the lines of the stream under ``popularity``."""
        jobs = paper_stream(popularity, self.count, self.max_len, self.vocab_size, self.lengths)
        for id, (job, at) in enumerate(zip(jobs, self.arrivals(), strict=True)):
            line = {"id": id, "arrival_s": round(float(at), 6), "adapter": f"adapter-{job.adapter_id}"}
            yield json.dumps({**line, "prompt": job.prompt, "new_tokens": job.new_tokens}, separators=(",", ":"))


def write_streams(stream: Stream, folder: Path) -> list[Path]:
    """Write every popularity of ``stream``, the schemas and `ABOUT` into ``folder``, which is new, empty or of this
    command; return the files.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / ABOUT).is_file())):
        raise ConfigError(f"out={folder} is there and was not written by this command: give a new folder")
    texts = {f"{name.lower()}.jsonl": "".join(f"{line}\n" for line in stream.lines(name)) for name in WORKLOADS.names()}
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    for kind in (Request, Answer):
        texts[f"{kind.__name__.lower()}.schema.json"] = json.dumps(kind.model_json_schema(), indent=1) + "\n"
    choices = stream.model_dump(include={*Stream.model_fields})
    texts[ABOUT] = json.dumps({**choices, "sha256": sums}, indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written ({error.strerror}): give another folder") from None
    return [folder / name for name in texts]


def read_lines(path: Path, kind: type[Line]) -> dict[int, Line]:
    """Read a file of JSON lines, by ``id``. ConfigError names the file, its first wrong line, and why."""
    lines: dict[int, Line] = {}
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of JSON lines") from None
    for number, text in enumerate(texts, start=1):
        where = f"{path}, line {number}"
        try:
            line = kind.model_validate(json.loads(text), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{where}: {sentence(error, kind, json.loads(text))}") from None
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON ({error}): write one object per line") from None
        if line.id in lines:
            raise ConfigError(f"{where}: id {line.id} is there twice, give each once")
        lines[line.id] = line
    if not lines:
        raise ConfigError(f"{path} is empty: give a file of JSON lines")
    return lines
