"""`make report`: the verdict table beside the rows it judged, and clear errors when there is nothing to judge."""

import csv
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.claims.table import certainty, total
from experiments.commands.batch import SOURCES
from experiments.commands.report import AUTO, choose, read_folder, verdicts_by_clock, write_report
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import Folders
from experiments.harness.source import fingerprint
from punica.measure.records import Row, RowsError, write_rows

PAPER = REPOSITORY / "paper_results"


def decode_rows(scale="laptop"):
    columns = {"figure": "1", "panel": "decode", "system": "backbone", "workload": "", "model": "llama-small"}
    columns |= {"hardware": "cpu", "seq_len": 128, "rank": None, "metric": "step_latency", "unit": "ms"}
    columns |= {"statistic": "median", "timer": "host_clock", "scale": scale, "device": "A CPU, 2 cores"}
    columns |= {"date": "2026-01-02", "commit": "abc1234"}
    return [Row(batch_size=size, value=value, **columns) for size, value in ((1, 10.0), (32, 12.0))]


@pytest.fixture
def places(tmp_path):
    return Folders(
        fresh_rows=tmp_path / "outputs/cpu/rows",
        fresh_figures=tmp_path / "outputs/cpu/figures",
        recorded_rows=tmp_path / "results/cpu",
        recorded_figures=tmp_path / "figures/cpu",
        paper=PAPER,
    )


