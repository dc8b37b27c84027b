"""REPRODUCING.md and docs/artifact.md of a machine with a few rows."""

from pathlib import Path

import pytest

from experiments.harness.catalogue import experiments
from experiments.report.artifact import write_artifact
from experiments.report.machines import Machine, machine_of
from experiments.report.reproducing import write_reproducing
from experiments.report.runs import cost, minutes
from punica.measure.records import write_rows
from tests.experiments.report.report_rows import PAPER, decode_rows


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("results") / "cpu"
    write_rows(folder / "fig01_batching.csv", decode_rows())
    return machine_of(folder, folder, PAPER, "cpu")


def test_a_claim_has_its_command_minutes_range_verdict_and_commit(machine: Machine, tmp_path: Path) -> None:
    text = write_reproducing([machine], PAPER, tmp_path / "REPRODUCING.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| C01 ")]
    given = minutes("fig01_batching", "laptop")
    cells = [f"`make figure FIG=fig01` | {given:g} | ratio 1.08 to 1.32 | reproduced‡ | abc1234 |"]
    assert line.endswith(cells[0])
    (line,) = [line for line in text.splitlines() if line.startswith("| C26 ")]
    assert "no value: no rows of figure 11 yet" in line
    assert all(f"| D{number:02d} " in text for number in range(1, 23))


def test_every_experiment_says_what_it_costs() -> None:
    assert [one.name for one in experiments() if len(cost(one)) < 5] == []
    sec6 = next(one for one in experiments() if one.name == "sec6_norm")
    assert cost(sec6) == "a few seconds"


def test_the_appendix_counts_verdicts_by_figure(machine: Machine, tmp_path: Path) -> None:
    text = write_artifact([machine], tmp_path / "docs" / "artifact.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| Figure 1:")]
    assert "C01, C02, C03, C04" in line
    assert "1 reproduced, 1 differs, 2 not measured here" in line
    assert "| Hardware | cpu: A CPU, 2 cores |" in text
    for part in ("Abstract", "Check-list", "Set-up", "Workflow", "Claims, commands and times", "Customisation"):
        assert f"## {part}" in text
