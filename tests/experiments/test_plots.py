"""What figures show: names of models, repeats, clocks, disturbed points, floors, roofs, speed-ups, and that all of it
can be told apart and read.
"""

import itertools
import os
import subprocess
import sys
from unittest.mock import patch

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from fakes import PAPER

from experiments.facts.paper import read_figure
from experiments.facts.systems import by_paper_name, entries
from experiments.fig09_lora_ranks import EXPERIMENT as FIG09
from experiments.harness.counted import NOT_STEADY, frame_of
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import Row, write_rows
from experiments.plots import style
from experiments.plots.draw import draw
from experiments.plots.frames import frame_of_clocks, in_order  # fmt: skip
from experiments.plots.overlay import panels
from experiments.plots.serving import draw_hero, draw_ranks, draw_serving, not_measured, speedups


def row(value, **columns):
    fixed = {"figure": "9", "panel": "r=16", "system": "SGMV", "workload": "Distinct", "model": "", "hardware": "cpu"}
    fixed |= {"batch_size": 1, "seq_len": None, "rank": 16, "metric": "latency", "unit": "us", "statistic": "median"}
    return Row(**{**fixed, "timer": "host_clock", "scale": "laptop", "device": "a CPU", **columns, "value": value})


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.slow
def test_neither_matplotlibrc_nor_backend_of_the_user_reach_a_figure(tmp_path):
    """LaTeX, which few have installed, and a backend that there is not."""
    write_rows(tmp_path / "fig09_lora_ranks.csv", [row(10.0)])
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.bbox: tight\nsavefig.dpi: 10\n")
    code = "from pathlib import Path as P; from experiments.fig09_lora_ranks import EXPERIMENT as E; "
    code += "from experiments.plots.draw import draw; draw(E, P('fig09_lora_ranks.csv'), P(), P('paper'))"
    (tmp_path / "paper").symlink_to(PAPER)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "none"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    draw(FIG09, tmp_path / "fig09_lora_ranks.csv", tmp_path / "ours", PAPER)
    sizes = [plt.imread(folder / "fig09_lora_ranks.png").shape for folder in (tmp_path, tmp_path / "ours")]
    assert sizes[0] == sizes[1]


def test_rows_are_in_the_order_of_models_systems_and_popularities_whatever_ran_first():
    """Bars of a figure stood in the order of the run, and those of two machines differently."""
    names = ("", "llama2-7b"), ("punica", "hf_peft", "Loop"), ("Distinct", "Uniform", "Identical", "other")
    cells = list(itertools.product(*names))
    rows = pd.DataFrame(sorted(cells, key=str), columns=["model", "system", "workload"]).assign(rank=16, panel="a")
    assert list(in_order(rows)[["model", "system", "workload"]].itertuples(index=False, name=None)) == cells


def curves(*disturbed):
    """Figure 9 at one rank: SGMV and its expand, at batch sizes 1, 4 and 16; ``disturbed`` of SGMV."""
    rows = [row(10.0 * n, batch_size=n, disturbed=n in disturbed) for n in (1, 4, 16)]
    return frame_of([*rows, *(row(5.0 * n, batch_size=n, system="SGMV expand") for n in (1, 4, 16))])


def test_disturbed_points_are_crossed_and_a_part_is_a_line_of_its_own_look():
    none = read_figure(PAPER, "9").query("panel == 'none'")
    (axis,) = panels(curves(4), none, FIG09.overlay).axes
    lines = [(line.get_marker(), line.get_linestyle(), list(line.get_ydata())) for line in axis.lines]
    assert [ys for marker, _, ys in lines if marker == "x"] == [[40]]
    assert {dash: ys for marker, dash, ys in lines if ys and marker != "x"} == {"-": [10, 40, 160], "-.": [5, 20, 80]}
    (axis,) = panels(curves(), none, FIG09.overlay).axes
    assert not [line for line in axis.lines if line.get_marker() == "x"]


def test_each_clock_has_axes_of_its_own():
    rows = [row(us * batch, batch_size=batch, timer=clock)
            for clock, us in (("cuda_graph", 3.0), ("host_clock", 40.0)) for batch in (1, 64)]  # fmt: skip
    frame = frame_of_clocks(frame_of(rows))
    assert list(dict.fromkeys(frame["timer"])) == ["host_clock", "cuda_graph"]
    figure = panels(frame, read_figure(PAPER, "9"), FIG09.overlay)
    assert [list(axis.lines[1].get_ydata()) for axis in figure.axes] == [[40, 2560], [3, 192]]
    papers = [[list(line.get_ydata()) for line in axis.lines if line.get_linestyle() == "--"] for axis in figure.axes]
    assert papers[0] == papers[1] != []


SPEED = {"punica": (900, 1000), "continuous_batching": (100, 1250)}


def served(model="llama2-7b"):
    fixed = {"figure": "11", "panel": "7B Model", "model": model, "batch_size": 32, "statistic": "value"}
    fixed |= {"metric": "throughput", "unit": "token/s"}
    return frame_of(row(value, **fixed, system=system, workload=workload) for system, values in SPEED.items()
                    for workload, value in zip(("Distinct", "Identical"), values, strict=True))  # fmt: skip


