"""The paper's 52 claims, judged from rows. No verdict is typed by hand: functions compute values, bounds are data.

>>> from punica.measure.claims import judge
>>> verdicts = judge(rows, "paper_results")      # doctest: +SKIP
>>> verdicts[0].verdict                          # doctest: +SKIP
'reproduced'

To add a claim's function, write it in the module of its figure with `@claim("C45")` and add its bounds to
``paper_results/claim_bounds.csv``.
"""

from punica.measure.claims import fig01, fig07, fig08, fig09, fig10, fig11, scheduling, sec52  # they fill CLAIMS
from punica.measure.claims.finding import CLAIMS, Finding, NotTestable, claim
from punica.measure.claims.judge import VERDICTS, Verdict, as_frame, counts, decide, judge

__all__ = [
    "CLAIMS",
    "VERDICTS",
    "Finding",
    "NotTestable",
    "Verdict",
    "as_frame",
    "claim",
    "counts",
    "decide",
    "fig01",
    "fig07",
    "fig08",
    "fig09",
    "fig10",
    "fig11",
    "judge",
    "scheduling",
    "sec52",
]  # fmt: skip
