"""Rows on disk: what is written comes back, a damaged file is one clear error, an interrupted write loses nothing."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.measure.records import (
    COLUMNS,
    Row,
    RowFile,
    RowsError,
    ensure_writable,
    read_rows,
    write_measured,
    write_rows,
)

ROW = Row(
    figure="8", panel="Distinct", system="SGMV", workload="Distinct", model="", hardware="cpu", batch_size=64,
    seq_len=None, rank=16, metric="latency", value=1234.5, unit="us", statistic="median", timer="host_clock",
    scale="laptop", config_hash="abc", commit="123", device='EPYC, "2 cores"',
)  # fmt: skip


def test_columns_are_the_contract():
    expected = (
        "figure,panel,system,workload,model,hardware,batch_size,seq_len,rank,metric,value,unit,kind,statistic,timer,"
        "scale,config_hash,source_hash,commit,date,device,python,torch,triton,driver,transformers,peft,numa_nodes,l3_mib,"
        "repeat,disturbed,other_cpu,calib_gemm_us,calib_copy_us,sm_clock_mhz,t_s,gpu,cost_model,"
        "engine,host_cpu,cuda,power_limit_w,calib_launch_us"
    )
    assert ",".join(COLUMNS) == expected


def test_rows_survive_a_round_trip(tmp_path):
    rows = [ROW, replace(ROW, system="", batch_size=None, value=1e-300, rank=None, seq_len=7)]
    write_rows(tmp_path / "deep" / "rows.csv", rows)
    assert read_rows(tmp_path / "deep" / "rows.csv") == rows


def test_what_disturbed_a_repeat_survives_a_round_trip(tmp_path):
    known = {"numa_nodes": 2, "l3_mib": 32.5, "repeat": 0, "other_cpu": 0.25}
    rows = [replace(ROW, **known, disturbed=True, calib_gemm_us=7.0), replace(ROW, disturbed=False, peft="0.18.0")]
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv") == rows


def test_files_from_before_a_column_are_read_and_lack_it(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [ROW])
    old = [
        ",".join(line.split(",")[:-13])
        for line in path.read_text().replace(',"EPYC, ""2 cores""",', ",EPYC,").splitlines()
    ]
    path.write_text("\n".join(old))
    assert read_rows(path) == [replace(ROW, device="EPYC")]


def test_a_new_measurement_replaces_the_rows_of_its_point_only(tmp_path):
    file = RowFile(tmp_path / "rows.csv")
    other = replace(ROW, batch_size=1)
    file.replace([ROW, replace(ROW, statistic="p10"), other])
    newer = replace(ROW, config_hash="new", value=1.0)
    file.replace([newer])
    assert read_rows(tmp_path / "rows.csv") == [newer, other]  # in the place of the old ones
    assert [row.config_hash for row in RowFile(tmp_path / "rows.csv").rows].count("new") == 1


def test_repeats_of_a_point_stand_beside_each_other_until_its_settings_change(tmp_path):
    file = RowFile(tmp_path / "rows.csv")
    for repeat in range(3):
        file.replace([replace(ROW, repeat=repeat)])
    file.replace([replace(ROW, repeat=1, value=5.0)])
    assert [(row.repeat, row.value) for row in file.rows] == [(0, 1234.5), (1, 5.0), (2, 1234.5)]
    file.replace([replace(ROW, repeat=0, config_hash="new")])
    assert [(row.repeat, row.config_hash) for row in read_rows(tmp_path / "rows.csv")] == [(0, "new")]


HOLDING = """
import sys
from dataclasses import replace
from experiments.measure.records import RowFile, read_rows
file, row = RowFile(sys.argv[1]), read_rows(sys.argv[2])[0]
print(len(file.rows), flush=True)
sys.stdin.readline()
for batch in range(40):
    file.replace([replace(row, batch_size=batch, system=sys.argv[3])])
"""


