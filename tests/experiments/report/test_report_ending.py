"""The end of `make reproduce`: what was measured, what it shows, what noise cost, where to look."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.claims.judge import DIFFERS
from experiments.harness.passes import Outcome
from experiments.report.ending import MOST_REASONS, ending
from punica.measure.records import write_rows
from tests.experiments.report.report_rows import decode_rows, folders_in, write_report

OUTCOMES = [
    Outcome("fig01_batching", points=12, measured=10, left_out=2),
    Outcome("fig08_lora_operator", points=7, skipped=7),
]
FILES = [Path("outputs/cpu/claims.md"), Path("outputs/cpu/report.html")]


@pytest.fixture
def here(tmp_path):
    places = folders_in(tmp_path)
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    return write_report(places).machine


def said(here, others=(), outcomes=OUTCOMES):
    return ending(outcomes, 17.44, here, others, FILES).splitlines()


def test_it_says_what_was_measured_and_what_was_left_out(here):
    lines = said(here)
    assert lines[0] == "Measured 10 points of 1 figures in 17.4 minutes; 7 points were up to date."
    assert lines[1].startswith("Left out for want of time: fig01_batching 2 of 12; make reproduce again")
    assert "Left out" not in "\n".join(said(here, outcomes=OUTCOMES[1:]))


def test_verdicts_of_recorded_machines_stand_beside_those_measured_here(here):
    other = [replace(one, verdict=DIFFERS) for one in here.verdicts]
    lines = said(here, [replace(here, name="h200", clocks={"auto": other})])
    head = next(line for line in lines if line.startswith("claims of the paper"))
    assert head.split()[-3:] == ["this", "machine", "h200"]
    assert next(line for line in lines if line.startswith("reproduced ")).split() == ["reproduced", "1", "-"]
    assert next(line for line in lines if line.startswith("differs ")).split() == ["differs", "1", "52"]


def test_reasons_are_a_clause_each_and_everything_fits_on_a_screen(here):
    why = "llama-small: rows take long: the cache outgrows the weights"
    verdicts = [replace(one, verdict=DIFFERS, why=why) for one in here.verdicts]
    lines = said(replace(here, clocks={"auto": verdicts}))
    first = lines.index("Differs here (52), and why:") + 1
    assert lines[first].startswith("  C01 Decode of short contexts")
    assert lines[first].endswith(": the cache outgrows the weights")
    assert lines[first + MOST_REASONS] == f"  and {52 - MOST_REASONS} more, in outputs/cpu/claims.md"
    assert len(lines) < 40
    assert max(map(len, lines)) <= 120


def test_noise_is_one_line_and_the_page_is_named(here):
    lines = said(here)
    assert sum(line.startswith("Noise: ") for line in lines) == 1
    assert "unfit" not in "\n".join(lines)
    look = ["Look at   outputs/cpu/report.html", f"figures   {here.figures}", "tables    outputs/cpu/claims.md"]
    assert lines[-3:] == look
