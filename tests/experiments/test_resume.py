"""The harness: what is on disk is skipped, what is stale is measured again, what is finished stays."""

from dataclasses import replace

import pytest
from fakes import QUIET, Fake, composed

from experiments.harness.command import or_exit
from experiments.harness.resume import run
from experiments.measure.records import RowsError, read_rows, write_rows

GRID = ("workload=distinct", "figure.batch_sizes=[1,2,4]")


def rows_of(tmp_path):
    return read_rows(tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv")


def test_a_second_run_measures_nothing(tmp_path):
    first, second = Fake(), Fake()
    outcome = run(composed(tmp_path, *GRID), first)
    assert (outcome.points, outcome.measured, outcome.skipped) == (3, 3, 0)
    before = rows_of(tmp_path)
    outcome = run(composed(tmp_path, *GRID), second)
    assert (outcome.measured, outcome.skipped, second.measured) == (0, 3, [])
    assert rows_of(tmp_path) == before


def test_a_wider_grid_measures_only_what_is_new(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    fake = Fake()
    run(composed(tmp_path, "workload.names=[Distinct,Skewed]", "figure.batch_sizes=[2,8]"), fake)
    assert fake.measured == [("Distinct", 8), ("Skewed", 2), ("Skewed", 8)]


@pytest.mark.parametrize(
    "override",
    ["figure.h1=97", "scale.repeats=4", "scale.warmup=0", "hardware.flush_mib=1", "hardware.threads=3"],
)
def test_a_changed_setting_makes_its_rows_stale_and_replaces_them(tmp_path, override):
    run(composed(tmp_path, *GRID), Fake())
    old = {row.config_hash for row in rows_of(tmp_path)}
    fake = Fake()
    run(composed(tmp_path, *GRID, override), fake)
    assert len(fake.measured) == 3
    assert len(rows_of(tmp_path)) == 3 * 4
    assert not old & {row.config_hash for row in rows_of(tmp_path)}


def test_force_measures_everything_again(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    fake = Fake()
    run(composed(tmp_path, *GRID, "force=true"), fake)
    assert len(fake.measured) == 3
    assert len(rows_of(tmp_path)) == 3 * 4


def test_deleted_rows_are_measured_again_alone(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    path = tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"
    write_rows(path, [row for row in rows_of(tmp_path) if row.batch_size != 2])
    fake = Fake()
    run(composed(tmp_path, *GRID), fake)
    assert fake.measured == [("Distinct", 2)]


def test_an_interrupted_run_keeps_its_finished_rows_and_goes_on_from_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        or_exit(lambda: run(composed(tmp_path, *GRID), Fake(stop_at=4)))
    assert ended.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    assert sorted({row.batch_size for row in rows_of(tmp_path)}) == [1, 2]
    fake = Fake()
    run(composed(tmp_path, *GRID), fake)
    assert fake.measured == [("Distinct", 4)]


def test_a_wrong_result_gets_no_row_and_is_reported(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Fake(wrong=[2]))
    assert sorted({row.batch_size for row in rows_of(tmp_path)}) == [1, 4]
    assert len(outcome.failed) == 1
    assert "batch 2" in outcome.failed[0]
    assert "off by one" in outcome.failed[0]


def test_a_result_that_turns_wrong_loses_the_rows_it_had(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    outcome = run(composed(tmp_path, *GRID, "force=true"), Fake(wrong=[2]))
    assert len(outcome.failed) == 1
    assert sorted({row.batch_size for row in rows_of(tmp_path)}) == [1, 4]


def test_marked_rows_are_measured_again_by_the_next_run_and_the_quieter_stays(tmp_path, machine):
    busy = replace(QUIET, disturbed=True, other_cpu=0.25)
    machine.script = [QUIET, busy]
    assert run(composed(tmp_path, *GRID), Fake()).disturbed == 1

    def again(disturbance):
        machine.script, fake = [disturbance], Fake()
        outcome = run(composed(tmp_path, *GRID), fake)
        return fake.measured, outcome.disturbed, {row.other_cpu for row in rows_of(tmp_path) if row.disturbed}

    assert again(replace(busy, other_cpu=0.5)) == ([("Distinct", 2)], 1, {0.25})
    assert again(replace(busy, other_cpu=0.1)) == ([("Distinct", 2)], 1, {0.1})
    assert again(QUIET) == ([("Distinct", 2)], 0, set())
    assert again(QUIET) == ([], 0, set())


def test_rows_carry_their_provenance(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    row = rows_of(tmp_path)[0]
    assert (row.figure, row.panel, row.system, row.hardware) == ("8", "Distinct", "SGMV", "cpu")
    assert (row.statistic, row.value, row.timer, row.scale) == ("median", 2.0, "host_clock", "smoke")
    assert row.device
    assert row.date
    assert row.torch
    assert len(row.config_hash) == 12


def test_a_corrupt_rows_file_stops_before_measuring_and_is_not_touched(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    path = tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"
    damaged = path.read_text().replace(",2.0,", ",two,", 1)
    path.write_text(damaged)
    fake = Fake()
    with pytest.raises(RowsError, match=r"line 2: value is 'two'.*delete"):
        run(composed(tmp_path, *GRID), fake)
    assert fake.measured == []
    assert path.read_text() == damaged


def test_an_unwritable_folder_stops_before_measuring(tmp_path):
    (tmp_path / "cpu").write_text("a file in the way")
    fake = Fake()
    with pytest.raises(RowsError, match=r"cannot write in .*paths\.outputs="):
        run(composed(tmp_path, *GRID), fake)
    assert fake.measured == []
