"""Traces of production, in files that a user gives by path; none is part of this repository.

Mooncake (arXiv 2407.00079): JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for
each 512 tokens of the prompt. Equal ids are equal tokens behind equal tokens.
"""

import json
from pathlib import Path
from typing import NamedTuple

BLOCK_TOKENS = 512


class TracedPrompt(NamedTuple):
    """A prompt of a trace; ``blocks``: ids of its full blocks."""

    arrival_s: float
    blocks: tuple[int, ...]


def read_mooncake(path: Path) -> list[TracedPrompt]:
    """Read a trace. OSError; ValueError names the first line that is no request of one, and what is wrong."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            about = json.loads(line)
            blocks = tuple(map(int, about["hash_ids"][: int(about["input_length"]) // BLOCK_TOKENS]))
            found.append(TracedPrompt(float(about["timestamp"]) / 1e3, blocks))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"line {number} of {path} is no request of Mooncake's format ({type(error).__name__}: {error}); give a "
                "file of JSON lines with timestamp, input_length and hash_ids"
            ) from None
    return found
