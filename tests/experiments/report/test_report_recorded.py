"""Committed reports: what `make report ARGS=source=recorded` writes from the committed rows, byte for byte."""

import gzip
import re
from pathlib import Path
from shutil import copy, copytree

import pytest

from experiments.commands.report import write_recorded
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import read_rows
from experiments.report.machines import rows_files
from tests.experiments.report.report_rows import PAPER

REMEDY = "make report ARGS=source=recorded"
PATH = re.compile(rb"""(?:^|[\s"'=,:(])(?:~|/[\w.-]+)/[\w./-]+""")
KINDS = (".csv", ".json", ".md", ".gz")


def test_recorded_files_name_no_path_of_a_machine() -> None:
    recorded = [file for name in ("results", "figures") for file in (REPOSITORY / name).rglob("*.*")]
    written = [REPOSITORY / "REPRODUCING.md", *(REPOSITORY / "docs").glob("results-*.md")]
    texts = [file for file in [*recorded, *written] if file.suffix in KINDS]
    assert len(texts) > 200
    for file in texts:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        assert not (found := PATH.search(content)), (file, found)


@pytest.mark.parametrize(
    ("file", "hardware"), [("constraints.txt", ["cpu"]), ("constraints-gpu.txt", ["h100", "h200"])]
)
def test_constraints_hold_the_versions_of_recorded_rows(file: str, hardware: list[str]) -> None:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))
    rows = [row for name in hardware for path in rows_files(REPOSITORY / "results" / name) for row in read_rows(path)]
    assert rows
    for package in ("torch", "triton", "transformers", "peft"):
        assert {getattr(row, package).partition("+")[0] for row in rows} == {pins[package]}, package
    told = {row.python.rpartition(".")[0] for row in rows}, {row.driver for row in rows if row.driver}
    assert all(version in text for versions in told for version in versions)


@pytest.mark.slow
def test_committed_reports_are_what_the_command_writes(tmp_path: Path) -> None:
    copytree(REPOSITORY / "results", tmp_path / "results")
    copytree(REPOSITORY / "docs", tmp_path / "docs")
    (tmp_path / "figures").symlink_to(REPOSITORY / "figures")
    for path in REPOSITORY.glob("*.md"):
        copy(path, tmp_path)
    page = tmp_path / "outputs" / "report.html"
    machines, files = write_recorded(tmp_path / "results", tmp_path / "figures", PAPER, page)
    names = [file.relative_to(tmp_path) for file in files if file != page]
    assert {Path("README.md"), Path("REPRODUCING.md")} <= set(names)
    assert {*(Path(f"docs/results-{machine.name}.md") for machine in machines)} <= set(names)
    assert Path("results/h200/operator_tables.md") in names
    assert {Path(f"results/{machine.name}/expected/claims.csv") for machine in machines} <= set(names)
    tables = [path.relative_to(REPOSITORY) for path in REPOSITORY.glob("results/*/claims*.csv")]
    assert len(tables) >= len(machines)
    for name in [*names, *tables]:
        assert (tmp_path / name).read_bytes() == (REPOSITORY / name).read_bytes(), f"{name}: {REMEDY}"
    for machine in machines:
        assert all(verdict.why for verdict in machine.verdicts if verdict.verdict == "differs")
    assert 1_000_000 < page.stat().st_size < 6_000_000
