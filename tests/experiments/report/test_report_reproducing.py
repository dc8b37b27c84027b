"""REPRODUCING.md of a machine with a few rows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.measure.records import write_rows
from experiments.report.machines import Machine, machine_of
from experiments.report.reproducing import claims_in, gpu_cost, gpu_sets, minutes, write_reproducing
from tests.experiments.report.report_rows import PAPER, decode_rows


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("results") / "cpu"
    write_rows(folder / "fig01_batching.csv", decode_rows())
    return machine_of(folder, folder, PAPER, "cpu")


def test_a_claim_has_its_command_minutes_hours_range_and_verdict(machine: Machine, tmp_path: Path) -> None:
    text = write_reproducing([machine], PAPER, tmp_path / "REPRODUCING.md").read_text(encoding="utf-8")
    claims = [line.split()[1] for line in text.splitlines() if re.match(r"\| C\d", line)]
    assert sorted(claims) == [one.id for one in machine.verdicts]
    (line,) = [line for line in text.splitlines() if line.startswith("| C01 ")]
    about = f"| fig01_batching | `make figure FIG=fig01` | {minutes('fig01_batching', 'laptop'):g} | - |"
    assert about in line
    assert line.endswith(" | 90 GB | 0.1 MB | reproduced‡; ratio 0.8 to 1.8 |")
    (line,) = [line for line in text.splitlines() if line.startswith("| C26 ")]
    assert line.endswith("| not measured here |")


def test_gpu_hours_are_those_of_the_sets_that_decide_a_claim() -> None:
    assert claims_in("C14, C51-C52") == {"C14", "C51", "C52"}
    one, both = gpu_cost(["C38"])[0], gpu_cost(["C38", "C42"])[0]
    assert 0 < one < both < sum(gpu_sets()["hours"])
    assert gpu_cost(["C38"])[1] == "2 x 130 GB"
    assert gpu_cost(["C99"]) == (0.0, "-")


def test_the_command_on_a_gpu_is_of_the_scale_of_its_rows(tmp_path: Path) -> None:
    rows = [replace(row, hardware="h200", model="llama2-7b") for row in decode_rows("gpu")]
    write_rows(tmp_path / "h200" / "fig01_batching.csv", rows)
    gpu = machine_of(tmp_path / "h200", tmp_path, PAPER, "h200")
    text = write_reproducing([gpu], PAPER, tmp_path / "REPRODUCING.md").read_text(encoding="utf-8")
    commands = {line.split()[1]: re.findall(r"`(make .*?)`", line) for line in text.splitlines()
                if line.startswith("| C")}  # fmt: skip
    assert commands["C01"] == ['make figure FIG=fig01 ARGS="scale=gpu"']
    assert commands["C26"] == ['make figure FIG=fig11 ARGS="scale=paper"']


def test_minutes_of_a_figure_are_by_scale(machine: Machine, tmp_path: Path) -> None:
    text = write_reproducing([machine], PAPER, tmp_path / "REPRODUCING.md").read_text(encoding="utf-8")
    assert f"| `make figure FIG=sec6` | {minutes('sec6_norm', 'laptop'):g} (laptop) | - |" in text
    assert "| `make figure FIG=ext_today` | - | - |" in text
