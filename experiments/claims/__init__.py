"""The paper's 52 claims, judged from rows: functions compute values, bounds are data, no verdict is typed by hand.

    rows.py                 one number per point, by repeat; a claim's function, our value and its interval
    bounds.py judge.py      the bounds of `paper_results/claim_bounds.csv`; the verdict, its clock, its marks, tables
    fig*.py text.py         claims: one module per figure (fig01 has 10, fig08 has 9 and the README's)
    predictions.py          simulations beside what was published, and beside one another

>>> from experiments.claims import judge
>>> verdicts = judge(rows, "paper_results")      # doctest: +SKIP
>>> verdicts[0].verdict                          # doctest: +SKIP
'reproduced'

A new claim is a function with `@claim("C45")` in the module of its figure, its bounds in
``paper_results/claim_bounds.csv``, and, where it differs, the mechanism in ``paper_results/claim_mechanisms.csv``.
"""

from experiments.claims import fig01, fig08, fig11, fig13, text  # they fill CLAIMS
from experiments.claims.judge import VERDICTS, Verdict, as_frame, decide, judge
from experiments.claims.rows import CLAIMS, Finding, NotMeasured, claim
