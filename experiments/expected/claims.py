"""Ranges of the quantities behind the claims, from the spans over repeats that their verdicts state."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict
from experiments.claims.finding import SIMULATED
from experiments.expected.ranges import FLOOR, floor_of
from experiments.expected.scales import FILE, Scale, read_scales

COLUMNS = ["claim", "quantity", "value", "low", "high", "verdict"]


def claim_ranges(verdicts: Sequence[Verdict], paper: Path) -> pd.DataFrame:
    """Build a line per quantity of each of the ``verdicts`` that has some, with the columns `COLUMNS`.

    Each range is on the scale of its quantity; ``paper`` is ``paper_results``, whose `FILE` has those scales.
    ValueError names claim and quantity of a value that its scale excludes.
    """
    scales, lines = read_scales(paper), []
    for verdict in verdicts:
        spans = _parts(verdict.interval)
        floor = FLOOR if verdict.kind == SIMULATED else floor_of(verdict.hardware)
        for name, value in values_of(verdict).items():
            ends = [float(end) for end in re.split(" to ", spans[name])] if name in spans else []
            try:
                low, high = scales.get((verdict.id, name), Scale()).around(value, ends, floor)
            except ValueError as error:
                raise ValueError(f"{verdict.id}, {name}: {error}; write its scale into {paper / FILE}") from None
            lines.append((verdict.id, name, value, low, high, verdict.verdict))
    return pd.DataFrame(lines, columns=COLUMNS)


def values_of(verdict: Verdict) -> dict[str, float]:
    """Map the quantities of a claim to their values."""
    return {name: float(text) for name, text in _parts(verdict.quantities).items()}


def _parts(text: str) -> dict[str, str]:
    return dict(part.rsplit("=", 1) for part in text.split("; ") if part)
