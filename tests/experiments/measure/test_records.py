"""Rows on disk: what is written comes back, a damaged file is one clear error, an interrupted write loses nothing."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from experiments.measure.records import Row, RowFile, RowsError, read_rows, write_rows

ROW = Row(
    figure="8", panel="Distinct", system="SGMV", workload="Distinct", model="", hardware="cpu", batch_size=64,
    seq_len=None, rank=16, metric="latency", value=1234.5, unit="us", statistic="median", timer="host_clock",
    scale="laptop", config_hash="abc", commit="123", device='EPYC, "2 cores"',
)  # fmt: skip


def test_rows_survive_a_round_trip(tmp_path):
    known = {"numa_nodes": 2, "l3_mib": 32.5, "repeat": 0, "other_cpu": 0.25, "disturbed": True, "calib_gemm_us": 7.0}
    bare = replace(ROW, system="", batch_size=None, value=1e-300, rank=None, seq_len=7, disturbed=False)
    rows = [ROW, bare, replace(ROW, **known)]
    write_rows(tmp_path / "deep" / "rows.csv", rows)
    assert read_rows(tmp_path / "deep" / "rows.csv") == rows


def test_files_from_before_a_column_are_read_and_lack_it(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [replace(ROW, device="EPYC")])
    path.write_text("\n".join(",".join(line.split(",")[:-13]) for line in path.read_text().splitlines()))
    assert read_rows(path) == [replace(ROW, device="EPYC")]


def test_a_new_measurement_takes_the_place_of_its_repeat_and_of_all_with_other_settings(tmp_path):
    file, other = RowFile(tmp_path / "rows.csv"), replace(ROW, batch_size=1)
    for repeat in range(3):
        file.replace([replace(ROW, repeat=repeat), replace(ROW, repeat=repeat, statistic="p10")])
    file.replace([other])
    file.replace([replace(ROW, repeat=1, value=5.0)])
    told = [(row.repeat, row.value) for row in file.rows if row.statistic == "median"]
    assert told == [(0, 1234.5), (1, 5.0), (2, 1234.5), (None, 1234.5)]
    newer = replace(ROW, repeat=0, config_hash="new")
    file.replace([newer])
    assert read_rows(file.path) == file.rows == RowFile(file.path).rows == [newer, other]


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
    words, pipe = [sys.executable, "-c", HOLDING, str(path), str(one)], subprocess.PIPE
    runs = [subprocess.Popen([*words, name], stdin=pipe, stdout=pipe, text=True) for name in "ab"]
    assert [run.stdout.readline() for run in runs] == ["0\n", "0\n"]  # both have read the empty file
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        run.communicate(timeout=60)
    assert {(row.system, row.batch_size) for row in read_rows(path)} == {(name, n) for name in "ab" for n in range(40)}


def test_rows_that_another_wrote_since_are_kept_by_every_change(tmp_path):
    ours, theirs = RowFile(tmp_path / "rows.csv"), RowFile(tmp_path / "rows.csv")
    ours.replace([replace(ROW, repeat=0)])
    other = replace(ROW, batch_size=1)
    theirs.replace([other])
    ours.drop({ROW.point})
    assert ours.rows == read_rows(ours.path) == [other]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"value": -1.0}, True),
        ({"value": float("nan")}, True),
        ({"metric": "load_time"}, True),
        ({"metric": "added_latency"}, False),
        ({"metric": "logit_error"}, False),
        ({"kind": "simulated"}, False),
    ],
)
def test_a_measured_duration_is_above_zero_or_nothing_is_written(tmp_path, changes, refused):
    file = RowFile(tmp_path / "rows.csv")
    rows = [replace(ROW, batch_size=1), replace(ROW, **{"value": 0.0, **changes})]
    if refused:
        with pytest.raises(RowsError, match="of SGMV, figure 8: a measured duration must be above 0"):
            file.replace(rows)
    else:
        file.replace(rows)
    assert file.path.exists() is not refused


@pytest.mark.parametrize(
    ("line", "old", "new", "expected"),
    [
        (0, "rank,", "", ["line 1", "misses the columns rank"]),
        (2, ",16,latency", "", ["line 3", "cells instead of 43"]),
        (1, "1234.5", "fast", ["line 2", "value is 'fast'"]),
        (1, ",64,", ",many,", ["line 2", "batch_size is 'many'"]),
    ],
)
def test_a_corrupt_file_is_one_error_with_file_line_and_remedy(tmp_path, line, old, new, expected):
    path = tmp_path / "rows.csv"
    write_rows(path, [replace(ROW, disturbed=False)] * 2)
    lines = path.read_text().splitlines()
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(RowsError) as caught:
        read_rows(path)
    assert [part for part in (str(path), *expected, "delete") if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("step", "error", "told"),
    [
        ("replace", KeyboardInterrupt(), (KeyboardInterrupt, "")),
        (
            "fsync",
            OSError(errno.ENOSPC, "No space left"),
            (RowsError, r"2 rows cannot be written \(No space .*make room"),
        ),
    ],
    ids=["interrupted", "full disk"],
)
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, step, error, told):
    path = tmp_path / "rows.csv"
    write_rows(path, [ROW])

    def failing(*_):
        raise error

    monkeypatch.setattr(os, step, failing)
    with pytest.raises(told[0], match=told[1] or None):
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