def test_two_processes_that_write_one_file_lose_no_row_of_each_other(tmp_path):
    path, one = tmp_path / "rows.csv", tmp_path / "one.csv"
    write_rows(one, [ROW])
    command = [sys.executable, "-c", HOLDING, str(path), str(one)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (subprocess.Popen([*command, "a"], **pipes) as first, subprocess.Popen([*command, "b"], **pipes) as second):
        assert [run.stdout.readline() for run in (first, second)] == ["0\n", "0\n"]  # both have read the empty file
        for run in (first, second):
            run.stdin.write("\n")
            run.stdin.flush()
        assert [run.wait(60) for run in (first, second)] == [0, 0]
    written = {(row.system, row.batch_size) for row in read_rows(path)}
    assert written == {(name, batch) for name in "ab" for batch in range(40)}


def test_rows_that_another_wrote_since_are_kept_by_every_change(tmp_path):
    ours, theirs = RowFile(tmp_path / "rows.csv"), RowFile(tmp_path / "rows.csv")
    ours.replace([replace(ROW, repeat=0)])
    other = replace(ROW, batch_size=1)
    theirs.replace([other])
    ours.mark([(ROW.config_hash, 0)])
    assert read_rows(ours.path) == [replace(ROW, repeat=0, disturbed=True), other]
    ours.drop({ROW.point})
    assert ours.rows == read_rows(ours.path) == [other]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_measured_latency_that_is_not_above_zero_is_refused_before_anything_is_written(tmp_path, value):
    file = RowFile(tmp_path / "rows.csv")
    with pytest.raises(RowsError, match=r"latency=.* us of SGMV, figure 8: a measured duration must be above 0"):
        file.replace([replace(ROW, batch_size=1), replace(ROW, value=value)])
    with pytest.raises(RowsError, match="must be above 0"):
        write_measured(file.path, [replace(ROW, value=value)])
    assert not file.path.exists()


@pytest.mark.parametrize(
    "changes",
    [{"metric": "added_latency"}, {"metric": "logit_error"}, {"kind": "simulated"}, {"metric": "stall", "unit": "ms"}],
    ids=lambda changes: next(iter(changes.values())),
)
def test_a_difference_an_error_and_a_simulated_time_may_be_zero(tmp_path, changes):
    file = RowFile(tmp_path / "rows.csv")
    file.replace([replace(ROW, value=0.0, **changes)])
    assert len(read_rows(file.path)) == 1


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda lines: [lines[0].replace("rank,", ""), *lines[1:]], ["line 1", "misses the columns rank"]),
        (lambda lines: [], ["line 1", "misses the columns"]),
        (lambda lines: [*lines[:2], lines[2][:40]], ["line 3", "cells instead of 43"]),
        (lambda lines: [lines[0], lines[1].replace("1234.5", "fast")], ["line 2", "value is 'fast'"]),
        (lambda lines: [lines[0], lines[1].replace(",64,", ",many,")], ["line 2", "batch_size is 'many'"]),
        (
            lambda lines: [lines[0], lines[1].replace("measured", "guessed")],
            ["line 2", "kind is 'guessed'", "simulated"],
        ),
        (lambda lines: [lines[0], lines[1].replace("median", "mean")], ["line 2", "statistic is 'mean'", "p90"]),
        (
            lambda lines: [lines[0], lines[1].removesuffix("," * 13) + ",maybe" + "," * 12],
            ["line 2", "disturbed is 'maybe'"],
        ),
        (
            lambda lines: [lines[0].replace("repeat,disturbed", "disturbed,repeat"), *lines[1:]],
            ["line 1", "has the columns"],
        ),
    ],
    ids=["column-missing", "empty-file", "truncated-line", "value", "batch-size", "kind", "statistic", "flag", "order"],
)
def test_a_corrupt_file_is_one_error_with_file_line_and_remedy(tmp_path, damage, expected):
    path = tmp_path / "rows.csv"
    write_rows(path, [ROW, ROW])
    path.write_text("\n".join(damage(_lines(path))), encoding="utf-8")
    with pytest.raises(RowsError) as caught:
        read_rows(path)
    for part in [str(path), *expected, "delete"]:
        assert part in str(caught.value)


def test_bytes_that_are_not_text_are_the_same_kind_of_error(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00rows")
    with pytest.raises(RowsError, match="cannot be read as CSV"):
        read_rows(tmp_path / "rows.csv")


def test_an_absent_file_says_how_to_make_it(tmp_path):
    with pytest.raises(RowsError, match="make figure FIG=fig08"):
        read_rows(tmp_path / "fig08.csv")


def test_a_folder_that_cannot_be_written_names_folder_and_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RowsError, match=r"cannot write in .*file/rows.*paths\.outputs="):
        ensure_writable(tmp_path / "file" / "rows")


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    write_rows(path, [ROW])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, [ROW, ROW])
    assert read_rows(path) == [ROW]
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    write_rows(path, [ROW])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RowsError, match=r"rows.csv: 2 rows cannot be written \(No space left .*make room there"):
        write_rows(path, [ROW, ROW])
    assert read_rows(path) == [ROW]
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    left, others = tmp_path / ".rows-aok4vo1r.tmp", [tmp_path / ".rows-b-aok4vo1r.tmp", tmp_path / "rows.tmp"]
    for path in (left, *others):
        path.write_text("half")
    RowFile(tmp_path / "rows.csv").replace([ROW])
    assert not left.exists()
    assert all(path.exists() for path in others)
