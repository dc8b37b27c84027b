"""Rows and verdicts held against ranges: inside, outside, and without a partner."""

import pytest

from experiments.claims import Verdict
from experiments.measure.records import RowsError
from experiments.report.expected import claim_ranges, hold_claims, hold_rows, ranges, read_expected, write_expected
from tests.experiments.expected.made_rows import frame, made
from tests.experiments.report.report_rows import PAPER

RECORDED = frame(made(10.0, 10.5, 9.5), made(20.0, system="Loop"))


def held(here):
    return hold_rows(ranges(RECORDED), RECORDED, here)


def test_recorded_rows_are_inside_of_their_own_ranges():
    found = held(RECORDED)
    assert all(lines.empty for lines in (found.outside, found.absent, found.unknown))
    assert list(found.compared["here"]) == [1.0, 1.0]


@pytest.mark.parametrize(("factor", "outside"), [(1.09, 0), (1.12, 1), (0.93, 0), (0.9, 1)])
def test_a_slower_or_faster_system_is_outside(factor, outside):
    found = held(frame(made(10.0), made(20.0 * factor, system="Loop")))
    assert len(found.outside) == outside
    assert found.compared.set_index("system")["here"]["Loop"] == pytest.approx(factor)


def test_one_slow_point_of_many_does_not_decide():
    here = frame(made(10.0, batches=(1, 8)), made(50.0, batches=(64,)), made(20.0, system="Loop"))
    assert held(here).outside.empty


def test_lines_without_a_partner_are_told():
    found = held(frame(made(10.0, batches=(2,)), made(20.0, system="Loop"), made(1.0, system="mine")))
    assert list(found.compared["system"]) == ["Loop"]
    assert list(found.absent["system"]) == ["SGMV"]
    assert list(found.unknown["system"]) == ["mine"]


def test_points_of_another_scale_meet():
    assert len(held(frame(made(10.0, scale="paper"))).compared) == 1


def test_claims_outside_and_absent():
    first = Verdict("C01", "", "1", "", verdict="reproduced", quantities="ratio=2; other=3")
    verdicts = [first, Verdict("C02", "", "1", "", quantities="x=1")]
    table = claim_ranges(verdicts, PAPER)
    assert hold_claims(table, verdicts).outside.empty
    here = [Verdict("C01", "", "1", "", verdict="differs", quantities="ratio=3; new=1")]
    found = hold_claims(table, here)
    assert list(found.outside["quantity"]) == ["ratio"]
    assert list(found.outside["verdict_here"]) == ["differs"]
    assert list(found.absent["quantity"]) == ["other", "x"]
    assert list(found.unknown["quantity"]) == ["new"]


def test_files_are_read_as_they_were_written(tmp_path):
    verdicts = [Verdict("C01", "", "1", "", quantities="ratio=2")]
    write_expected(tmp_path, RECORDED, verdicts, PAPER)
    claims, rows = read_expected(tmp_path)
    assert claims["value"].tolist() == [2.0]
    assert hold_rows(rows, RECORDED, RECORDED).absent.empty
    path = tmp_path / "expected" / "claims.csv"
    path.write_text(path.read_text().replace("low", "least"), encoding="utf-8")
    with pytest.raises(RowsError, match=r"claims\.csv: .*make report ARGS=source=recorded"):
        read_expected(tmp_path)
