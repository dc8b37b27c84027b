"""What figures show: names of models, repeats, clocks, disturbed points, floors, roofs, speed-ups, and that all of it
can be told apart and read.
"""

import itertools
import json
import os
import subprocess
import sys
from unittest.mock import patch

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from fakes import Fake
from matplotlib.patches import Patch
from omegaconf import OmegaConf

from experiments.facts.paper import read_figure
from experiments.facts.systems import by_paper_name, entries
from experiments.fig07_sgmv_roofline import SHEET
from experiments.fig08_lora_operator import EXPERIMENT as FIG08
from experiments.fig09_lora_ranks import EXPERIMENT as FIG09
from experiments.fig10_layer import EXPERIMENT as FIG10
from experiments.harness.counted import NOT_STEADY, counted, frame_of, merged
from experiments.harness.schema import CONF, REPOSITORY
from experiments.measure.records import Row, write_rows
from experiments.plots import style
from experiments.plots.draw import draw
from experiments.plots.floors import FLOOR, floors
from experiments.plots.frames import (
    frame_of_clocks,
    in_order,
    interval,
    measured_frame,
    rows_of_repeats,
)  # fmt: skip
from experiments.plots.moves import draw_loading
from experiments.plots.overlay import draw_roofline, panels
from experiments.plots.serving import SHOWN, draw_hero, draw_ranks, draw_serving, not_measured, short, speedups
from experiments.plots.steps import scaled

PAPER = REPOSITORY / "paper_results"


def row(value, **columns):
    fixed = {"figure": "9", "panel": "r=16", "system": "SGMV", "workload": "Distinct", "model": "", "hardware": "cpu"}
    fixed |= {"batch_size": 1, "seq_len": None, "rank": 16, "metric": "latency", "unit": "us", "statistic": "median"}
    return Row(**{**fixed, "timer": "host_clock", "scale": "laptop", "device": "a CPU", **columns, "value": value})


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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


def test_the_facts_beside_a_figure_have_dates_and_repeats_of_every_system(tmp_path):
    path, days = tmp_path / "fig09_lora_ranks.csv", ("2026-01-01T00:00:00Z", "2026-01-09T00:00:00Z")
    rows = [row(10.0 + repeat, repeat=repeat, date=date, commit="0123456789ab") for repeat, date in enumerate(days)]
    write_rows(path, [*rows, row(9.0, system="SGMV expand", repeat=0, date=days[0])])
    _, png, facts = draw(FIG09, path, tmp_path, PAPER)
    found = json.loads(facts.read_text(encoding="utf-8"))
    assert found["measured"] == list(days)
    assert b"commit 0123456789ab" in png.read_bytes()
    assert found["repeats"] == {", r=16, SGMV, Distinct": 2, ", r=16, SGMV expand, Distinct": 1}


@pytest.mark.parametrize(("counts", "banded"), [((5, 5), [1, 8]), ((5, 4), [8]), ((2, 2), [8])])
def test_no_band_is_drawn_where_a_repeat_has_fewer_than_five_samples(counts, banded):
    """Of batch 1, whose repeats have `counts` samples; those of batch 8 have nine."""
    rows = [row(value, repeat=i, batch_size=batch, statistic=name, unit="samples" if name == "count" else "us")
            for batch, numbers in ((1, counts), (8, (9, 9))) for i, number in enumerate(numbers)
            for name, value in {"p10": 9.0, "median": 10.0, "p90": 12.0, "count": float(number)}.items()]  # fmt: skip
    found = interval(merged(counted(frame_of(rows))), "batch_size")
    assert found["batch_size"].tolist() == banded
    assert (set(found["p10"]), set(found["p90"])) == ({9.0}, {12.0})


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


def test_figure_10_shows_differences_to_identical():
    fixed = {"figure": "10", "panel": "7B, len=512", "system": "punica", "metric": "layer_latency"}
    rows = [row(us, **fixed, workload=name, batch_size=batch)
            for batch in (1, 32) for name, us in (("Distinct", 110.0), ("Identical", 100.0))]  # fmt: skip
    above, below = panels(frame_of(rows), read_figure(PAPER, "10").query("panel == 'none'"), FIG10.overlay).axes
    assert [list(line.get_ydata()) for line in above.lines if len(line.get_xdata())] == [[100, 100]]
    assert list(below.lines[0].get_ydata()) == pytest.approx([10, 10])


