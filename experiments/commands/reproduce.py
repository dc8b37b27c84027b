"""Reproduce the paper: measure what is missing or stale of every figure, draw what changed, judge the claims.

Run again, it measures only what other work disturbed and what time was too short for; delete one file of rows, and it
redoes that figure. `figures=[fig08]` chooses figures by name or prefix; any other override (`scale=smoke`,
`hardware=cpu`, `force=true`, ...) goes to every figure. It ends when the minutes of the chosen figures
(`figure.minutes`) are over, on a slow or busy machine with less measured. A figure that fails does not stop the others,
and the exit code says so at the end. The scale is `laptop` on a CPU and `gpu` on a GPU, unless it is named.

    python -m experiments.commands.reproduce
"""

import math
import sys
import time
from collections.abc import Mapping

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, composed, each, noted
from experiments.harness.budget import Deadline
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.passes import Outcome
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError
from experiments.harness.settings import folders


def reproduce(cfg: DictConfig) -> int:
    """Run every chosen figure, then the report if any row changed; 0 when all went well."""
    started = time.perf_counter()
    configs, broken = each(cfg, composed)
    deadline = Deadline(minutes_of(configs))

    def one(experiment: Experiment) -> Outcome:
        if experiment.name in broken:
            raise ConfigError(broken[experiment.name])
        outcome = run(configs[experiment.name], experiment, deadline.budget(experiment.name))
        state = f"{outcome.measured} measured, {outcome.skipped} up to date, {len(outcome.failed)} failed"
        if outcome.disturbed:
            state += f", {outcome.disturbed} marked as disturbed"
        print(f"{experiment.name}: {state}, {outcome.seconds:.1f} s", file=sys.stderr, flush=True)
        return outcome

    outcomes, failures = each(cfg, one)
    failures |= {name: "; ".join(outcome.failed) for name, outcome in outcomes.items() if outcome.failed}
    changed = [name for name, outcome in outcomes.items() if outcome.measured]
    report = ""
    with noted("report", failures, "; the rows are on disk: once that is mended, make report judges and shows them"):
        report = _report(cfg, list(outcomes.values()), started)
    finish(
        command="reproduce",
        measured=changed,
        up_to_date=[name for name in outcomes if name not in changed],
        failed=failures,
        figures=[path for outcome in outcomes.values() for path in outcome.figures if path.endswith(".png")],
        disturbed={name: outcome.disturbed for name, outcome in outcomes.items() if outcome.disturbed},
        left_out={name: outcome.left_out for name, outcome in outcomes.items() if outcome.left_out},
        rows_files=[outcome.rows_file for outcome in outcomes.values()],
        report=report,
        seconds=round(time.perf_counter() - started, 2),
    )
    return 1 if failures else 0


def minutes_of(configs: Mapping[str, DictConfig]) -> dict[str, float]:
    """Return the minutes at their scale of those figures that have some."""
    found = {name: cfg.figure.minutes.get(cfg.scale.name) for name, cfg in configs.items()}
    return {name: minutes for name, minutes in found.items() if minutes is not None}


def _report(cfg: DictConfig, outcomes: list[Outcome], started: float) -> str:
    """Judge the claims when rows are newer than the page, and print the end of the run; return the path of
    the table, or an empty string without rows.
    """
    from experiments.commands.report import PAGE, write_fresh
    from experiments.report.ending import ending, left_out

    places = folders(cfg)
    table = places.fresh_rows.parent / "claims.md"
    if not places.fresh_rows.is_dir():
        return ""
    page, rows = table.with_name(PAGE), places.fresh_rows.glob("*.csv")
    written = page.stat().st_mtime if page.exists() else -math.inf
    if any(outcome.measured for outcome in outcomes) or any(path.stat().st_mtime > written for path in rows):
        here, others, files = write_fresh(places)
        minutes = (time.perf_counter() - started) / 60
        print("\n" + ending(outcomes, minutes, here, others, files), file=sys.stderr, flush=True)
    else:
        lines = [*left_out(outcomes), f"Nothing new was measured; the report is {page}"]
        print("\n".join(lines), file=sys.stderr, flush=True)
    return str(table)


if __name__ == "__main__":
    batch_main("reproduce", __doc__ or "", reproduce, "figures", measures=True)
