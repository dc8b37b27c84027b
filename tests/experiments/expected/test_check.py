"""Expected ranges of measurements and of claims' quantities, rows held against them, and `make check`."""

from dataclasses import replace

import pandas as pd
import pytest
from fakes import BASE, PAPER
from omegaconf import OmegaConf

from experiments.claims import Verdict
from experiments.commands.check import check
from experiments.harness.counted import frame_of
from experiments.measure.records import Row, RowsError, write_rows
from experiments.report import expected
from experiments.report.expected import CPU_FLOOR, FLOOR, TIMES, hold_rows, other_speed, ranges
from experiments.report.machines import machine_of
from tests.experiments.report.report_rows import decode_rows

ROW = replace(BASE, panel="", workload="Distinct", timer="host_clock", date="2026-01-02", device="A GPU")


def made(*values: float, batches: tuple[int, ...] = (1, 8, 64), **changes: object) -> list[Row]:
    """One row per batch and value; several values are repeats 0, 1, ... and one is a row without a repeat."""
    numbers = range(len(values)) if len(values) > 1 else [None]
    return [
        replace(ROW, **{"batch_size": batch, "repeat": repeat, "value": value * batch, **changes})
        for batch in batches
        for repeat, value in zip(numbers, values, strict=True)
    ]


def frame(*rows: list[Row]) -> pd.DataFrame:
    return frame_of(row for part in rows for row in part)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (made(10.0), 1 + FLOOR),
        (made(10.0, 10.01, 9.99), 1 + FLOOR),
        (made(10.0, 10.01, 9.99, hardware="cpu"), 1 + CPU_FLOOR),
        (made(10.0, 13.0, 9.0), 1.3**TIMES),
        (made(10.0, 10.0, 10.0) + [one for one in made(1, 1, 1, 40.0, disturbed=True) if one.repeat == 3], 1 + FLOOR),
        (made(10.0, 40.0, disturbed=True), (25 / 10) ** TIMES),
    ],
    ids=["once", "close repeats", "a cpu", "the farthest repeat", "disturbed beside quiet", "disturbed alone"],
)
def test_a_range_reaches_twice_as_far_as_the_farthest_repeat_and_at_least_the_floor(rows, width):
    (line,) = ranges(frame(rows)).itertuples()
    assert (line.low, line.high) == pytest.approx((1 / width, width))
    assert line.points == 3


def verdict(id, quantities, interval=None, **columns):
    return Verdict(id, "", "1", "", quantities=quantities, interval=interval or {}, **columns)


@pytest.mark.parametrize(
    ("claim", "value", "interval", "columns", "wanted"),
    [
        ("C01", 10, None, {}, (10 / (1 + FLOOR), 10 * (1 + FLOOR))),
        ("C01", 4, (1, 5), {}, (4 / 4**TIMES, 4 * 4**TIMES)),  # as many times up as down
        ("C01", 10, (9.9, 10.1), {"hardware": "cpu"}, (10 / (1 + CPU_FLOOR), 10 * (1 + CPU_FLOOR))),
        ("C46 share", 0.5, None, {"hardware": "cpu"}, (0.5 * (1 - FLOOR), 0.5 * (1 + FLOOR))),
        ("C46 share", 0.95, None, {}, (0.95 * (1 - FLOOR), 1)),
        ("C41 extra_ms", -2, (-2.5, -1.9), {}, (-3, -1)),
        ("C26 released_min_over_max", 0.98, None, {}, (0.98 / (1 + FLOOR), 1)),
        ("C15 largest_spread", 1.02, None, {}, (1, 1.02 * (1 + FLOOR))),
    ],
)
def test_a_quantity_has_a_range_on_its_scale(claim, value, interval, columns, wanted):
    id, _, name = claim.partition(" ")
    one = verdict(id, {name: value}, {name: interval} if interval else {}, **columns)
    (line,) = expected.claim_ranges([one], PAPER).itertuples()
    assert (line.low, line.high) == pytest.approx(wanted)


RECORDED = frame(made(10.0, 10.5, 9.5), made(20.0, system="Loop"))
LOOP = made(20.0, system="Loop")


@pytest.mark.parametrize(
    ("here", "lines"),
    [
        (RECORDED, [["Loop", "SGMV"], [], [], []]),
        (frame(made(10.0), made(21.8, system="Loop")), [["Loop", "SGMV"], [], [], []]),
        (frame(made(10.0), made(22.4, system="Loop")), [["Loop", "SGMV"], ["Loop"], [], []]),
        (frame(made(10.0), made(18.0, system="Loop")), [["Loop", "SGMV"], ["Loop"], [], []]),
        (frame(made(10.0, batches=(1, 8)), made(50.0, batches=(64,)), LOOP), [["Loop", "SGMV"], [], [], []]),
        (frame(made(10.0, batches=(2,)), LOOP, made(1.0, system="mine")), [["Loop"], [], ["SGMV"], ["mine"]]),
        (frame(made(10.0, scale="paper")), [["SGMV"], [], ["Loop"], []]),
    ],
    ids=["the same", "inside", "slower", "faster", "one slow point", "without a partner", "another scale"],
)
def test_lines_are_inside_outside_or_without_a_partner(here, lines):
    held = hold_rows(ranges(RECORDED), RECORDED, here)
    assert [sorted(one["system"]) for one in (held.compared, held.outside, held.absent, held.unknown)] == lines


