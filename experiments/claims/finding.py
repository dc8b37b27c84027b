"""What a claim function returns, and the tables of all of them.

Every claim of ``paper_results/claims.csv`` has one function, registered under its id with `@claim("C09")`. It computes
*our* value from rows and knows no bound: the bounds are data (``paper_results/claim_bounds.csv``). A second one,
registered with `@why("C09")`, says in a sentence computed from rows why our value differs where it does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import TypeVar

from experiments.claims.rows import Rows

SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True)
class Finding:
    """Our side of one claim.

    ``quantities`` are the numbers that the bounds speak about; one that could not be measured is absent. ``text`` says
    the same for people, with the model, batch sizes and lengths that were really used. ``kind`` is ``simulated`` for
    arithmetic and replays that need no measurement, and for simulations, which name what told them the time of a step
    (``cost_model``). ``models`` are those that were measured, none for an operator.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = MEASURED
    models: tuple[str, ...] = ()
    cost_model: str = ""


T = TypeVar("T")
ClaimFunction = Callable[[Rows], Finding]
WhyFunction = Callable[[Rows], str]
CLAIMS: dict[str, ClaimFunction] = {}
WHYS: dict[str, WhyFunction] = {}


def claim(id: str, **chosen: str) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Decorator: this function, called with ``chosen`` (a model, a workload), computes our value of claim ``id``.

    A function that answers several claims is decorated once for each.
    """
    return _stored(CLAIMS, id, chosen)


def why(id: str, **chosen: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Decorator: this function, called with ``chosen``, says why our value of claim ``id`` differs."""
    return _stored(WHYS, id, chosen)


def _stored(
    table: dict[str, Callable[[Rows], T]], id: str, chosen: Mapping[str, str]
) -> Callable[..., Callable[..., T]]:
    def store(function: Callable[..., T]) -> Callable[..., T]:
        if id in table:
            raise ValueError(f"claim {id} already has a function, {table[id].__name__}; one per claim")
        table[id] = update_wrapper(partial(function, **chosen), function)
        return function

    return store
