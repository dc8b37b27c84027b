"""The page of a machine: every claim with marks for what is not certain, and claims.csv beside the rows."""

import csv
import re
from dataclasses import replace

import pytest

from experiments.claims.table import certainty, marked, total
from experiments.harness.clocks import NOT_STEADY
from experiments.harness.schema import REPOSITORY
from experiments.harness.source import fingerprint
from experiments.measure.records import RowsError, write_rows
from experiments.report.machines import AUTO, OTHER_TIMER, machine_of, read_folder
from experiments.report.results import write_results
from tests.experiments.report.report_rows import PAPER, decode_rows, folders_in, operator_rows, write_report


@pytest.fixture
def places(tmp_path):
    return folders_in(tmp_path)


def test_table_is_written_beside_the_rows(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    places.fresh_figures.mkdir(parents=True)
    (places.fresh_figures / "fig01_batching.png").touch()
    verdicts = write_report(places).verdicts
    with (places.fresh_rows.parent / "claims.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == len(verdicts) == 52
    assert table[0]["id"] == "C01"
    assert table[0]["verdict"] == "reproduced"
    assert table[0]["our_value"] == "1.20 (llama-small, len 128: 10 -> 12 ms)"
    text = (places.fresh_rows.parent / "claims.md").read_text()
    first = next(line for line in text.splitlines() if line.startswith("| C01"))
    assert "**reproduced\u2021**" in first  # measured once
    assert "[1](figures/fig01_batching.png)" in first
    assert "A CPU, 2 cores" in text
    assert "`llama-small` plays the paper's 7B" in text
    assert text.count("\n| C") == 52


def test_the_counts_are_all_claims_and_say_what_is_not_known(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    report = write_report(places)
    top = next(line for line in report.text.splitlines() if line.startswith("* this machine: "))
    assert sum(int(number) for number in re.findall(r"(?:: |, )(\d+) ", top)) == 52
    assert top.endswith("(52 claims).")
    once = "2 of 2 decided; 2 rest on points of a single run (\u2021): their interval is too narrow or"
    assert any(once in note for note in report.notes)


def test_disturbed_points_are_counted_and_mark_their_verdicts(places):
    rows = [replace(row, disturbed=row.batch_size == 32) for row in decode_rows()]
    write_rows(places.fresh_rows / "fig01_batching.csv", rows)
    report = write_report(places)
    busy = "This machine was not idle: one that is has at most 5 %."
    assert f"Disturbed points: 1 of 2 (50.0 %); figure 1: 1. {busy}" in report.notes
    first = next(line for line in report.text.splitlines() if line.startswith("| C01"))
    assert "**reproduced\u2020\u2021**" in first


def test_each_clock_has_its_table_and_the_head_has_both_counts(places):
    write_rows(places.fresh_rows / "fig08.csv", operator_rows("cuda_graph", 20.0) + operator_rows("host_clock", 160.0))
    clocks, folder = write_report(places).machine.clocks, places.fresh_rows.parent
    own, graph = total(clocks[AUTO]), total(clocks[OTHER_TIMER])
    assert graph != own
    head = (folder / "claims.md").read_text().partition("| claim")[0].splitlines()
    assert {f"* this machine: {own}.", f"* this machine, cuda_graph: {graph}."} <= set(head)
    assert any("C12 (differs, reproduced)" in line for line in head)
    for name in ("claims", "claims_cuda_graph"):
        assert "there are no rows of" not in (folder / f"{name}.csv").read_text()


def test_a_clock_that_decides_and_has_no_rows_is_missed_where_it_could_have_some(places):
    norms = [
        replace(row, figure="text 6", system=system, workload="", batch_size=32, metric="norm_latency", rank=None)
        for row, system in zip(operator_rows("host_clock", 64.0), ("unfused", "fused"), strict=False)
    ]
    path = places.fresh_rows / "rows.csv"
    write_rows(path, [*operator_rows("cuda_graph", 20.0), *norms])
    verdicts = write_report(places).verdicts
    remarks = {verdict.id: verdict.remark for verdict in verdicts}
    marks = {verdict.id: marked(verdict)[-1] for verdict in verdicts}
    assert (marks["C12"], marks["C45"]) == ("§", "§")
    assert "C45 by the other clock (§)" in certainty(verdicts)
    assert "judged by cuda_graph: there are no rows of host_clock, which decides" in remarks["C12"]
    assert "judged by host_clock: there are no rows of cuda_graph, which decides" in remarks["C45"]
    write_rows(path, [replace(row, hardware="cpu", scale="laptop") for row in norms])
    on_cpu = {verdict.id: verdict for verdict in write_report(places).verdicts}["C45"]
    assert (on_cpu.verdict, on_cpu.clock, on_cpu.remark) == ("not testable on this hardware", "host_clock", "")


def test_a_clock_that_is_not_steady_decides_nothing(places):
    path = places.fresh_rows / "fig08.csv"
    host = operator_rows("host_clock", 160.0, launch=None)
    write_rows(path, [*host, *operator_rows("cuda_graph", 20.0)])
    judged = {verdict.id: verdict for verdict in write_report(places).verdicts}["C12"]
    assert (judged.verdict, judged.clock, judged.clock_missing) == ("reproduced", "cuda_graph", "host_clock")
    assert (judged.other_clock, NOT_STEADY in judged.remark) == ("", True)
    assert not (places.fresh_rows.parent / "claims_cuda_graph.csv").exists()
    write_rows(path, host)
    alone = {verdict.id: verdict for verdict in write_report(places).verdicts}["C12"]
    assert (alone.verdict, alone.reason) == ("not measured here", NOT_STEADY)


def test_one_clock_has_one_count(places):
    write_rows(places.fresh_rows / "fig08.csv", operator_rows("host_clock", 160.0))
    assert "cuda_graph:" not in write_report(places).text.partition("| claim")[0]
    assert not (places.fresh_rows.parent / "claims_cuda_graph.csv").exists()


def test_the_head_counts_rows_of_older_source(places):
    now = fingerprint(REPOSITORY / "experiments" / "fig01_batching.py")
    first, second = decode_rows()
    rows = [first, replace(second, source_hash="0" * 12), replace(second, batch_size=2, source_hash=now)]
    path = places.fresh_rows / "fig01_batching.csv"
    write_rows(path, rows)
    report = write_report(places)
    said = "2 of 3 (66.7 %), 1 of which do not say what source they are of; figure 1."
    assert any(note.endswith(said) for note in report.notes)
    assert said in report.text.partition("| claim")[0]
    write_rows(path, rows[2:])
    report = write_report(places)
    assert "older source" not in report.text


def test_verdict_tables_are_no_rows(places):
    write_rows(places.recorded_rows / "fig01_batching.csv", decode_rows())
    recorded = machine_of(places.recorded_rows, places.recorded_figures, PAPER)
    write_results(recorded, places.recorded_rows / "page.md", places.recorded_rows)
    assert len(read_folder(places.recorded_rows)) == 2


def test_links_of_recorded_tables_leave_the_folder(places):
    write_rows(places.recorded_rows / "fig01_batching.csv", decode_rows())
    places.recorded_figures.mkdir(parents=True)
    (places.recorded_figures / "fig01_batching.png").touch()
    recorded = machine_of(places.recorded_rows, places.recorded_figures, PAPER)
    table = write_results(recorded, places.recorded_rows / "page.md", places.recorded_rows)
    assert "[1](../../figures/cpu/fig01_batching.png)" in table.read_text()


def test_smoke_rows_make_a_table_without_verdicts_on_them(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows("smoke"))
    verdicts = write_report(places).verdicts
    assert "scale=smoke" in verdicts[0].reason


def test_damaged_rows_are_named_and_no_table_is_written(places):
    path = places.fresh_rows / "fig01_batching.csv"
    write_rows(path, decode_rows())
    path.write_text(path.read_text().replace("12.0", "twelve"))
    with pytest.raises(RowsError, match=r"fig01_batching.csv, line 3: value is 'twelve', not a number; .*delete"):
        write_report(places)
    assert not (places.fresh_rows.parent / "claims.csv").exists()


def test_verdicts_whose_bounds_repeats_cross_are_counted_as_noise(places):
    rows = [
        replace(row, repeat=repeat, value=row.value * (factor if row.batch_size == 32 else 1.0))
        for row in decode_rows()
        for repeat, factor in enumerate((1.0, 1.2, 1.4))
    ]
    write_rows(places.fresh_rows / "fig01_batching.csv", rows)
    report = write_report(places)
    assert report.verdicts[0].verdict == "within noise"
    assert any(note.startswith("Other choices of the repeats that count: ") for note in report.notes)
