"""Files of requests: the streams of Figure 11, one per popularity, with their schema and what they were made with."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.harness.schema import ConfigError
from experiments.published.schema import ANSWER, REQUEST
from experiments.systems.stream import paper_stream
from experiments.workload import RELEASED_SEED, WORKLOADS

ABOUT = "about.json"
SCHEMAS = {"request.schema.json": REQUEST, "answer.schema.json": ANSWER}
LENGTHS = ("released", "stated")


@dataclass(frozen=True)
class Stream:
    """Choices of a stream, which decide every byte of its file.

    Attributes:
        count: requests. `max_len`: bound of prompt and output, to which lengths are scaled from 2048.
        vocab_size: token ids are below it. `lengths`: of the released generator, or with the paper's stated mean.
        rate: arrivals per second, a Poisson process; None: all wait from the start, as in Figure 11.
    """

    count: int
    max_len: int
    vocab_size: int
    lengths: str
    rate: float | None

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("max_len", 4), ("vocab_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_len > 2048:
            raise ConfigError(f"max_len={self.max_len} must be at most 2048, the released generator's")
        if self.lengths not in LENGTHS:
            raise ConfigError(f"lengths={self.lengths!r} must be one of {', '.join(LENGTHS)}")
        if self.rate is not None and not 0 < self.rate < np.inf:
            raise ConfigError(f"rate={self.rate} must be a positive number of requests per second")

    def arrivals(self) -> NDArray[np.float64]:
        """Seconds from the start at which requests arrive, [count], ascending."""
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
    texts |= {name: json.dumps(schema, indent=1) + "\n" for name, schema in SCHEMAS.items()}
    texts[ABOUT] = json.dumps({**asdict(stream), "sha256": sums}, indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written ({error.strerror}): give another folder") from None
    return [folder / name for name in texts]
