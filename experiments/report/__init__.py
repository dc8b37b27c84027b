"""Reports: everything that is written from judged rows, and nothing that is typed.

    machines.py             rows of one machine and the verdicts on them; all recorded machines
    verdicts.py             claims.csv and claims.md beside the rows
    findings.py sought.py   what the extensions found: ratios of rows, point by point; which ones are looked for
    tables.py               docs/results-<hardware>.md
    reproducing.py          REPRODUCING.md; runs.py: commands, minutes and commits behind a figure
    artifact.py             docs/artifact.md
    page.py templates/      report.html: one page with figures, every machine beside the paper
    trials.py               table of reliability trials
    filled.py               numbers between markers in README.md and docs/
    ending.py               the last lines of `make reproduce`
"""