def test_floors_are_bytes_over_the_data_sheets_bandwidth(tmp_path):
    path = tmp_path / "fig08_lora_operator.csv"
    path.with_suffix(".json").write_text(json.dumps({"figure": {"h1": 4096, "h2": 11008, "dtype": "float16"}}))
    rows = [row(10.0, figure="8", hardware="h200", batch_size=batch, workload="Distinct") for batch in (1, 64)]
    rows.append(row(99.0, figure="8", hardware="h200", system="Loop"))
    found = floors(frame_of(rows), path)
    assert (found["metric"] == FLOOR).all()
    halves = 4096 + 2 * 11008 + 16 * (4096 + 11008)  # x, y twice, A and B
    assert found["value"].tolist() == pytest.approx([2 * n * halves / 4.8e6 for n in (1, 64)])
    assert floors(frame_of(rows), tmp_path / "other.csv").empty, "no settings"
    assert floors(frame_of([row(1.0, figure="8")]), path).empty, "a CPU without a measured roof"


@pytest.mark.parametrize("gaps", [None, 0.5, -0.2])
@pytest.mark.parametrize("step", [5.0, 12.0])
def test_parts_of_a_step_end_where_it_ends(step, gaps):
    case = {"step_latency": step, "time_base_gemm": 6.0, "time_attention": 2.0}
    parts, longer = scaled(pd.Series(case | ({} if gaps is None else {"time_gaps": gaps})))
    assert sum(parts.values()) == pytest.approx(step)
    assert parts["base_gemm"] / parts["attention"] == pytest.approx(3)
    assert longer == pytest.approx(1 if gaps == 0.5 and step == 12 else 8 / step)


