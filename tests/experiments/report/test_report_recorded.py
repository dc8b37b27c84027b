"""README's numbers, which functions of rows fill, and committed reports: what the command writes, byte for byte."""

from pathlib import Path
from shutil import copy, copytree

import pytest
from fakes import PAPER

from experiments.commands.report import write_recorded
from experiments.harness.schema import REPOSITORY
from experiments.report.reproducing import GENERATED, MARKED, MARKED_PAGES, VALUES

README = REPOSITORY / "README.md"
PROSE = [
    path
    for path in (README, REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/*.md")))
    if GENERATED not in path.read_text(encoding="utf-8")
]


def test_every_function_fills_a_marker_of_two_pages_and_no_other_page_has_any():
    used = {path: {name for _, name, _ in MARKED.findall(path.read_text(encoding="utf-8"))} for path in PROSE}
    filled = [used.pop(REPOSITORY / page) for page in MARKED_PAGES]
    assert set.union(*filled) == set(VALUES)
    assert not any(used.values())


def _without_ages(page: Path) -> list[str]:
    """Lines of a page but those that count older rows, which each edit of the code raises."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "ows of older source" not in line and "measured:older-rows" not in line]


@pytest.mark.slow
def test_committed_reports_are_what_the_command_writes(tmp_path):
    copytree(REPOSITORY / "results", tmp_path / "results")
    copytree(REPOSITORY / "docs", tmp_path / "docs")
    (tmp_path / "figures").symlink_to(REPOSITORY / "figures")
    for path in REPOSITORY.glob("*.md"):
        copy(path, tmp_path)
    page = tmp_path / "outputs" / "report.html"
    machines, files = write_recorded(tmp_path / "results", tmp_path / "figures", PAPER, page)
    names = {file.relative_to(tmp_path) for file in files if file != page}
    assert 1_000_000 < page.stat().st_size < 6_000_000
    folders = [f"results/{machine.name}" for machine in machines]
    wanted = ["README.md", "REPRODUCING.md", "results/h200/operator_tables.md"]
    wanted += [f"docs/results-{machine.name}.md" for machine in machines]
    wanted += [f"{one}/{name}.csv" for one in folders for name in ("claims", "expected/claims")]
    for name in {*names, *map(Path, wanted)}:
        told = f"{name}: make report ARGS=source=recorded"
        assert _without_ages(tmp_path / name) == _without_ages(REPOSITORY / name), told
    assert all(one.why for machine in machines for one in machine.verdicts if one.verdict == "differs")
