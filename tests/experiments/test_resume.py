"""Runs: what is on disk is skipped, what is stale is measured again, what is finished stays."""

import pytest
from fakes import NAME, Fake, composed, rows_of

from experiments.harness.command import or_exit
from experiments.harness.resume import run
from experiments.measure.records import RowsError, write_rows

GRID = ("workload=distinct", "figure.batch_sizes=[1,2,4]")
THREE = [("Distinct", batch) for batch in (1, 2, 4)]


def again(tmp_path, *overrides, **options):
    """What a further run measures, and its outcome."""
    fake = Fake(**options)
    outcome = run(composed(tmp_path, *GRID, *overrides), fake)
    return fake.measured, outcome


@pytest.fixture
def rows(tmp_path):
    """The file of a first run."""
    measured, outcome = again(tmp_path)
    assert (measured, outcome.points, outcome.measured, outcome.skipped) == (THREE, 3, 3, 0)
    return tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv"


def test_a_second_run_measures_nothing_and_deleted_rows_alone_are_measured_again(tmp_path, rows):
    before = rows.read_bytes()
    measured, outcome = again(tmp_path)
    assert (measured, outcome.measured, outcome.skipped, rows.read_bytes()) == ([], 0, 3, before)
    write_rows(rows, [row for row in rows_of(tmp_path) if row.batch_size != 2])
    assert again(tmp_path)[0] == [("Distinct", 2)]


def test_a_wider_grid_measures_only_what_is_new(tmp_path, rows):
    fake = Fake()
    run(composed(tmp_path, "workload.names=[Distinct,Skewed]", "figure.batch_sizes=[2,8]"), fake)
    assert fake.measured == [("Distinct", 8), ("Skewed", 2), ("Skewed", 8)]


def test_a_value_that_is_given_twice_is_one_point(tmp_path):
    fake = Fake()
    outcome = run(composed(tmp_path, "workload.names=[Distinct,Distinct]", "figure.batch_sizes=[2,2]"), fake)
    assert (fake.measured, outcome.points, outcome.measured) == ([("Distinct", 2)], 1, 1)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("figure.h1=97", False),
        ("scale.repeats=4", False),
        ("scale.warmup=0", False),
        ("hardware.flush_mib=1", False),
        ("hardware.threads=3", False),
        ("force=true", True),
    ],
)
def test_a_changed_setting_makes_its_rows_stale_and_replaces_them(tmp_path, rows, override, same):
    old = {row.config_hash for row in rows_of(tmp_path)}
    assert again(tmp_path, override)[0] == THREE
    found = rows_of(tmp_path)
    assert len(found) == 3
    assert (old == {row.config_hash for row in found}) is same


def test_an_interrupted_run_keeps_its_finished_rows_and_goes_on_from_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        or_exit(lambda: again(tmp_path, stop_at=4))
    assert ended.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    assert {row.batch_size for row in rows_of(tmp_path)} == {1, 2}
    assert again(tmp_path)[0] == [("Distinct", 4)]


@pytest.mark.parametrize("words", [(), ("force=true",), ("scale.warmup=0",)], ids=["at first", "again", "otherwise"])
def test_a_wrong_result_has_no_row_and_loses_those_it_had(tmp_path, words):
    if words:
        again(tmp_path)
    _, outcome = again(tmp_path, *words, wrong=[2])
    assert {row.batch_size for row in rows_of(tmp_path)} == {1, 4}
    (failed,) = outcome.failed
    assert "batch 2" in failed
    assert "off by one" in failed


def test_rows_carry_their_provenance(tmp_path, rows):
    row = rows_of(tmp_path)[0]
    assert (row.figure, row.panel, row.system, row.hardware) == ("8", "Distinct", "SGMV", "cpu")
    assert (row.statistic, row.value, row.timer, row.scale) == ("median", 2.0, "host_clock", "smoke")
    assert all([row.device, row.date, row.torch, row.source_hash, len(row.config_hash) == 12])


def test_a_corrupt_rows_file_stops_before_measuring_and_is_not_touched(tmp_path, rows):
    damaged = rows.read_text().replace(",2.0,", ",two,", 1)
    rows.write_text(damaged)
    with pytest.raises(RowsError, match=r"line 2: value is 'two'.*delete"):
        again(tmp_path, "force=true")
    assert rows.read_text() == damaged
