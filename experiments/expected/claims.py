"""Ranges of the quantities behind the claims, from the spans over repeats that their verdicts state."""

import re
from collections.abc import Sequence

import pandas as pd

from experiments.claims import Verdict
from experiments.expected.ranges import FLOOR, TIMES

COLUMNS = ["claim", "quantity", "value", "low", "high", "verdict"]


def claim_ranges(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Build a line per quantity of each of the ``verdicts`` that has some, with the columns `COLUMNS`.

    A quantity may be zero or negative, so its range is around the value and not a ratio.
    """
    lines = []
    for verdict in verdicts:
        spans = _parts(verdict.interval)
        for name, text in _parts(verdict.quantities).items():
            value = float(text)
            ends = [float(end) for end in re.split(" to ", spans[name])] if name in spans else [value]
            width = max(FLOOR * abs(value), TIMES * max(abs(end - value) for end in ends))
            lines.append((verdict.id, name, value, value - width, value + width, verdict.verdict))
    return pd.DataFrame(lines, columns=COLUMNS)


def _parts(text: str) -> dict[str, str]:
    return dict(part.rsplit("=", 1) for part in text.split("; ") if part)