def test_speedups_are_over_the_best_baseline():
    rows = served()
    assert speedups(rows) == {"Distinct": 9.0, "Identical": 0.8}
    slower = rows.query("system == 'continuous_batching'").assign(system="static_batching", value=1.0)
    assert speedups(pd.concat([rows, slower])) == speedups(rows)
    gap = slower.query("workload == 'Distinct'")
    assert speedups(pd.concat([rows, gap])) == {"Distinct": 9.0}, "what is missing may be the best"
    assert speedups(rows.query("system == 'punica'")) == {}


def test_cells_without_a_value_are_named():
    """An H100 whose backbone was not measured on Identical showed Punica as the best there."""
    rows = served()
    gap = rows[(rows["system"] == "punica") | (rows["workload"] == "Distinct")]
    assert not_measured(rows) == ""
    assert not_measured(gap) == "not measured: continuous batching, one adapter on Identical"
    both = pd.concat([gap, rows.assign(panel="13B Model", model="llama2-13b")])
    assert not_measured(both) == "not measured: continuous batching, one adapter on Identical, llama2-7b"


SEVEN = read_figure(PAPER, "11").query("panel == '7B Model'")


def dots_of(axis, face=None):
    """Values of the dots of an axis: filled ones, or open ones."""
    lines = [line for line in axis.lines if line.get_linestyle() == "None" and line.get_marker() != "x"]
    return sorted(float(line.get_ydata()[0]) for line in lines if (line.get_markerfacecolor() == "white") == bool(face))


def test_figure_11_has_a_filled_dot_per_system_and_an_open_one_of_the_paper():
    rows = served()
    (axis,) = draw_serving(rows.assign(disturbed=rows["value"] == 900), SEVEN).axes
    assert axis.get_yscale() == "log"
    assert dots_of(axis) == [100, 900, 1000, 1250]
    paper = SEVEN[(SEVEN["metric"] == "throughput") & SEVEN["workload"].isin(["Distinct", "Identical"])]
    assert {68, 635} <= {round(value) for value in dots_of(axis, "open")}, "DeepSpeed, which the paper alone has"
    assert len(dots_of(axis, "open")) == len(paper[paper["system"].isin(by_paper_name())])
    assert any(text.get_text().startswith("9.0x (12") for text in axis.texts)
    assert [list(line.get_ydata()) for line in axis.lines if line.get_marker() == "x"] == [[900]]


def test_a_smaller_models_throughput_has_none_of_the_papers_beside_it():
    """Token/s of a small model stood beside those of 7B on one axis."""
    for draw_one in (draw_serving, draw_hero):
        (axis,) = draw_one(served("llama-small"), SEVEN).axes
        assert dots_of(axis, "open") == []
        assert not [bar for bar in axis.patches if bar.get_facecolor()[:3] == (1, 1, 1)]
        assert any(text.get_text().startswith("9.0x (12") for text in axis.texts), "ratios compare"


def test_requests_of_a_trace_are_not_drawn_beside_the_papers_stream():
    rows = pd.concat([served(), served().assign(panel="7B Model, trace sample by client", workload="Trace")])
    for draw_one in (draw_serving, draw_hero):
        assert len(draw_one(rows, SEVEN).axes) == len(draw_one(served(), SEVEN).axes) == 1


def test_a_system_with_wrong_tokens_is_not_drawn():
    wrong = served().query("system == 'punica'").assign(system="punica_last_admitted", value=9e9)
    alone, both = (draw_serving(rows, SEVEN) for rows in (served(), pd.concat([served(), wrong])))
    assert dots_of(alone.axes[0]) == dots_of(both.axes[0])


def test_systems_differ_in_grey_by_hatch_and_marker_within_a_figure():
    for figure in {figure for one in entries() for figure in one.figures}:
        here = [style.look(one.name) for one in entries() if figure in one.figures]
        assert len({(look.colour, look.hatch) for look in here}) == len(here)
        assert len({look.hatch for look in here}) == len(here)
        drawn = [style.look(one.name).marker for one in entries() if figure in one.figures and one.exact]
        assert len(set(drawn)) == len(drawn), "two diamonds of Figure 11 were one in grey"


@pytest.mark.parametrize(("model", "count"), [("llama2-7b", 0), ("llama2-70b", 4), ("llama-tiny", 0)])
def test_a_model_of_another_size_does_not_stand_beside_the_papers_70b(model, count):
    steps = served().assign(metric="step_latency", unit="ms")
    rows = pd.concat([served(), steps]).assign(panel="any, tp 2", model=model, figure="12")
    figure = draw_ranks(rows, read_figure(PAPER, "12"))
    assert (len(dots_of(figure.axes[0], "open")), len(dots_of(figure.axes[0]))) == (count, 4)


def test_a_clock_that_does_not_count_is_said_and_not_drawn(tmp_path):
    rows = [row(us, timer=clock, hardware="h200", batch_size=batch)
            for clock, us in (("cuda_graph", 3.0), ("host_clock", 40.0)) for batch in (1, 64)]  # fmt: skip
    assert set(frame_of_clocks(frame_of(rows))["timer"]) == {"cuda_graph"}  # no launch was calibrated with them
    for drawn, said in ((rows, True), (rows[:2], False)):
        write_rows(tmp_path / "fig09_lora_ranks.csv", drawn)
        with patch("experiments.plots.style.finish") as finish:
            draw(FIG09, tmp_path / "fig09_lora_ranks.csv", tmp_path / "figures", PAPER)
        assert (NOT_STEADY.lower() in finish.call_args.args[1].lower()) == said
