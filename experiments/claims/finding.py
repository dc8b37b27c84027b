"""Our value of each claim: one function per claim, which computes from rows and knows no bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from experiments.claims.rows import NotMeasured, Rows

SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True)
class Finding:
    """Our side of one claim: ``quantities`` that bounds apply to (absent where not measured), ``text`` beside them,
    ``kind`` (``simulated`` with its ``cost_model``), ``models`` measured.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = MEASURED
    models: tuple[str, ...] = ()
    cost_model: str = ""


ClaimFunction = Callable[[Rows], Finding]
CLAIMS: dict[str, ClaimFunction] = {}


def claim(id: str, /, **chosen: Any) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Register a function, called with ``chosen``, as our value of claim ``id``; once for each claim it answers."""

    def store(function: Callable[..., Finding]) -> Callable[..., Finding]:
        if id in CLAIMS:
            raise ValueError(f"claim {id} already has a function; one per claim")
        CLAIMS[id] = update_wrapper(partial(function, **chosen), function)
        return function

    return store


def quantities(function: ClaimFunction, rows: Rows) -> dict[str, float]:
    """Return the quantities that ``function`` finds in ``rows``; none where a row is missing."""
    try:
        return dict(function(rows).quantities)
    except NotMeasured:
        return {}


def spans(value: Mapping[str, float], repeats: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the spans of the quantities of ``value`` over those of undisturbed repeats, where these differ."""
    known = {}
    for name, middle in value.items():
        span = [middle, *(one[name] for one in repeats if name in one)]
        if max(span) - min(span) > 1e-9 * max(abs(max(span)), abs(min(span))):
            known[name] = min(span), max(span)
    return known
