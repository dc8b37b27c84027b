"""Recorded rows, a stranger's too: all folders pass the check of a pull request; reports name who measured."""

from dataclasses import replace

import pytest
from fakes import PAPER

from experiments.commands.rows import faults
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import write_rows
from experiments.plots.floors import floors
from experiments.report.machines import machine_of, recorded_folders
from experiments.report.reproducing import recorded
from experiments.report.results import notes
from tests.experiments.report.report_rows import decode_rows

STAMPED = {"hardware": "gpu", "commit": "abc", "source_hash": "s", "config_hash": "c", "date": "d", "device": "G",
           "python": "3", "torch": "2", "scale": "gpu", "calib_gemm_us": 1.0, "calib_copy_us": 1.0}  # fmt: skip


@pytest.mark.slow
def test_recorded_rows_have_no_faults():
    assert [fault for folder in recorded_folders(REPOSITORY / "results") for fault in faults(folder)] == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({}, ""), ({"hardware": "cpu"}, "hardware cpu is not gpu"), ({"torch": ""}, "torch is not given"),
     ({"scale": "smoke"}, "smoke"), ({"calib_copy_us": None}, "calib_copy_us"), ({"commit": "a-dirty"}, "uncommitted"),
     ({"value": 0.0}, "above 0"), ({"value": float("inf")}, "finite"), ({"commit": "--help"}, "is no hash"),
     ({"commit": "../a"}, "is no hash"),
     ({"source_hash": "x"}, "gives s")], ids=str,
)  # fmt: skip
def test_faults_are_named(wrong, fault, tmp_path):
    write_rows(tmp_path / "gpu" / "fig01_batching.csv", [replace(row, **{**STAMPED, **wrong}) for row in decode_rows()])
    found = "\n".join(faults(tmp_path / "gpu", lambda commit, script: "s"))
    assert fault in found if fault else not found
    (tmp_path / "gpu" / "FROM.md").write_text("Ada <script>")
    assert "FROM.md: write who measured" in next(faults(tmp_path / "gpu"))


def test_reports_name_who_measured(tmp_path):
    write_rows(tmp_path / "fig01_batching.csv", decode_rows())
    (tmp_path / "FROM.md").write_text("Ada,\na machine\n")
    machine = machine_of(tmp_path, tmp_path, PAPER, "gpu")
    assert notes(machine)[0] == "Measured by others: Ada, a machine"
    assert "| gpu, by Ada, a machine |" in recorded({"gpu": machine})
    assert floors(machine.rows.assign(hardware="rtx-4090"), tmp_path / "fig01_batching.csv").empty, "no data sheet"
