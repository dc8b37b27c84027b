"""The end of `make reproduce`: what the rows show, what noise cost, where to look."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.claims.judge import DIFFERS
from experiments.report.ending import MOST_REASONS, ending
from punica.measure.records import write_rows
from tests.experiments.report.report_rows import decode_rows, folders_in, write_report

FILES = [Path("outputs/cpu/claims.md"), Path("outputs/cpu/report.html")]


@pytest.fixture
def here(tmp_path):
    places = folders_in(tmp_path)
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    return write_report(places).machine


def said(here, others=()):
    return ending(here, others, FILES)


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
