"""Notebooks: each runs, equals its source, and shows the figures and verdicts of `make reproduce` and `make report`."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from shutil import copytree, ignore_patterns

import jupytext
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from experiments.ext_many_adapters import EXPERIMENT as MANY
from experiments.facts.paper import as_rows, read_figure
from experiments.fig07_sgmv_roofline import EXPERIMENT as FIG7
from experiments.fig08_lora_operator import EXPERIMENT as FIG8
from experiments.fig09_lora_ranks import EXPERIMENT as FIG9
from experiments.harness.experiment import Experiment
from experiments.measure.records import COLUMNS, Row, write_rows
from experiments.plots.draw import draw
from notebooks import stored_rows
from notebooks.stored_rows import SideBySide, StoredRows

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "paper_results"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = "01_sgmv_and_batching.ipynb"
OPERATORS = (FIG7, FIG8, FIG9)
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|mnt|Users|opt|usr|var)/")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def write_paper_rows(folder: Path, hardware: str, experiments: Iterable[Experiment] = OPERATORS, **fields: str) -> None:
    """Write the paper's numbers as measured by ``hardware``: every figure has data, every claim must hold."""
    about = {"kind": "measured", "device": "a device", "timer": "host_clock", "date": "2024-01-02T03:04:05", **fields}
    steady = None if hardware == "cpu" else 5.0  # microseconds of a launch: so the host's clock counts
    for experiment in experiments:
        frame = as_rows(read_figure(PAPER, experiment.figure))
        frame = frame.assign(hardware=hardware, **about, calib_launch_us=steady)
        frame = frame.astype({"batch_size": "Int64", "seq_len": "Int64", "rank": "Int64"}).astype(object)
        cells = frame.where(frame.notna(), None)[list(COLUMNS)]
        write_rows(folder / f"{experiment.name}.csv", [Row(*line) for line in cells.itertuples(index=False)])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the repository without any rows."""
    for name in ("conf", "experiments", "paper_results", "punica"):
        (tmp_path / name).symlink_to(ROOT / name)
    copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=ignore_patterns("__pycache__", ".*"))
    return tmp_path


def execute(path: Path) -> NotebookNode:
    """Run the notebook at ``path`` from its folder; an error in a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    limits = {"timeout": 900, "startup_timeout": 300}  # seconds of a cell and of the start, on a busy machine
    resources = {"metadata": {"path": path.parent}}
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, **limits)
    return client.execute(env=os.environ | {"PYTHONPATH": str(path.parents[1])})  # ahead of the checkout


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook: NotebookNode) -> str:
    """Join all text outputs."""
    parts = [output.get("text", "") for output in outputs(notebook)]
    return "\n".join([*parts, *(output.get("data", {}).get("text/markdown", "") for output in outputs(notebook))])


def is_clean(notebook: NotebookNode) -> bool:
    """Check for errors, warnings and this machine's paths."""
    wrong = [one for one in outputs(notebook) if one.output_type == "error" or one.get("name") == "stderr"]
    return not wrong and not ABSOLUTE_PATH.search(texts(notebook))


@each_notebook
def test_source_and_notebook_are_in_sync(path: Path) -> None:
    assert {one.stem for one in (ROOT / "notebooks").glob("[0-9]*.py")} == {one.stem for one in NOTEBOOKS}
    source, notebook = jupytext.read(path.with_suffix(".py")), nbformat.read(path, as_version=4)
    remedy = f"run jupytext --to ipynb --execute notebooks/{path.stem}.py"
    pairs = [[(cell.cell_type, cell.source) for cell in each.cells] for each in (source, notebook)]
    assert pairs[0] == pairs[1], remedy


