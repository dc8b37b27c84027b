"""`make check`: its status, what it prints, and clear errors."""

from dataclasses import replace

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.claims import Verdict
from experiments.commands.check import check, counted_claims, counted_rows, other_device
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.records import write_rows
from experiments.report.expected import Held, hold_rows, other_speed, other_speeds, read_expected, write_expected
from experiments.report.machines import machine_of, read_folder, recorded_folders
from tests.experiments.expected.made_rows import frame, made
from tests.experiments.report.report_rows import PAPER, decode_rows


def config(root, hardware="h200", scale="laptop") -> DictConfig:
    paths = {name: str(root / name) for name in ("outputs", "results", "figures")} | {"paper_results": str(PAPER)}
    return OmegaConf.create({"hardware": {"name": hardware}, "scale": {"name": scale}, "paths": paths})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recorded machine with Figure 1 and its ranges."""
    root = tmp_path_factory.mktemp("recorded")
    folder = root / "results" / "h200"
    write_rows(folder / "fig01_batching.csv", decode_rows(hardware="h200"))
    machine = machine_of(folder, root / "figures" / "h200", PAPER, "h200")
    write_expected(folder, machine.rows, machine.verdicts, machine.paper)
    return root


def test_without_rows_or_ranges_it_says_what_to_do(recorded):
    with pytest.raises(ConfigError, match="hardware=h100 has no expected ranges; recorded are those of h200"):
        check(config(recorded, hardware="h100"))
    with pytest.raises(ConfigError, match="scale=smoke has no expected ranges"):
        check(config(recorded, scale="smoke"))
    with pytest.raises(ConfigError, match=r"no rows in .*rows: measure them with make reproduce"):
        check(config(recorded))


def test_equal_rows_pass_and_slower_ones_are_named(recorded, capsys):
    fresh = recorded / "outputs" / "h200" / "rows" / "fig01_batching.csv"
    write_rows(fresh, decode_rows(hardware="h200"))
    assert check(config(recorded)) == 0
    said = capsys.readouterr().out
    assert "Measurements: 1 held, at 2 common points, 0 outside" in said
    assert said.splitlines()[-1] == "0 outside, of which 0 count: expected ranges of h200"
    write_rows(fresh, [replace(row, value=row.value * row.batch_size**0.2) for row in decode_rows(hardware="h200")])
    assert check(config(recorded)) == 1
    said = capsys.readouterr().out
    assert "outside: C01 ratio: 2.4, expected 1.091 to 1.32 (recorded 1.2)" in said
    assert "C01 is 'differs' here, 'reproduced' recorded" in said
    assert "outside: figure 1, backbone, llama-small, step_latency (ms): 1.500 of the recorded" in said
    assert "recorded once" in said
    assert said.splitlines()[-1] == "4 outside, of which 4 count: expected ranges of h200"


def test_another_device_is_told_apart():
    theirs, ours = frame(made(1.0)), frame(made(1.0, device="Another GPU"))
    assert other_device(theirs, theirs) == ""
    assert "recorded on A GPU, and these are of Another GPU" in other_device(theirs, ours)


def test_a_machine_that_is_slower_as_a_whole_is_told_and_not_counted(recorded, capsys):
    theirs = frame(made(1.0, calib_gemm_us=10.0, calib_copy_us=20.0))
    for copy_us, said in ((24.0, ""), (32.0, "a copy takes 1.60 of the recorded time"), (10.0, "a copy takes 0.50")):
        ours = frame(made(1.0, calib_gemm_us=10.0, calib_copy_us=copy_us))
        assert said in other_speed(theirs, ours)
        assert bool(other_speed(theirs, ours)) == bool(said)
    assert other_speed(frame(made(1.0)), theirs) == "", "rows without calibrations do not tell"
    rows = decode_rows(hardware="h200")
    slower = [replace(row, value=2 * row.value * row.batch_size**0.2, calib_copy_us=40.0) for row in rows]
    write_rows(recorded / "outputs" / "h200" / "rows" / "fig01_batching.csv", slower)
    folder = recorded / "results" / "h200" / "fig01_batching.csv"
    before = folder.read_bytes()
    write_rows(folder, [replace(row, calib_copy_us=20.0) for row in decode_rows(hardware="h200")])
    assert check(config(recorded)) == 0
    folder.write_bytes(before)
    said = capsys.readouterr().out
    assert "outside: figure 1, backbone, llama-small, step_latency (ms)" in said
    assert "a copy takes 2.00 of the recorded time" in said
    assert said.splitlines()[-1] == "4 outside, of which 0 count: expected ranges of h200"


def test_a_speed_is_that_of_the_figures_here_and_of_any_recorded_repeat():
    both = [*made(1.0, 1.0, calib_gemm_us=10.0, calib_copy_us=20.0), *made(1.0, figure="10", calib_copy_us=50.0)]
    mixed = frame(both).assign(calib_gemm_us=10.0)
    mixed.loc[mixed["repeat"].eq(1), "calib_copy_us"] = 40.0
    for copy_us, said in ((20.0, ""), (40.0, ""), (60.0, "a copy takes 1.50 of the recorded time")):
        ours = frame(made(1.0, calib_gemm_us=10.0, calib_copy_us=copy_us))
        assert other_speed(mixed, ours) == said
        assert other_speeds(mixed, ours) == ({"8": said} if said else {})
    unknown = ours.assign(figure="11")
    assert other_speeds(mixed, unknown) == {}, "a figure without recorded rows has no speed"
    same = frame(made(1.0, calib_gemm_us=10.0, calib_copy_us=20.0))
    assert other_speed(mixed, pd.concat([same, unknown, unknown])) == ""


def test_measured_claims_and_rows_of_figures_of_another_speed_are_not_counted():
    def outside(**columns: list[str]) -> Held:
        return Held(pd.DataFrame({**columns, "is_outside": True}), pd.DataFrame(), pd.DataFrame())

    figures = {"C01": "1", "C25": "10, 11", "C26": "11", "C46": "10"}
    verdicts = [
        Verdict(id, "", figure, "", kind="simulated" if id == "C46" else "measured") for id, figure in figures.items()
    ]
    claims, rows = outside(claim=list(figures)), outside(figure=["1", "10", "11", "10"])
    assert (counted_claims(claims, verdicts, {"10"}), counted_rows(rows, {"10"})) == (3, 2)
    assert (counted_claims(claims, verdicts, ()), counted_rows(rows, ())) == (4, 4)


@pytest.mark.parametrize(("copy_us", "status"), [(20.0, 1), (40.0, 0)])
def test_a_slower_figure_counts_at_the_recorded_speed_alone(tmp_path, capsys, copy_us, status):
    folder, fresh = tmp_path / "results" / "h200", tmp_path / "outputs" / "h200" / "rows"
    columns = {"calib_gemm_us": 10.0, "calib_copy_us": 20.0}
    parts = {
        "fig01_batching": [replace(row, **columns) for row in decode_rows(hardware="h200")],
        "fig08_lora_operator": made(1.0, batches=tuple(range(1, 9)), **columns),
    }
    for name, rows in parts.items():
        write_rows(folder / f"{name}.csv", rows)
        write_rows(fresh / f"{name}.csv", rows)
    machine = machine_of(folder, tmp_path / "figures" / "h200", PAPER, "h200")
    write_expected(folder, machine.rows, machine.verdicts, machine.paper)
    columns["calib_copy_us"] = copy_us
    slower = [replace(row, value=2 * row.value * row.batch_size**0.2, **columns) for row in parts["fig01_batching"]]
    write_rows(fresh / "fig01_batching.csv", slower)
    assert check(config(tmp_path)) == status
    said = capsys.readouterr().out
    assert "outside: figure 1, backbone, llama-small, step_latency (ms)" in said
    told = "Measured at another speed than recorded: figure 1 (a copy takes 2.00 of the recorded time). Of these"
    assert (told in said) == (status == 0)


@pytest.mark.slow
@pytest.mark.parametrize("folder", recorded_folders(REPOSITORY / "results"), ids=lambda folder: folder.name)
def test_recorded_rows_are_inside_of_the_committed_ranges(folder):
    rows = read_folder(folder)
    found = hold_rows(read_expected(folder)[1], rows, rows)
    assert len(found.compared) > 100
    assert all(lines.empty for lines in (found.outside, found.absent, found.unknown))
