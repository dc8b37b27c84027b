"""The report: what rows say about each of the paper's claims, as tables and as one page.

`make report` computes our value of every claim (`experiments.claims`), compares it with the bounds in
`paper_results/claim_bounds.csv` and writes what `experiments.report` lists. No verdict and no measured number is typed.

    make report                          # fresh rows if there are any, else recorded ones
    make report ARGS=source=recorded     # recorded rows of all machines

=========  ==================================================================================================
fresh      `outputs/<hardware>/`: claims.csv, claims.md, and report.html with the recorded machines beside it
recorded   `docs/results-*.md`, `results/*/claims.csv`, `results/*/operator_tables.md`, `results/*/expected/`,
           `REPRODUCING.md`, the numbers of `README.md` and `docs/verdicts.md`; `outputs/report.html`
=========  ==================================================================================================

It runs with whatever rows exist: a claim without rows is `not measured here`, with the command that measures it.
"""

from pathlib import Path

from omegaconf import DictConfig

from experiments.claims.judge import total
from experiments.commands.batch import batch_main, sides
from experiments.harness.command import given
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import Folders, folders
from experiments.report.expected import write_expected
from experiments.report.machines import Machine, machine_of, recorded_folders, recorded_machines, rows_files
from experiments.report.operators import write_operator_tables
from experiments.report.page import PAGE, write_page
from experiments.report.reproducing import MARKED_PAGES, write_marked, write_reproducing
from experiments.report.results import notes, write_results

RECORDED = "recorded"


def choose(places: Folders, source: str) -> str:
    """Decide between `fresh` and `recorded` rows. ConfigError when those of ``source`` have none."""
    looked = []
    for name, (rows, _) in sides(places, source).items():
        if rows_files(rows) or (name == RECORDED and recorded_folders(places.recorded_rows.parent)):
            return name
        looked.append(str(rows.parent if name == RECORDED else rows))
    other = ", or judge recorded ones: make report ARGS=source=recorded" if source == "fresh" else ""
    raise ConfigError(f"no rows in {' and '.join(looked)}: measure them with make reproduce{other}")


def write_fresh(places: Folders) -> tuple[Machine, list[Path]]:
    """Write the report on this machine's rows; return it and the files: its tables, and the page of all machines."""
    here = machine_of(places.fresh_rows, places.fresh_figures, places.paper)
    results, target = places.recorded_rows.parent, places.fresh_rows.parent
    others = recorded_machines(results, places.recorded_figures.parent, places.paper)
    own = write_results(here, target / "claims.md", target)
    pages = [own, *(_page_of(one, results.parent) for one in others)]
    return here, [own, write_page([here, *others], pages, target / PAGE)]


def write_recorded(results: Path, figures: Path, paper: Path, page: Path) -> tuple[list[Machine], list[Path]]:
    """Write the reports on all recorded rows, what the folder above ``results`` says of them, and ``page``."""
    machines, root = recorded_machines(results, figures, paper), results.parent
    pages = [write_results(one, _page_of(one, root), one.folder) for one in machines]
    files = [path for one in machines for path in write_operator_tables(one, one.folder / "operator_tables.md")]
    files += [path for one in machines for path in write_expected(one.folder, one.rows, one.verdicts, one.paper)]
    files += [write_reproducing(machines, paper, root / "REPRODUCING.md"), write_page(machines, pages, page)]
    return machines, [*pages, *files, *(write_marked(machines, root / page) for page in MARKED_PAGES)]


def _page_of(machine: Machine, root: Path) -> Path:
    return root / "docs" / f"results-{machine.name}.md"


def report(cfg: DictConfig) -> int:
    places = folders(cfg)
    if choose(places, cfg.source) == RECORDED:
        if any(override.startswith("hardware=") for override in given()):
            raise ConfigError("hardware= would change nothing, recorded rows are reported all: leave it out")
        results = places.recorded_rows.parent, places.recorded_figures.parent, places.paper
        machines, files = write_recorded(*results, REPOSITORY / cfg.paths.outputs / PAGE)
    else:
        here, files = write_fresh(places)
        machines = [here]
    for machine in machines:
        print(f"{machine.name}: {total(machine.verdicts)}")
    for machine in machines:
        print("\n".join(f"{machine.name}: {note}" for note in notes(machine)))
    print("\n".join(f"Written: {file}" for file in files))
    return 0


if __name__ == "__main__":
    batch_main("report", __doc__ or "", report, "source")
