"""Findings: ratios of rows, point by point, and the tables they make."""

from dataclasses import replace

import pytest

from experiments.claims.rows import Rows
from experiments.harness.catalogue import experiments
from experiments.harness.counted import frame_of
from experiments.measure.records import Row
from experiments.report.findings import Sought, find, sought

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


def test_what_is_sought_is_of_experiments_that_exist():
    assert set(sought()) <= {experiment.name for experiment in experiments()}
