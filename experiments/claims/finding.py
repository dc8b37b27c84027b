"""What a claim function returns, and the table of all of them.

Every claim of ``paper_results/claims.csv`` has one function, registered under its id with `@claim("C09")`. It computes
*our* value from rows and knows no bound: the bounds are data (``paper_results/claim_bounds.csv``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper

from experiments.claims.rows import Rows


@dataclass(frozen=True)
class Finding:
    """Our side of one claim.

    ``quantities`` are the numbers that the bounds speak about; one that could not be measured is absent. ``text`` says
    the same for people, with the model, batch sizes and lengths that were really used. ``kind`` is ``simulated`` for
    arithmetic and replays that need no measurement.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = "measured"


ClaimFunction = Callable[[Rows], Finding]
CLAIMS: dict[str, ClaimFunction] = {}


def claim(id: str, **chosen: str) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Decorator: this function, called with ``chosen`` (a model, a workload), computes our value of claim ``id``.

    A function that answers several claims is decorated once for each.
    """

    def store(function: Callable[..., Finding]) -> Callable[..., Finding]:
        if id in CLAIMS:
            raise ValueError(f"claim {id} already has a function, {CLAIMS[id].__name__}; one per claim")
        CLAIMS[id] = update_wrapper(partial(function, **chosen), function)
        return function

    return store