@each_notebook
def test_stored_outputs_are_complete_and_clean_and_figures_are_files(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "not run from top to bottom"
    assert is_clean(notebook)
    assert path.stat().st_size < 1 << 20
    assert not [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert all((path.parent / link).is_file() for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", texts(notebook)))
    assert not re.search("(continuous|static)_batching", texts(notebook)), "tables name systems by what they are"


@pytest.mark.slow
@pytest.mark.notebook
@each_notebook
def test_notebook_runs(path: Path) -> None:
    assert is_clean(execute(path))


@pytest.mark.slow
@pytest.mark.notebook
def test_first_notebook_without_rows(repository: Path) -> None:
    notebook = execute(repository / "notebooks" / FIRST)
    said = texts(notebook)
    assert "![Figure " not in said
    for experiment in OPERATORS:
        assert f'make reproduce ARGS="figures=[{experiment.name}] hardware=cpu"' in said
    assert "equals the loop: True" in said
    assert "False" not in said


@pytest.mark.slow
@pytest.mark.notebook
def test_first_notebook_with_rows(repository: Path) -> None:
    write_paper_rows(repository / "outputs" / "cpu" / "rows", "cpu", device="a laptop")
    write_paper_rows(repository / "results" / "h200", "h200", device="an H200")
    notebook = execute(repository / "notebooks" / FIRST)
    said = texts(notebook)
    assert said.count("![Figure ") == 6
    assert "`outputs/cpu/rows/fig08_lora_operator.csv` (fresh)" in said
    assert "`results/h200/fig08_lora_operator.csv` (recorded)" in said
    assert said.count("14 reproduced, 1 shape holds, 1 holds by arithmetic (16 claims)") == 1
    on_a_cpu = "13 reproduced, 1 holds by arithmetic, 2 not testable on this hardware"  # C13, C14: launches
    assert said.count(f"{on_a_cpu} (16 claims)") == 1
    assert "has no rows" not in said
    assert is_clean(notebook)


def test_recorded_rows_win_and_are_never_mixed(tmp_path: Path) -> None:
    fresh, recorded = tmp_path / "outputs" / "cpu" / "rows", tmp_path / "results" / "cpu"
    write_paper_rows(fresh, "cpu")
    assert StoredRows(tmp_path, "cpu").folder == fresh
    write_paper_rows(recorded, "cpu", [FIG8])
    stored = StoredRows(tmp_path, "cpu")
    assert stored.folder == recorded
    assert [stored.has(experiment) for experiment in OPERATORS] == [False, True, False]
    for hardware, experiment, scale in (("h200", MANY, "gpu"), ("h200", FIG8, "paper")):
        how = stored_rows.how_to_measure(StoredRows(tmp_path, hardware), experiment)
        assert f"figures=[{experiment.name}] hardware=h200 scale={scale}" in how
    assert "scale" not in stored_rows.how_to_measure(stored, MANY)


@pytest.mark.slow
def test_machines_stand_side_by_side_and_one_without_rows_says_so(repository: Path) -> None:
    write_paper_rows(repository / "results" / "h200", "h200", [FIG9])
    first, absent, second, picture, source = SideBySide(repository).figure(FIG9)
    assert [first.data, second.data] == ["**A CPU**", "**An H200**"]
    assert "no rows of `cpu` yet" in absent.data
    assert "results/h200/" in source.data
    assert picture.data == StoredRows(repository, "h200").figure(FIG9)[0].data
    assert len(SideBySide(repository).verdicts(["9"])) == 4


@pytest.mark.slow
def test_picture_is_that_of_make_reproduce(repository: Path) -> None:
    folder = repository / "results" / "cpu"
    write_paper_rows(folder, "cpu", [FIG9])
    link, _ = StoredRows(repository, "cpu").figure(FIG9)
    shown = repository / "notebooks" / link.data.partition("](")[2].removesuffix(")")
    assert shown.resolve() == repository / f"figures/cpu/{FIG9.name}.png"
    _, drawn = draw(FIG9, folder / f"{FIG9.name}.csv", repository / "other", PAPER)
    assert np.array_equal(plt.imread(shown), plt.imread(drawn))


def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measured and paper rows of two systems, two batch sizes and two workloads, with known ratios."""
    cells = [
        ("Distinct", "SGMV", 1, 2.0), ("Distinct", "SGMV", 8, 6.0), ("Distinct", "Loop", 1, 1.0),
        ("Distinct", "Loop", 8, 24.0), ("Identical", "SGMV", 1, 2.0), ("Identical", "SGMV", 8, 3.0),
        ("Identical", "Loop", 8, 4.5),
    ]  # fmt: skip
    frame = pd.DataFrame(cells, columns=["workload", "system", "batch_size", "value"])
    frame = frame.assign(panel="", metric="latency", unit="us", rank=16)
    noise = frame.assign(value=999.0, statistic="p90")
    measured = pd.concat([frame.assign(statistic="median"), noise], ignore_index=True)
    return measured, frame.assign(value=2 * frame["value"] * frame["batch_size"])


@pytest.mark.parametrize(
    ("make", "columns", "rows"),
    [
        (stored_rows.growth("latency", "workload"), ["workload", "measured: latency, batch 8 / batch 1", "paper, A100"],
         [["Distinct", 3.0, 24.0], ["Identical", 1.5, 12.0]]),
        (stored_rows.relative_to("SGMV"), ["workload", "system", "measured: latency / SGMV, batch 8", "paper, A100"],
         [["Distinct", "Loop", 4.0, 4.0], ["Identical", "Loop", 1.5, 1.5]]),
        (stored_rows.contest("SGMV"), None, [["Loop", "2 of 3", 0.5, 4.0, 0.5]]),
    ],
    ids=["growth", "at the largest batch", "cells that both have"],
)  # fmt: skip
def test_tables_of_two_systems(make, columns, rows) -> None:
    table = make(*frames())
    assert columns in (None, list(table.columns))
    assert table.to_numpy().tolist() == rows


def test_part_of_the_roof() -> None:
    launches = [("Distinct", 4, 1.0, 1e11), ("Distinct", 8, 1.0, 5e11), ("Identical", 8, 100.0, 3e12)]
    lines: list[tuple[object, ...]] = [
        ("roof", "", None, "memory_bandwidth_line", 1.0),
        ("roof", "", None, "peak_fp32_line", 6.0),
    ]
    for workload, batch, intensity, flops in launches:
        lines.append(("", workload, batch, "arithmetic_intensity", intensity))
        lines.append(("", workload, batch, "achieved_flops", flops))
    frame = pd.DataFrame(lines, columns=["panel", "workload", "batch_size", "metric", "value"])
    table = stored_rows.of_the_roof(frame.assign(statistic="value"), frame)
    assert table.iloc[:, 0].tolist() == ["Distinct", "Identical"]
    assert table.iloc[:, 1].tolist() == pytest.approx([0.5, 0.5])
    assert table.iloc[:, 2].tolist() == pytest.approx([0.5, 0.5])


def test_markdown_table() -> None:
    frame = pd.DataFrame({"name": ["a|b", "c"], "value": [1234.5678, float("nan")]})
    lines = stored_rows.as_markdown(frame).data.splitlines()
    assert lines == ["| name | value |", "| --- | --- |", "| a\\|b | 1.23e+03 |", "| c | - |"]
