"""REPRODUCING.md: figures with commands and minutes, expected ranges of the claims, answers to the disagreements."""

from collections.abc import Sequence
from pathlib import Path

from experiments.claims import Verdict
from experiments.claims.rows import markdown
from experiments.claims.table import marked
from experiments.expected.claims import claim_ranges
from experiments.expected.ranges import CPU_FLOOR, FLOOR, TIMES
from experiments.facts.disagreements import read_disagreements
from experiments.facts.paper import read_claims
from experiments.harness.catalogue import experiments
from experiments.report.machines import Machine
from experiments.report.runs import (
    UNKNOWN,
    all_minutes,
    commits,
    cost,
    figure_command,
    figures_of,
    how,
    minutes_of,
    recorded_scales,
    scales,
    total_minutes,
)
from experiments.report.tables import GENERATED, LEGEND, Table, title_of

INTRODUCTION = """\
`make reproduce` measures and judges all figures on your machine; `make check` holds your rows against recorded ones.

```console
$ make reproduce
$ make check
```

`make check` prints what is outside of its expected range and what was not compared; its status is 1 when one that
counts is outside. Rows are in `outputs/<hardware>/rows`, recorded ones in `results/<hardware>`.

**The rule of all ranges** (`experiments/expected`): a range reaches {times:g} times as far as the farthest recorded
repeat, and never less than {floor:.0%}, or than a factor of {cpu:g} for times and ratios that a CPU measured. There two
runs on one machine differ by more than the repeats of one. Quantities of claims have ranges of their own, below and in
`results/<hardware>/expected/claims.csv`: as factors for times, throughputs and ratios, linear for shares, correlations
and differences, and cut to what is possible (`paper_results/claim_quantities.csv`). Other measurements are held as
ratios to the recorded ones (`measurements.csv`), by the median over common points, and only on the recorded device. A
line that was recorded once has the least range, as its spread is not known; `make check` says so. Calibrations tell
how fast a machine is, beside other guests of its host. Where that is another speed than recorded, as a whole or in a
figure, `make check` counts no measurement that is outside, and no measured claim.

**Minutes** are those that `make reproduce` gives a figure at a scale (`conf/figure/*.yaml`): it ends with less measured
where they do not suffice. All figures together have {laptop:.0f} on a CPU. `not stated`: none are given at that
scale, and the figure runs to its end; `conf/recording.yaml` has the minutes of one repeat on a GPU. Time and memory are
what the script states; peak memory of the recorded runs was not recorded. Human minutes were not measured.

**Scales.** A command without `scale=` measures at `laptop` on a CPU and on a GPU below 75 GB, at `gpu` on a larger one.
Command and minutes of a claim are of the scale of its recorded rows, without rows of the paper's (on a CPU the
laptop's). On a GPU the command measures Llama-2 7B: ranges that also hold 13B need it once more with
`model=llama2-13b`.
"""
FIGURES = ("figure", "command", "minutes (scale)", "time and memory at scale=laptop, as the script states")
CLAIMS = ("claim", "statement", "figure", "command", "its minutes", "expected", "verdict", "commit of its rows")
DISAGREE = (
    "Each disagreement is described in [paper_results/README.md](paper_results/README.md#disagreements). Measured "
    "values are those of the named claims."
)


def write_reproducing(machines: Sequence[Machine], paper: Path, target: Path) -> Path:
    """Write the page on ``machines``, the recorded ones, to ``target``; ``paper`` is ``paper_results``."""
    laptop = total_minutes(experiments(), "laptop")
    said = INTRODUCTION.format(times=TIMES, floor=FLOOR, cpu=1 + CPU_FLOOR, laptop=laptop)
    parts = [GENERATED, "# Reproducing", "", said, "## Figures", "", *markdown(*figures_table(machines)), ""]
    for machine in machines:
        parts += [f"## Claims on {machine.name}", "", LEGEND, "", *markdown(*claims_table(machine, paper)), ""]
    parts += ["## Where text, figures and released code of the paper disagree", "", DISAGREE, ""]
    parts += [*markdown(*disagreements_table(machines, paper)), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def figures_table(machines: Sequence[Machine]) -> Table:
    """Return head and lines: an experiment, its command and cost, and scale and commits of its rows per machine."""
    lines = []
    for one in experiments():
        of_rows = [_recorded(machine, one.figure) for machine in machines]
        given = all_minutes(one.name, recorded_scales(machines, one.figure))
        lines.append([title_of(one), figure_command(one.name), given, cost(one), *of_rows])
    return [*FIGURES, *(f"rows of {machine.name}" for machine in machines)], lines


def _recorded(machine: Machine, figure: str) -> str:
    known = scales(machine.rows, figure)
    return f"{', '.join(known)}; {commits(machine.rows, [figure])}" if known else UNKNOWN


def claims_table(machine: Machine, paper: Path) -> Table:
    """Return head and lines: a claim, how to measure it, the range to expect, and what was recorded."""
    statements = {statement.id: statement for statement in read_claims(paper)}
    lines = []
    for verdict in machine.verdicts:
        of_command = (statements[verdict.id], machine.name, machine.chosen)
        run = [how(*of_command), minutes_of(*of_command), expected(verdict, paper)]
        about = [verdict.id, verdict.statement, verdict.figure]
        lines.append([*about, *run, marked(verdict), commits(machine.rows, figures_of(verdict))])
    return CLAIMS, lines


def expected(verdict: Verdict, paper: Path) -> str:
    """Word the expected ranges of the quantities of a claim; of one without a value, the reason."""
    found = claim_ranges([verdict], paper)
    ranges = [f"{one.quantity} {one.low:.4g} to {one.high:.4g}" for one in found.itertuples()]
    return "; ".join(ranges) or (f"no value: {verdict.reason}" if verdict.reason else UNKNOWN)


def disagreements_table(machines: Sequence[Machine], paper: Path) -> Table:
    """Return head and lines: a disagreement, what is done about it, and the measured values that belong to it."""
    lines = []
    for one in read_disagreements(paper):
        values = []
        for machine in machines:
            ours = {verdict.id: verdict for verdict in machine.verdicts}
            said = [f"{id}: {ours[id].our_value or ours[id].reason}" for id in one.claims]
            values.append("; ".join(said) or UNKNOWN)
        lines.append([f"{one.id} {one.title}", one.answer, *values])
    return ["disagreement", "answer", *(f"measured on {machine.name}" for machine in machines)], lines
