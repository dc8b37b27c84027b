"""The paper's 52 claims, judged from rows. No verdict is typed by hand: functions compute values, bounds are data.

>>> from experiments.claims import judge
>>> verdicts = judge(rows, "paper_results")      # doctest: +SKIP
>>> verdicts[0].verdict                          # doctest: +SKIP
'reproduced'

To add a claim's function, write it in the module of its figure with `@claim("C45")`, add its bounds to
``paper_results/claim_bounds.csv`` and, in one of the ``why_`` modules, with `@why("C45")`, why it differs.
"""

from experiments.claims import (  # they fill CLAIMS  # they fill WHYS
    fig01,
    fig07,
    fig08,
    fig09,
    fig10,
    fig11,
    fig13,
    scheduling,
    sec6,
    sec52,
    why_cluster,
    why_model,
    why_operator,
    why_serving,
)
from experiments.claims.finding import CLAIMS, WHYS, Finding, claim, why
from experiments.claims.judge import VERDICTS, Verdict, as_frame, counts, decide, judge
from experiments.claims.rows import NotMeasured, NotTestable
