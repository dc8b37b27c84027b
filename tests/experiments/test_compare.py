"""`make compare`: which rows meet, what their ratio means, and mistakes that are told apart."""

from dataclasses import replace

import pandas as pd
import pytest
from fakes import BASE

from experiments.claims.rows import Rows
from experiments.commands.compare import compare, join, load, mean_text
from experiments.harness.counted import counted, frame_of
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.records import RowsError, read_rows, write_rows
from experiments.plots.frames import centre, measured_frame


def rows(factor=1.0, **changes):
    """Batches 1, 8 and 64 with median, p10 and count."""
    changed = replace(BASE, **changes)
    return [
        replace(changed, batch_size=batch, statistic=statistic, value=changed.value * batch * factor)
        for batch in (1, 8, 64) for statistic in ("median", "p10", "count")
    ]  # fmt: skip


def stored(folder, name, content):
    write_rows(folder / f"{name}.csv", content)
    return folder


def joined(a, b):
    return list(join(frame_of(a), frame_of(b)).itertuples())


def test_ratios_per_row_and_their_geometric_mean(tmp_path, capsys):
    stored(tmp_path / "a", "fig08", [*rows(), *rows(system="Loop"), *rows(system="only in a")])
    slower = [replace(row, value=row.value * (2 if row.batch_size == 64 else 1)) for row in rows()]
    stored(tmp_path / "b", "fig08", [*slower, *rows(0.5, system="Loop")])
    compare(str(tmp_path / "a"), str(tmp_path / "b"))
    text = capsys.readouterr().out
    assert "6 pairs; without a partner: 3 in a, 0 in b" in text
    assert "1.260 over 3 of 3 rows, B 1.26x worse" in text
    assert "0.500 over 3 of 3 rows, B 2.00x better" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Skewed Skewed 64 16 median cuda_graph 640 1280 2 B 2.00x worse" in lines
    stored(tmp_path / "b", "fig08", rows(scale="smoke"))
    compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "scale=smoke have other shapes" in capsys.readouterr().out


def test_only_equal_quantities_meet():
    other = [
        replace(BASE, figure="9"), replace(BASE, panel="x"), replace(BASE, system="Loop"), replace(BASE, rank=8),
        replace(BASE, workload="Distinct"), replace(BASE, model="m"), replace(BASE, batch_size=2),
        replace(BASE, seq_len=1), replace(BASE, metric="throughput"), replace(BASE, statistic="value"),
        replace(BASE, timer="host_clock"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no row in common: a has figure 8.*b has figure 8, 9.*Loop"):
        joined([BASE], other)
    (pair,) = joined([BASE], [*other, replace(BASE, hardware="a100-80g", value=25.0)])
    assert pair.ratio == 2.5
    with pytest.raises(ConfigError, match=r"latency of figure 8 is in us in a and in ms in b"):
        joined([BASE], [replace(BASE, unit="ms")])


@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf")), (-1.0, 1.0)])
def test_what_cannot_be_divided_has_no_ratio_and_is_left_out_of_the_mean(a, b):
    mine, theirs = (frame_of([replace(BASE, value=value), replace(BASE, batch_size=2)]) for value in (a, b))
    theirs["value"] *= [1.0, 4.0]
    pairs = join(mine, theirs)
    assert pairs["ratio"].isna().tolist() == [True, False]
    assert mean_text(pairs[:1]) == "no row has a ratio"
    assert mean_text(pairs).startswith("4.000 over 1 of 2 rows")


def test_recorded_points_are_those_of_the_figure_and_of_the_claims():
    """186 of these 432 points were more than 1 % off, the worst 2.36 times."""
    path = REPOSITORY / "results" / "h200" / "fig08_lora_operator.csv"
    steady = frame_of(read_rows(path)).assign(calib_launch_us=5.0)
    figure, points = centre(measured_frame(counted(frame_of(read_rows(path))))), load("a", path)
    judged = [Rows(steady, clock).figure("8") for clock in ("cuda_graph", "host_clock")]
    pairs = join(points, points)
    for shown, number in ((figure, 216), (pd.concat(judged), 432)):
        both = pairs.astype({"batch_size": int}).merge(shown, on=["timer", "system", "workload", "batch_size"])
        assert len(both) == len(shown) == number
        assert (both["a"] == both["value"]).all()


def test_a_file_a_folder_and_the_folder_above_rows_are_all_taken(tmp_path):
    stored(tmp_path / "h200" / "rows", "fig08", rows())
    (tmp_path / "h200" / "claims.csv").write_text("id,verdict\n")
    paths = tmp_path / "h200", tmp_path / "h200" / "rows", tmp_path / "h200" / "rows" / "fig08.csv"
    assert [len(load("a", path)) for path in paths] == [3, 3, 3]


def test_paths_that_are_wrong_are_named(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    for path, problem in ((tmp_path, "holds no rows"), (tmp_path / "notes.md", "is no .csv file of rows")):
        with pytest.raises(ConfigError, match=f"b={path} {problem}"):
            load("b", path)
    path = stored(tmp_path / "a", "fig08", rows()) / "fig08.csv"
    path.write_text(path.read_text().replace(",80.0,", ",eighty,", 1))
    with pytest.raises(RowsError, match=r"fig08\.csv, line 5: value is 'eighty'"):
        load("a", tmp_path / "a")
