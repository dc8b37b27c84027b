"""README's numbers, which functions of rows fill, and committed reports: what the command writes, byte for byte."""

from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree

import pytest
from fakes import PAPER

from experiments.commands.report import write_recorded
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import write_rows
from experiments.report.machines import machine_of
from experiments.report.major import MAJOR
from experiments.report.reproducing import GENERATED, MARKED, MARKED_PAGES, VALUES, claims, write_marked
from tests.experiments.report.report_rows import decode_rows, operator_rows

README = REPOSITORY / "README.md"
PROSE = [
    path
    for path in (README, REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/*.md")))
    if GENERATED not in path.read_text(encoding="utf-8")
]
OLDER = "<!-- measured:older-rows --><!-- /measured -->"


@pytest.fixture
def cpu(tmp_path):
    write_rows(tmp_path / "fig01_batching.csv", decode_rows())
    return machine_of(tmp_path, tmp_path, PAPER, "cpu")


def test_markers_are_filled_from_rows_and_filled_again(cpu, tmp_path):
    machines = [replace(cpu, rows=cpu.rows.assign(older=[True, False])), replace(cpu, name="h200")]
    path = tmp_path / "A.md"
    path.write_text(f"a {OLDER} b\n<!-- measured:machines -->\nold\nolder\n<!-- /measured -->\nc", encoding="utf-8")
    once = write_marked(machines, path).read_text(encoding="utf-8")
    said = "1 of 2 (50.0 %) on cpu, 2 of 2 (100.0 %) on h200"
    assert once.startswith(f"a {OLDER.replace('--><', f'-->{said}<')} b\n<!-- measured:machines -->\n\n| recorded on |")
    assert once.endswith("|\n\n<!-- /measured -->\nc")
    assert write_marked(machines, path).read_text(encoding="utf-8") == once


def test_every_major_claim_is_shown_with_the_papers_value_and_its_verdict(tmp_path):
    for name, found in (("h200", operator_rows("host_clock", 160.0)), ("cpu", decode_rows())):
        write_rows(tmp_path / name / "rows.csv", found)
    machines = {name: machine_of(tmp_path / name, tmp_path, PAPER, name) for name in ("h200", "cpu")}
    lines = claims(machines).strip().splitlines()[2:]
    assert len(lines) == len(MAJOR)
    (operators,) = (line for line in lines if "Gather-BMM" in line)
    assert "| C12 smallest<br>C13 smallest | 2.07<br>3.09 | 0.5<br>0.5 | differs‡<br>differs‡ | [h200]" in operators
    assert "| C01 ratio | 1.27 | 1.2 | reproduced‡ | [cpu]" in lines[0], "what the GPU lacks is of the CPU"


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