def test_new_operators_have_colours_of_their_own_in_figure_8():
    names = [*OmegaConf.load(CONF / "figure/fig08_lora_operator.yaml").systems, "tiles", "selit", "a third"]
    with style.themed():
        figure = panels(frame_of([row(1.0, system=name) for name in names]), read_figure(PAPER, "8"), FIG08.overlay)
    solid = [line.get_color() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert len(solid) == len(set(solid)) == len(names)
    assert [handle.get_color() for handle in figure.legends[0].legend_handles[: len(names)]] == solid


def test_roofs_have_their_own_bandwidth_and_peak():
    fixed = {"figure": "7", "workload": "", "system": "", "rank": None, "batch_size": None, "statistic": "value"}
    rows = [row(3.0, figure="7", panel=""), row(1e11, figure="7", panel="", metric="achieved_flops")]
    for panel, kind, bandwidth, peak in (("roof", "measured", 4.2, 700.0), (SHEET, "datasheet", 4.8, 989.0)):
        rows.append(row(bandwidth, **fixed, panel=panel, kind=kind, metric="memory_bandwidth_line", unit="TB/s"))
        rows.append(row(peak, **fixed, panel=panel, kind=kind, metric="peak_fp16_line", unit="TFLOP/s"))
    roof = draw_roofline(frame_of(rows), read_figure(PAPER, "7")).axes[0]
    lines = zip(roof.get_legend().get_texts(), roof.get_legend().legend_handles, strict=True)
    assert {text.get_text().partition(":")[0]: line.get_linestyle() for text, line in lines} == {
        "measured": "-", "data sheet": ":", "paper, A100": "--",
    }  # fmt: skip
    ends = [(line.get_ydata()[0] / line.get_xdata()[0], line.get_ydata()[-1]) for line in roof.lines[-3:]]
    assert ends == [pytest.approx(one) for one in ((4.2e12, 700e12), (4.8e12, 989e12), (1.935e12, 312e12))]


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


def test_bars_are_labelled_with_two_or_three_digits():
    labels = {0.0025: "0.0025", 0.846: "0.85", 1.9: "1.90", 7.44: "7.4", 9.97: "10.0", 24.6: "25", 4087: "4087"}
    assert {value: short(value) for value in labels} == labels


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


def test_a_system_with_wrong_tokens_is_not_drawn():
    wrong = served().query("system == 'punica'").assign(system="punica_last_admitted", value=9e9)
    alone, both = (draw_serving(rows, SEVEN) for rows in (served(), pd.concat([served(), wrong])))
    assert dots_of(alone.axes[0]) == dots_of(both.axes[0])
    assert "punica_last_admitted" not in legend_of(both)


def test_the_hero_figure_has_policies_beside_the_papers_bars():
    rows = pd.concat([served(), served().query("system == 'punica'").assign(system="hf_peft")])
    (axis,) = draw_hero(rows, SEVEN).axes
    systems = [name for name in SHOWN if name in set(served()["system"])]
    open_bars = [bar for bar in axis.patches if bar.get_facecolor()[:3] == (1, 1, 1)]
    assert len(axis.patches) == 2 * len(open_bars) == 2 * len(systems) * 2


def recorded(name, hardware="h200"):
    return measured_frame(rows_of_repeats(REPOSITORY / "results" / hardware / f"{name}.csv"))


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_recorded_bars_begin_at_zero_and_differ_in_colour_or_hatch(hardware):
    figure = draw_hero(recorded("fig11_textgen", hardware), read_figure(PAPER, "11"))
    for axis in figure.axes:
        assert axis.get_yscale() == "linear"
        assert {axis.get_ylim()[0], *(bar.get_y() for bar in axis.patches)} == {0}
    looks = [(handle.get_facecolor(), handle.get_edgecolor(), handle.get_hatch())
             for handle in figure.legends[0].legend_handles]  # fmt: skip
    assert len(set(looks)) == len(looks)


def test_systems_differ_in_grey_by_hatch_and_marker_within_a_figure():
    for figure in {figure for one in entries() for figure in one.figures}:
        here = [style.look(one.name) for one in entries() if figure in one.figures]
        assert len({(look.colour, look.hatch) for look in here}) == len(here)
        assert len({look.hatch for look in here}) == len(here)
        drawn = [style.look(one.name).marker for one in entries() if figure in one.figures and one.exact]
        assert len(set(drawn)) == len(drawn), "two diamonds of Figure 11 were one in grey"


def test_labels_of_section_5_2_do_not_overlap():
    with style.themed():
        figure = draw_loading(recorded("sec52_adapter_loading"), pd.DataFrame())
        figure.draw_without_rendering()
        for axis in (figure.axes[2], figure.axes[5]):
            for texts in (axis.get_yticklabels(), axis.texts):
                boxes = [text.get_window_extent() for text in texts]
                assert len(boxes) >= 5
                assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_policy_on_our_engine_is_named_by_what_it_does():
    """Its bars were called (vLLM) and (FasterTransformer), which were never run; the title says whose policy it is."""
    figure = draw_serving(served().replace({"system": {"punica": "static_batching"}}), SEVEN)
    assert {"continuous batching, one adapter", "static batching, one adapter"} <= set(legend_of(figure))
    caption = figure.get_supxlabel().replace("\n", " ").lower()
    assert "continuous batching: the policy of vllm (2023), static batching: the policy of fastertransformer" in caption


@pytest.mark.parametrize(("model", "count"), [("llama2-7b", 0), ("llama2-70b", 4), ("llama-tiny", 0)])
def test_a_model_of_another_size_does_not_stand_beside_the_papers_70b(model, count):
    steps = served().assign(metric="step_latency", unit="ms")
    rows = pd.concat([served(), steps]).assign(panel="any, tp 2", model=model, figure="12")
    figure = draw_ranks(rows, read_figure(PAPER, "12"))
    assert (len(dots_of(figure.axes[0], "open")), len(dots_of(figure.axes[0]))) == (count, 4)
    assert ("paper, A100" in legend_of(figure)) == bool(count)


def test_a_clock_that_does_not_count_is_said_and_not_drawn(tmp_path):
    rows = [row(us, timer=clock, hardware="h200", batch_size=batch)
            for clock, us in (("cuda_graph", 3.0), ("host_clock", 40.0)) for batch in (1, 64)]  # fmt: skip
    assert set(frame_of_clocks(frame_of(rows))["timer"]) == {"cuda_graph"}  # no launch was calibrated with them
    for drawn, said in ((rows, True), (rows[:2], False)):
        write_rows(tmp_path / "fig09_lora_ranks.csv", drawn)
        with patch("experiments.plots.style.finish") as finish:
            draw(FIG09, tmp_path / "fig09_lora_ranks.csv", tmp_path / "figures", PAPER)
        assert (NOT_STEADY.lower() in finish.call_args.args[1].lower()) == said


def test_legend_and_caption_keep_within_their_figure():
    """The last column of a narrow figure's legend was cut off."""
    figure = plt.figure(figsize=(4.8, 3.0), layout="constrained")
    handles = [Patch(label=f"a name of some thirty letters {i}") for i in range(6)]
    with style.themed():
        style.finish(figure, "words of a caption that goes over more than one line, " * 4, handles, 4)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        for box in (legend.get_window_extent(), figure._supxlabel.get_window_extent()):
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.width


def test_experiments_without_a_figure_draw_nothing(tmp_path):
    write_rows(tmp_path / "rows.csv", [row(10.0)])
    assert draw(Fake(), tmp_path / "rows.csv", tmp_path / "figures", PAPER) == []
    assert not (tmp_path / "figures").exists()
