"""Reports: everything that is written from judged rows, and nothing that is typed.

    machines.py              rows of one machine and the verdicts on them; all recorded machines
    major.py                 the claims that carry the paper; the end of `make reproduce`
    results.py operators.py  the page of a machine, with claims.csv beside its rows; its operator tables
    findings.py, .yaml       what extensions found: ratios of rows, point by point
    expected.py              expected ranges, and what is outside of them
    reproducing.py           REPRODUCING.md; the numbers of README.md
    page.py templates/       report.html: one page with figures, every machine beside the paper
"""
