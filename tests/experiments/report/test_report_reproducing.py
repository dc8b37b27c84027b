"""REPRODUCING.md and docs/artifact.md of a machine with a few rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.catalogue import experiments
from experiments.report.artifact import write_artifact
from experiments.report.machines import Machine, machine_of
from experiments.report.reproducing import write_reproducing
from experiments.report.runs import all_minutes, cost, minutes
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
    cells = [f"`make figure FIG=fig01` | {given:g} | ratio 0.8 to 1.8 | reproduced‡ | abc1234 |"]
    assert line.endswith(cells[0])
    (line,) = [line for line in text.splitlines() if line.startswith("| C26 ")]
    assert "no value: no rows of figure 11 yet" in line
    assert all(f"| D{number:02d} " in text for number in range(1, 23))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "claim", "of_command"),
    [
        ("gpu", "C01", '`make figure FIG=fig01 ARGS="scale=gpu"` | {minutes:g} |'),
        ("paper", "C01", '`make figure FIG=fig01 ARGS="scale=paper"` | not stated |'),
        ("paper", "C26", '`make figure FIG=fig11 ARGS="scale=paper"` | {fig11:g} |'),
        ("paper", "C25", '`make figure FIG=fig10,fig11 ARGS="scale=paper"` | {fig11:g}, not stated (fig10) |'),
    ],
)
def test_minutes_and_command_of_a_claim_are_of_one_scale(
    scale: str, claim: str, of_command: str, tmp_path: Path
) -> None:
    rows = [replace(row, hardware="h200", model="llama2-7b") for row in decode_rows(scale)]
    write_rows(tmp_path / "h200" / "fig01_batching.csv", rows)
    gpu = machine_of(tmp_path / "h200", tmp_path, PAPER, "h200")
    text = write_reproducing([gpu], PAPER, tmp_path / "REPRODUCING.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {claim} ")]
    given = {"minutes": minutes("fig01_batching", "gpu"), "fig11": minutes("fig11_textgen", "paper")}
    assert of_command.format(**given) in line


def test_minutes_by_scale_tell_which_were_never_measured_or_recorded() -> None:
    laptop, gpu, paper = (minutes("ext_many_adapters", scale) for scale in ("laptop", "gpu", "paper"))
    said = all_minutes("ext_many_adapters", {"laptop", "gpu"})
    assert said == f"{laptop:g} (laptop), {gpu:g} (gpu), {paper:g} (paper, no recorded run)"
    norm = minutes("sec6_norm", "laptop")
    assert all_minutes("sec6_norm", {"laptop"}) == f"{norm:g} (laptop), not stated (gpu, paper)"
    assert all_minutes("ext_today", set()) == "not stated (laptop, gpu, paper)"


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