def test_claims_outside_and_absent_and_files_are_read_as_they_were_written(tmp_path):
    recorded = [verdict("C01", {"ratio": 2, "other": 3}, verdict="reproduced"), verdict("C02", {"x": 1})]
    expected.write_expected(tmp_path, RECORDED, recorded, PAPER)
    claims, rows = expected.read_expected(tmp_path)
    assert hold_rows(rows, RECORDED, RECORDED).absent.empty
    assert expected.hold_claims(claims, recorded).outside.empty
    held = expected.hold_claims(claims, [verdict("C01", {"ratio": 3, "new": 1}, verdict="differs")])
    assert held.outside[["quantity", "verdict_here"]].to_numpy().tolist() == [["ratio", "differs"]]
    assert (list(held.absent["quantity"]), list(held.unknown["quantity"])) == (["other", "x"], ["new"])
    path = tmp_path / "expected" / "claims.csv"
    path.write_text(path.read_text().replace("low", "least"), encoding="utf-8")
    with pytest.raises(RowsError, match=r"claims\.csv: .*make report ARGS=source=recorded"):
        expected.read_expected(tmp_path)


def test_a_speed_is_that_of_the_figures_here_and_of_any_recorded_repeat():
    both = [*made(1.0, 1.0, calib_gemm_us=10.0, calib_copy_us=20.0), *made(1.0, figure="10", calib_copy_us=50.0)]
    mixed = frame(both).assign(calib_gemm_us=10.0)
    mixed.loc[mixed["repeat"].eq(1), "calib_copy_us"] = 40.0
    for copy_us, said in ((20.0, ""), (40.0, ""), (60.0, "1.50"), (10.0, "0.50")):
        ours = frame(made(1.0, calib_gemm_us=10.0, calib_copy_us=copy_us))
        assert said in other_speed(mixed, ours)
        assert set(expected.other_speeds(mixed, ours)) == ({"8"} if said else set())
    assert expected.other_speeds(mixed, ours.assign(figure="11")) == {}, "a figure without recorded rows has no speed"
    assert other_speed(frame(made(1.0)), ours) == "", "rows without calibrations do not tell"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The fresh rows of Figure 1 of a recorded machine, and its settings; those of Figure 8 are the recorded ones."""
    root = tmp_path_factory.mktemp("recorded")
    folder = root / "results" / "h200"
    columns = {"calib_gemm_us": 10.0, "calib_copy_us": 20.0}
    parts = {
        "fig01_batching": [replace(row, **columns) for row in decode_rows(hardware="h200")],
        "fig08_lora_operator": made(1.0, batches=tuple(range(1, 9)), **columns),
    }
    for name, rows in parts.items():
        write_rows(folder / f"{name}.csv", rows)
        write_rows(root / "outputs" / "h200" / "rows" / f"{name}.csv", rows)
    machine = machine_of(folder, root / "figures" / "h200", PAPER, "h200")
    expected.write_expected(folder, machine.rows, machine.verdicts, machine.paper)
    paths = {name: str(root / name) for name in ("outputs", "results", "figures")} | {"paper_results": str(PAPER)}
    settings = {"hardware": {"name": "h200"}, "scale": {"name": "laptop"}, "paths": paths}
    return root / "outputs" / "h200" / "rows" / "fig01_batching.csv", OmegaConf.create(settings)


@pytest.mark.parametrize(
    ("slower", "copy_us", "status", "ended"),
    [(1, 20.0, 0, "0 outside, of which 0 count"), (2, 20.0, 1, "4 outside, of which 4 count"),
     (2, 40.0, 0, "4 outside, of which 0 count")],
    ids=["the same", "slower", "slower on a slower machine"],
)  # fmt: skip
def test_the_status_counts_what_is_outside_at_the_recorded_speed(recorded, capsys, slower, copy_us, status, ended):
    rows = [
        replace(row, value=row.value * (slower * row.batch_size**0.2 if slower > 1 else 1), calib_copy_us=copy_us,
                calib_gemm_us=10.0)
        for row in decode_rows(hardware="h200")
    ]  # fmt: skip
    write_rows(recorded[0], rows)
    assert check(recorded[1]) == status
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(ended)
    assert (" backbone llama-small step_latency   ms host_clock" in said) == (slower > 1)
    assert ("figure 1 (a copy takes 2.00 of the recorded time)" in said) == (copy_us == 40)


def test_rows_of_another_device_are_not_compared_nor_counted(recorded, capsys):
    rows = [replace(row, device="Another GPU", value=9 * row.value) for row in decode_rows(hardware="h200")]
    write_rows(recorded[0], rows)
    assert check(recorded[1]) == 0
    assert "Measurements: not compared, recorded on" in capsys.readouterr().out
