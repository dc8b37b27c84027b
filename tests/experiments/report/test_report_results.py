"""The page of a machine with its marks and notes, the end of `make reproduce`, and REPRODUCING.md."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import PAPER

from experiments.claims.judge import DIFFERS, NOISE, NOT_MEASURED, NOT_TESTABLE, REPRODUCED, SHAPE, marked
from experiments.commands.report import choose
from experiments.harness.counted import NOT_STEADY
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.source import fingerprint
from experiments.measure.records import write_rows
from experiments.report.machines import machine_of
from experiments.report.major import HOLD, MAJOR, PART, Major, ending
from tests.experiments.report.report_rows import decode_rows, folders_in, operator_rows, write_report

FILES = [Path("outputs/cpu/claims.md"), Path("outputs/cpu/report.html")]


@pytest.fixture
def places(tmp_path):
    return folders_in(tmp_path)


def test_fresh_rows_come_first_and_any_recorded_machine_will_do(places):
    with pytest.raises(ConfigError, match="no rows in"):
        choose(places, "auto")
    write_rows(places.recorded_rows.parent / "h200" / "fig01_batching.csv", decode_rows())
    assert choose(places, "auto") == choose(places, "recorded") == "recorded"
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    assert choose(places, "auto") == "fresh"
    assert choose(places, "recorded") == "recorded"


def judged(places, rows):
    """Write ``rows`` in place of those there are; return the machine and its page."""
    write_rows(places.fresh_rows / "rows.csv", rows)
    return write_report(places)


def by_id(machine):
    return {verdict.id: verdict for verdict in machine.verdicts}


def test_a_clock_that_decides_and_has_no_rows_is_missed_where_it_could_have_some(places):
    norms = [
        replace(row, figure="text 6", system=system, workload="", batch_size=32, metric="norm_latency", rank=None)
        for row, system in zip(operator_rows("host_clock", 64.0), ("unfused", "fused"), strict=False)
    ]
    verdicts = by_id(judged(places, [*operator_rows("cuda_graph", 20.0), *norms])[0])
    assert [marked(verdicts[id])[-1] for id in ("C12", "C45")] == ["§", "§"]
    assert "no rows of host_clock" in verdicts["C12"].remark
    both = operator_rows("cuda_graph", 20.0) + operator_rows("host_clock", 160.0)
    verdict = by_id(judged(places, both)[0])["C12"]
    assert (verdict.verdict, verdict.clock, verdict.clock_missing) == ("differs", "host_clock", "")
    on_cpu = by_id(judged(places, [replace(row, hardware="cpu", scale="laptop") for row in norms])[0])["C45"]
    assert (on_cpu.verdict, on_cpu.clock, on_cpu.remark) == (NOT_TESTABLE, "host_clock", "")


def test_a_clock_that_is_not_steady_decides_nothing(places):
    host = operator_rows("host_clock", 160.0, launch=None)
    verdict = by_id(judged(places, [*host, *operator_rows("cuda_graph", 20.0)])[0])["C12"]
    assert (verdict.verdict, verdict.clock, verdict.clock_missing) == ("reproduced", "cuda_graph", "host_clock")
    assert NOT_STEADY in verdict.remark
    alone = by_id(judged(places, host)[0])["C12"]
    assert (alone.verdict, alone.reason) == (NOT_MEASURED, NOT_STEADY)


def test_the_page_counts_rows_of_older_source(places):
    now = fingerprint(REPOSITORY / "experiments" / "fig01_batching.py")
    first, second = decode_rows()
    path = places.fresh_rows / "fig01_batching.csv"
    old = replace(second, source_hash="0" * 12)
    new = replace(second, batch_size=2, source_hash=now)
    write_rows(path, [first, old, new])
    machine, text = write_report(places)
    assert "2 of 3 (66.7 %), 1 of which do not say what source they are of; figure 1." in text
    assert (by_id(machine)["C01"].older_source, by_id(machine)["C06"].older_source) == ("1", "")
    write_rows(path, [new])
    assert "older source" not in write_report(places)[1]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "cpu"
    write_rows(folder / "fig01_batching.csv", decode_rows())
    return machine_of(folder, folder, PAPER, "cpu")


def test_a_claim_is_under_its_outcome_with_the_reason_of_a_cpu(here):
    words = {"C01": DIFFERS, "C24": REPRODUCED}
    verdicts = [replace(one, verdict=words.get(one.id, NOT_MEASURED)) for one in here.verdicts]
    lines = ending(replace(here, verdicts=verdicts), FILES)
    place = {id: next(number for number, line in enumerate(lines) if line.startswith(f"  {id}")) for id in words}
    heads = {id: next(line for line in lines[number::-1] if not line.startswith("  ")) for id, number in place.items()}
    assert heads["C24"].startswith("hold here (1)")
    assert heads["C01"].startswith("do not hold here")
    assert lines[place["C01"]].endswith(MAJOR[0].on_cpu)
    assert any(line.startswith("not measured (8)") for line in lines)


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
    assert Major("", dict.fromkeys(verdicts, "")).outcome(verdicts) == outcome
