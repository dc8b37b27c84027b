"""The end of `make reproduce`: each claim that carries the paper under its outcome, within half a screen."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.claims.judge import DIFFERS, NOISE, NOT_MEASURED, NOT_TESTABLE, REPRODUCED, SHAPE
from experiments.facts.paper import read_claims
from experiments.measure.records import write_rows
from experiments.report.ending import WIDTH, ending
from experiments.report.major import HOLD, MAJOR, PART, Major, in_order
from tests.experiments.report.report_rows import PAPER, decode_rows, folders_in, write_report

FILES = [Path("outputs/cpu/claims.md"), Path("outputs/cpu/report.html")]


@pytest.fixture
def here(tmp_path):
    places = folders_in(tmp_path)
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    return write_report(places).machine


@pytest.mark.parametrize("word", [REPRODUCED, SHAPE, NOISE, DIFFERS, NOT_TESTABLE, NOT_MEASURED])
def test_everything_fits_in_half_a_screen_whatever_the_verdicts(here, word):
    verdicts = [replace(one, verdict=word, why="because " * 30) for one in here.verdicts]
    lines = ending(replace(here, clocks={"auto": verdicts}), FILES)
    assert len(lines) <= 20  # with four lines of what was measured, 24
    assert max(map(len, lines)) <= WIDTH
    assert all(any(id in line for line in lines) for one in MAJOR for id in (one.claims[0], one.claims[-1]))


def test_a_claim_is_under_its_outcome_with_the_reason_of_a_cpu(here):
    words = {"C01": DIFFERS, "C24": REPRODUCED}
    verdicts = [replace(one, verdict=words.get(one.id, NOT_MEASURED)) for one in here.verdicts]
    lines = ending(replace(here, clocks={"auto": verdicts}), FILES)
    place = {id: next(number for number, line in enumerate(lines) if line.startswith(f"  {id}")) for id in words}
    heads = {id: next(line for line in lines[number::-1] if not line.startswith("  ")) for id, number in place.items()}
    assert heads["C24"].startswith("hold here (1)")
    assert heads["C01"].startswith("do not hold here")
    assert lines[place["C01"]].endswith(MAJOR[0].on_cpu)
    assert any(line.startswith("not measured (8)") for line in lines)
    assert str(FILES[-1]) in " ".join(lines)


def test_rows_of_scale_smoke_are_said_to_mean_nothing(tmp_path):
    places = folders_in(tmp_path)
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows(scale="smoke"))
    assert "mean nothing" in " ".join(ending(write_report(places).machine, FILES))


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ((REPRODUCED, SHAPE), HOLD), ((REPRODUCED, NOT_TESTABLE), PART), ((SHAPE, DIFFERS), PART),
        ((DIFFERS, NOISE), DIFFERS), ((DIFFERS, NOT_TESTABLE), DIFFERS), ((NOISE, NOT_MEASURED), NOISE),
        ((NOT_TESTABLE, NOT_TESTABLE), NOT_TESTABLE), ((NOT_TESTABLE, NOT_MEASURED), NOT_MEASURED),
    ],
)  # fmt: skip
def test_the_outcome_of_several_claims(here, words, outcome):
    verdicts = {one.id: replace(one, verdict=word) for one, word in zip(here.verdicts, words, strict=False)}
    assert Major("", tuple(verdicts)).outcome(verdicts) == outcome


def test_major_claims_come_first_and_each_claim_once(here):
    assert all({"C48", "C50"} <= {*one.claims} for one in MAJOR if "C46" in one.claims)  # which flatters alone
    known, first = [one.id for one in read_claims(PAPER)], [id for one in MAJOR for id in one.claims]
    assert (len(first), set(first) - set(known)) == (len(set(first)), set())
    ordered = [one.id for one in in_order(here.verdicts)]
    assert ordered[: len(first)] == first
    assert ordered[len(first) :] == [id for id in known if id not in first]
