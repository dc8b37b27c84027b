"""Findings: ratios of rows, point by point, and the tables they make."""

from dataclasses import replace

import pytest
from fakes import PAPER

from experiments.claims.rows import Rows
from experiments.harness.catalogue import experiments
from experiments.harness.counted import frame_of
from experiments.measure.records import Row, write_rows
from experiments.report.findings import Sought, find, sought
from experiments.report.machines import machine_of
from experiments.report.results import write_results
from tests.experiments.report.report_rows import decode_rows

ABOUT = {"figure": "ext fp8", "panel": "Distinct, rank 16", "model": "", "hardware": "h200", "seq_len": None}
ABOUT |= {"rank": 16, "unit": "us", "statistic": "median", "scale": "gpu", "timer": "cuda_graph", "date": "2026-01-02"}


def fp8_rows():
    """FP8 takes a half and an eighth of the time of 16 bits; batch 64 has no FP8 beside it."""
    cells = [("SGMV", 1, 8.0), ("SGMV", 8, 8.0), ("SGMV", 64, 9.0), ("FP8 e4m3", 1, 4.0), ("FP8 e4m3", 8, 1.0)]
    return [Row(system=system, workload="Distinct", batch_size=size, metric="latency", value=value, **ABOUT)
            for system, size, value in cells]  # fmt: skip


def rows_of(*lists):
    return Rows(frame_of(row for rows in lists for row in rows))


RATIO = Sought("FP8 / 16 bits", "ext fp8", {"system": "FP8 e4m3"}, {"system": "SGMV"}, {"panel": "Distinct*"})


def test_a_ratio_is_taken_point_by_point_where_both_were_measured():
    (found,) = find([RATIO], rows_of(fp8_rows()))
    assert (found.middle, found.least, found.most, found.points) == (pytest.approx(0.25), 0.125, 0.5, 2)
    assert found.marks == "\u2021"
    (alone,) = find([Sought("time", "ext fp8", {"system": "SGMV"}, {}, {})], rows_of(fp8_rows()))
    assert (alone.middle, alone.points, alone.unit) == (8.0, 3, "us"), "the median, with its unit"


def test_a_point_is_the_median_of_the_ratios_of_its_repeats_and_a_disturbed_side_marks_it():
    slower = {("SGMV", 1): 4.0, ("FP8 e4m3", 1): 2.0}
    rows = [replace(row, repeat=repeat, date=f"2026-01-0{1 + repeat}", disturbed=row.system == "SGMV",
                    value=row.value * (slower.get((row.system, repeat), 1.0)))
            for row in fp8_rows() for repeat in (0, 1)]  # fmt: skip
    (found,) = find([RATIO], rows_of(rows))
    assert (found.least, found.most) == (pytest.approx((1 + 0.5) / 2 / 8), pytest.approx((1 + 0.5) / 2 / 2))
    assert found.marks == "\u2020"


@pytest.mark.parametrize("missing", [
    replace(RATIO, figure="ext moe"), replace(RATIO, above={"system": "FP8 e5m2"}),
    replace(RATIO, where={"panel": "X"}),
])  # fmt: skip
def test_what_was_not_measured_is_not_found(missing):
    assert find([missing], rows_of(fp8_rows())) == []


def test_what_is_sought_is_of_experiments_that_exist():
    assert set(sought()) <= {experiment.name for experiment in experiments()}


def test_a_line_stands_for_each_alternative_and_equally_many_go_together():
    names = {one.what: one for one in sought()["ext_fp8"]}
    one = names["time of a w8a8 adapter / 16 bits, Identical, rank 64"]
    assert (one.above, one.below) == ({"system": "FP8 w8a8"}, {"system": "SGMV"})
    assert one.where == {"metric": "latency", "panel": "Identical, rank 64"}
    assert not [what for entries in sought().values() for what in (one.what for one in entries) if "{" in what]


def test_results_are_written_from_rows_and_name_what_has_none(tmp_path):
    folder = tmp_path / "results" / "h200"
    write_rows(folder / "ext_fp8.csv", fp8_rows())
    write_rows(folder / "fig01_batching.csv", [replace(row, hardware="h200") for row in decode_rows()])
    machine = machine_of(folder, tmp_path / "figures" / "h200", PAPER, "h200")
    text = write_results(machine, tmp_path / "docs" / "results-h200.md", folder).read_text()
    assert "| time of a e4m3 adapter / 16 bits, Distinct, rank 16 | 0.25\u2021 | 0.125 | 0.5 | 2 |" in text
    assert "| 1.20 (llama-small, len 128: 10 -> 12 ms) |" in text
    assert "[rows](../results/h200)" in text
    (missing,) = (line for line in text.splitlines() if line.startswith("* Not measured on this machine: "))
    assert "`ext_moe`" in missing
    assert "`ext_fp8`" not in missing
