"""Reproduce the paper: measure what is missing or stale of every figure, draw what changed, judge the claims.

Run again, it measures only what other work disturbed and what time was too short for; delete one file of rows, and it
redoes that figure. `figures=[8,ext_moe]` chooses figures by number, name or prefix; any other override (`scale=smoke`,
`hardware=cpu`, `force=true`, ...) goes to every figure. It ends when the minutes of the chosen figures
(`figure.minutes`) are over, on a slow or busy machine with less measured, and behind them with a point of each at
least. A figure that fails does not stop the others, and the exit code and the first lines of the end say so. The scale
is `laptop` on a CPU and `gpu` on a GPU, unless it is named.

    python -m experiments.commands.reproduce
"""

import itertools
import sys
import textwrap
import time
from collections.abc import Collection, Mapping

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, composed, each, noted
from experiments.harness.budget import Deadline
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.passes import Outcome
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError
from experiments.harness.settings import folders

WIDTH = 100
"""Characters of a line at the end."""


def reproduce(cfg: DictConfig) -> int:
    """Run every chosen figure, then the report if any row changed; 0 when all went well."""
    started = time.perf_counter()
    configs, broken = each(cfg, composed)
    minutes = {name: cfg.figure.minutes.get(cfg.scale.name) for name, cfg in configs.items()}
    shares = {name: one for name, one in minutes.items() if one is not None}
    place, of = itertools.count(1), len(configs) + len(broken)
    deadline = Deadline(shares)

    def one(experiment: Experiment) -> Outcome:
        name, left = experiment.name, "no limit of time"
        if name in shares:
            rest = deadline.minutes_left
            left = f"{rest:.1f} minutes left in all" if rest > 0 else "no time left: one measurement of it"
        print(f"figure {next(place)} of {of}: {name}, {left}", file=sys.stderr, flush=True)
        if name in broken:
            raise ConfigError(broken[name])
        done = run(configs[name], experiment, deadline.budget(name))
        state = f"{done.measured} measured, {done.skipped} up to date, {len(done.failed)} failed"
        state += f", {done.disturbed} marked as disturbed" if done.disturbed else ""
        print(f"{name}: {state}, {done.seconds:.1f} s", file=sys.stderr, flush=True)
        return done

    outcomes, failures = each(cfg, one)
    over = max(0.0, -deadline.minutes_left)
    failures |= {name: "; ".join(outcome.failed) for name, outcome in outcomes.items() if outcome.failed}
    changed = [name for name, outcome in outcomes.items() if outcome.measured]
    report, said = "", measured(outcomes.values(), (time.perf_counter() - started) / 60, over)
    with noted("report", failures, "; the rows are on disk: once that is mended, make report judges and shows them"):
        report, judged = _report(cfg, bool(changed))
        said += judged
    print("\n".join(["", *failed(failures, outcomes), *said]), file=sys.stderr, flush=True)
    if not sys.stdout.isatty():  # for programs
        counts = {key: {name: getattr(one, key) for name, one in outcomes.items() if getattr(one, key)}
                  for key in ("disturbed", "left_out")}  # fmt: skip
        figures = [path for outcome in outcomes.values() for path in outcome.figures if path.endswith(".png")]
        seconds = round(time.perf_counter() - started, 2)
        finish(command="reproduce", failed=failures, measured=changed, figures=figures, **counts, report=report,
               seconds=seconds)  # fmt: skip
    return 1 if failures else 0


def failed(failures: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Say what failed and why: of a figure with wrong points the first."""
    lines = []
    for name, why in failures.items():
        if wrong := outcomes[name].failed if name in outcomes else []:
            why = wrong[0] + (f"; and {len(wrong) - 1} more of its points" if len(wrong) > 1 else "")
        lines.append(f"  {name}: {' '.join(why.split())}")
    return [f"Failed ({len(failures)}):", *lines, ""] if failures else []


def measured(outcomes: Collection[Outcome], minutes: float, over: float) -> list[str]:
    """Say how much was measured in how many ``minutes``, ``over`` of them too many, and what was left out."""
    now = [one for one in outcomes if one.measured]
    text = f"Measured {sum(one.measured for one in now):,} points of {len(now)} figures in {minutes:.1f} minutes"
    if over > 0.05:
        text += f", {over:.1f} more than planned, since every figure has a point whatever the time"
    if skipped := sum(one.skipped for one in outcomes):
        text += f"; {skipped:,} points were up to date"
    lines = textwrap.wrap(f"{text}.", WIDTH)
    if short := sorted((one for one in outcomes if one.left_out), key=lambda one: -one.left_out):
        most = ", ".join(one.experiment for one in short[:3])
        most += f" and {len(short) - 3} more figures" if len(short) > 3 else ""
        left = f"{sum(one.left_out for one in short):,} points of {most}"
        lines += textwrap.wrap(f"Left out for want of time: {left}; make reproduce again measures them.", WIDTH)
    return lines


def _report(cfg: DictConfig, changed: bool) -> tuple[str, list[str]]:
    """Judge the claims when rows ``changed`` or are newer than the page; return its path and lines to print."""
    from experiments.commands.report import PAGE, write_fresh
    from experiments.report.major import ending

    places = folders(cfg)
    page, rows = places.fresh_rows.with_name(PAGE), [*places.fresh_rows.glob("*.csv")]
    if not rows:
        return "", []
    stale = changed or not page.exists() or max(path.stat().st_mtime for path in rows) > page.stat().st_mtime
    lines = ending(*write_fresh(places)) if stale else [f"Nothing new was measured; the report is {page}"]
    return str(page.with_name("claims.md")), lines


if __name__ == "__main__":
    batch_main("reproduce", __doc__ or "", reproduce, "figures", measures=True)
