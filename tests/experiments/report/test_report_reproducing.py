"""REPRODUCING.md of a machine with a few rows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.catalogue import experiments
from experiments.report.machines import Machine, machine_of
from experiments.report.reproducing import (
    all_minutes,
    claims_in,
    cost,
    gpu_cost,
    gpu_sets,
    minutes,
    write_reproducing,
)
from punica.measure.records import write_rows
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "claim", "of_command"),
    [
        ("gpu", "C01", '| {minutes:g} | `make figure FIG=fig01 ARGS="scale=gpu"` |'),
        ("paper", "C01", '| not stated (fig01) | `make figure FIG=fig01 ARGS="scale=paper"` |'),
        ("paper", "C26", '| {fig11:g} | `make figure FIG=fig11 ARGS="scale=paper"` |'),
        ("paper", "C25", '| {fig11:g}, not stated (fig10) | `make figure FIG=fig10,fig11 ARGS="scale=paper"` |'),
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