def test_table_is_written_beside_the_rows(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    places.fresh_figures.mkdir(parents=True)
    (places.fresh_figures / "fig01_batching.png").touch()
    source, rows, target, figures = choose(places, "auto")
    assert source == "fresh"
    verdicts = write_report(rows, target, figures, PAPER).verdicts
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
    assert "Every machine" not in text


def test_the_counts_are_all_claims_and_say_what_is_not_known(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    top = report.table.read_text().splitlines()[2]
    assert sum(int(number) for number in re.findall(r"(?:^|, )(\d+) ", top)) == 52
    assert top.endswith("(52 claims).")
    once = "2 of 2 decided; 2 rest on points of a single run (\u2021), so they have no interval and cannot be within"
    assert any(once in note for note in report.notes)


def test_every_recorded_machine_has_its_column(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    slow = [replace(row, hardware="h200", value=row.value * row.batch_size) for row in decode_rows("paper")]
    write_rows(places.recorded_rows.parent / "h200" / "fig01_batching.csv", slow)
    recorded = places.recorded_rows.parent
    write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER, recorded=recorded)
    text = (places.fresh_rows.parent / "claims.md").read_text()
    assert "| claim | statement | this machine | h200 |" in text
    last = [line for line in text.splitlines() if line.startswith("| C01")][-1]
    assert last.endswith("| reproduced\u2021 | differs\u2021 |")
    for name in ("this machine", "h200"):  # what their missing intervals mean
        assert re.search(rf"^\* {name}: Verdicts .* 2 rest on points of a single run", text, re.MULTILINE)


def test_disturbed_points_are_counted_and_mark_their_verdicts(places):
    rows = [replace(row, disturbed=row.batch_size == 32) for row in decode_rows()]
    write_rows(places.fresh_rows / "fig01_batching.csv", rows)
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    busy = "This machine was not idle: one that is has at most 5 %."
    assert f"Disturbed points: 1 of 2 (50.0 %); figure 1: 1. {busy}" in report.notes
    assert "Disturbed points: 1 of 2" in report.summary("fresh")
    first = next(line for line in report.table.read_text().splitlines() if line.startswith("| C01"))
    assert "**reproduced\u2020\u2021**" in first
    assert any("Below 80 %" in note for note in report.notes)  # disturbed, and no interval that says how far off


def test_a_machine_that_decides_too_little_is_called_unfit(places):
    rows = [
        replace(row, repeat=repeat, value=row.value * (factor if row.batch_size == 32 else 1.0))
        for row in decode_rows()
        for repeat, factor in enumerate((1.0, 1.2, 1.4))
    ]
    write_rows(places.fresh_rows / "fig01_batching.csv", rows)
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    assert report.verdicts[0].verdict == "within noise"
    assert any("0 of 2 decided. Below 80 %: this machine, as it was, is unfit" in note for note in report.notes)


def test_a_busy_machine_with_repeats_is_fit_while_its_verdicts_are_decided(places):
    """Disturbed rows that agree with each other decide, and say that they were disturbed."""
    rows = [replace(row, repeat=repeat, disturbed=True) for row in decode_rows() for repeat in range(3)]
    write_rows(places.fresh_rows / "fig01_batching.csv", rows)
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    assert any("2 of 2 decided." in note for note in report.notes)
    assert not any("unfit" in note for note in report.notes)
    assert "**reproduced\u2020**" in report.table.read_text()


RECORDED = sorted(path.name for path in (REPOSITORY / "results").iterdir() if (path / "claims.csv").exists())


@pytest.mark.slow
@pytest.mark.parametrize("hardware", RECORDED)
def test_recorded_verdicts_are_those_of_the_recorded_rows(hardware):
    """Whoever records rows, or changes a rule, judges again: make report ARGS="source=recorded hardware=..."."""
    folder = REPOSITORY / "results" / hardware
    by_clock = verdicts_by_clock(read_folder(folder), PAPER)
    found = by_clock[AUTO]
    with (folder / "claims.csv").open(newline="") as stream:
        recorded = list(csv.DictReader(stream))
    assert [(line["id"], line["verdict"], line["why"]) for line in recorded] == [
        (v.id, v.verdict, v.why) for v in found
    ]
    assert all(verdict.why for verdict in found if verdict.verdict == "differs")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"[{total(found)}](results/{hardware}/claims.md)" in readme
    for timer, verdicts in by_clock.items():
        assert total(verdicts).removesuffix(" (52 claims)") in readme, timer
    decided, measured, once = re.search(r"(\d+) of (\d+) decided(?:; (\d+) rest)?", certainty(found)).groups()
    said = f"{once} of {measured} on the {hardware.upper()}" if once else f"{decided} of {measured} decided"
    assert said in readme


TABLES = sorted(path for name in RECORDED for path in (REPOSITORY / "results" / name).glob("claims*.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TABLES, ids=[f"{path.parent.name}-{path.stem}" for path in TABLES])
def test_committed_tables_are_what_the_report_writes(path, tmp_path):
    """Byte for byte. make report ARGS="source=recorded hardware=..." writes one, timer=host_clock the other."""
    folder = path.parent
    (tmp_path / "figures").symlink_to(REPOSITORY / "figures")
    target = tmp_path / "results" / folder.name
    timer = path.stem.removeprefix("claims").removeprefix("_") or "auto"
    write_report(folder, target, tmp_path / "figures" / folder.name, PAPER, timer, recorded=folder.parent)
    for kind in (".csv", ".md"):
        assert (target / path.name).with_suffix(kind).read_bytes() == path.with_suffix(kind).read_bytes(), kind


def operator_rows(timer, sgmv):
    """Figure 8: SGMV takes ``sgmv`` us, Gather-BMM and the loop 80."""
    columns = {"figure": "8", "panel": "", "model": "", "hardware": "h200", "seq_len": None, "rank": 16}
    columns |= {"metric": "latency", "unit": "us", "statistic": "median", "scale": "paper", "timer": timer}
    columns |= {"date": "2026-01-02", "commit": "abc1234", "device": "A GPU"}
    return [
        Row(system=system, workload=workload, batch_size=size, value=value, **columns)
        for system, value in (("SGMV", sgmv), ("Gather-BMM", 80.0), ("Loop", 80.0))
        for workload in ("Distinct", "Uniform", "Skewed", "Identical")
        for size in (1, 64)
    ]


@pytest.mark.parametrize("timer", ["auto", "cuda_graph"])
def test_the_head_has_the_counts_of_both_clocks(places, timer):
    write_rows(places.fresh_rows / "fig08.csv", operator_rows("cuda_graph", 20.0) + operator_rows("host_clock", 160.0))
    folder = places.fresh_rows.parent
    report = write_report(places.fresh_rows, folder, places.fresh_figures, PAPER, timer)
    head = report.table.read_text().partition("| claim")[0]
    write_report(places.fresh_rows, folder, places.fresh_figures, PAPER, "host_clock")
    own = (folder / "claims_host_clock.md").read_text().splitlines()[2].removesuffix(".")
    graph = write_report(places.fresh_rows, folder, places.fresh_figures, PAPER, "cuda_graph").verdicts
    assert f"`claims.md`): {own};" in head
    assert f"(`claims_cuda_graph.md`): {total(graph)}." in head
    assert own != total(graph)
    assert "C12 (differs, reproduced)" in head


def test_one_clock_has_one_count(places):
    write_rows(places.fresh_rows / "fig08.csv", operator_rows("host_clock", 160.0))
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    assert "two clocks" not in report.table.read_text()


def test_the_head_counts_rows_of_older_source(places):
    now = fingerprint(REPOSITORY / "experiments" / "fig01_batching.py")
    first, second = decode_rows()
    rows = [first, replace(second, source_hash="0" * 12), replace(second, batch_size=2, source_hash=now)]
    path = places.fresh_rows / "fig01_batching.csv"
    write_rows(path, rows)
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    said = "2 of 3 (66.7 %), 1 of which do not say what source they are of; figure 1."
    assert any(note.endswith(said) for note in report.notes)
    assert said in report.table.read_text().partition("| claim")[0]
    write_rows(path, rows[2:])
    report = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    assert "older source" not in report.table.read_text()


def test_recorded_rows_are_judged_in_place_and_never_mixed_with_fresh_ones(places):
    write_rows(places.recorded_rows / "fig01_batching.csv", decode_rows())
    source, rows, target, figures = choose(places, "auto")
    assert (source, rows, target) == ("recorded", places.recorded_rows, places.recorded_rows)
    write_report(rows, target, figures, PAPER)
    again = read_folder(rows)  # claims.csv lies in the same folder and is not a file of rows
    assert len(again) == 2
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    assert choose(places, "auto")[0] == "fresh"
    assert choose(places, "recorded")[1] == places.recorded_rows


def test_links_of_recorded_tables_leave_the_folder(places):
    write_rows(places.recorded_rows / "fig01_batching.csv", decode_rows())
    places.recorded_figures.mkdir(parents=True)
    (places.recorded_figures / "fig01_batching.png").touch()
    _, rows, target, figures = choose(places, "recorded")
    write_report(rows, target, figures, PAPER)
    assert "[1](../../figures/cpu/fig01_batching.png)" in (target / "claims.md").read_text()


def test_smoke_rows_make_a_table_without_verdicts_on_them(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows("smoke"))
    verdicts = write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER).verdicts
    assert "scale=smoke" in verdicts[0].reason


@pytest.mark.parametrize("source", SOURCES)
def test_no_rows_says_how_to_get_some(places, source):
    with pytest.raises(ConfigError, match=r"no (fresh|recorded) rows in .*: measure them with make reproduce$"):
        choose(places, source)


def test_no_rows_names_recorded_hardware(places):
    write_rows(places.recorded_rows.parent / "h200" / "fig01_batching.csv", decode_rows())
    with pytest.raises(ConfigError, match='make report ARGS="source=recorded hardware=h200"'):
        choose(places, "fresh")


def test_unknown_source(places):
    with pytest.raises(ConfigError, match="source='old' must be one of auto, fresh, recorded"):
        choose(places, "old")


def test_damaged_rows_are_named_and_no_table_is_written(places):
    path = places.fresh_rows / "fig01_batching.csv"
    write_rows(path, decode_rows())
    path.write_text(path.read_text().replace("12.0", "twelve"))
    with pytest.raises(RowsError, match=r"fig01_batching.csv, line 3: value is 'twelve', not a number; .*delete"):
        write_report(places.fresh_rows, places.fresh_rows.parent, places.fresh_figures, PAPER)
    assert not (places.fresh_rows.parent / "claims.csv").exists()


def command_line(tmp_path, *overrides):
    paths = [f"paths.{name}={tmp_path / name}" for name in ("outputs", "results", "figures")]
    command = [sys.executable, "-m", "experiments.commands.report", "hardware=cpu", *paths, *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=900, check=False)


@pytest.mark.slow
def test_command_line(tmp_path):
    empty = command_line(tmp_path)
    assert empty.returncode == 2
    assert empty.stderr.strip().splitlines()[-1].startswith("error: no recorded rows in")
    assert "Traceback" not in empty.stderr
    path: Path = tmp_path / "outputs/cpu/rows/fig01_batching.csv"
    write_rows(path, decode_rows())
    done = command_line(tmp_path, "source=fresh")
    assert done.returncode == 0, done.stderr
    assert "52 claims, fresh rows" in done.stdout
    counted = [line.split() for line in done.stdout.splitlines()]
    assert ["reproduced", "1"] in counted
    assert ["holds", "by", "arithmetic", "6"] in counted
    assert "Disturbed points: not known" in done.stdout
    path.write_text(path.read_text()[:-10])
    damaged = command_line(tmp_path)
    assert damaged.returncode == 2
    assert "fig01_batching.csv, line 3" in damaged.stderr
    assert "Traceback" not in damaged.stderr
