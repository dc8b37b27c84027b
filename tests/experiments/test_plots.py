"""What figures show beside their lines: names of models, repeats, disturbed points, both roofs, DeepSpeed's bar."""

import itertools
import json
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from fakes import composed
from matplotlib.patches import Patch
from omegaconf import OmegaConf

from experiments.facts.paper import read_figure
from experiments.facts.systems import name_of
from experiments.fig07_sgmv_roofline import EXPERIMENT as FIG07
from experiments.fig07_sgmv_roofline import SHEET
from experiments.fig08_lora_operator import EXPERIMENT as FIG08
from experiments.fig09_lora_ranks import EXPERIMENT as FIG09
from experiments.harness.counted import counted, frame_of, merged
from experiments.harness.schema import CONF, REPOSITORY
from experiments.harness.settings import settle
from experiments.plots import style
from experiments.plots.draw import draw
from experiments.plots.frames import described, has_bands, how_often, in_order, interval
from experiments.plots.hero import SHOWN, draw_hero
from experiments.plots.load import draw_load
from experiments.plots.overlay import named, panels
from experiments.plots.roofline import draw_roofline
from experiments.plots.serving_bars import PAPER_NAMES, draw_serving, not_measured, relative_to_best, short
from experiments.plots.tensor_parallel import draw_ranks
from punica.measure.records import Row, write_rows

PAPER = REPOSITORY / "paper_results"


def row(value, **columns):
    fixed = {"figure": "9", "panel": "r=16", "system": "SGMV", "workload": "Distinct", "model": "", "hardware": "cpu"}
    fixed |= {"batch_size": 1, "seq_len": None, "rank": 16, "metric": "latency", "unit": "us", "statistic": "median"}
    return Row(**{**fixed, "timer": "host_clock", "scale": "laptop", "device": "a CPU", **columns, "value": value})


def merged_rows(rows):
    return merged(counted(frame_of(rows)))


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_neither_matplotlibrc_nor_backend_of_the_user_reach_a_figure(tmp_path):
    """LaTeX, which few have installed, and a backend that there is not."""
    write_rows(tmp_path / "fig09_lora_ranks.csv", [row(10.0)])
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.bbox: tight\nsavefig.dpi: 10\n")
    code = f"""
from pathlib import Path
from experiments.fig09_lora_ranks import EXPERIMENT
from experiments.plots.draw import draw
draw(EXPERIMENT, Path("fig09_lora_ranks.csv"), Path("."), Path({str(PAPER)!r}))
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "none"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    draw(FIG09, tmp_path / "fig09_lora_ranks.csv", tmp_path / "ours", PAPER)
    sizes = [plt.imread(folder / "fig09_lora_ranks.png").shape for folder in (tmp_path, tmp_path / "ours")]
    assert sizes[0] == sizes[1]


def test_a_figure_names_the_dates_of_all_repeats(tmp_path):
    path, days = tmp_path / "fig09_lora_ranks.csv", ("2026-01-01T00:00:00Z", "2026-01-09T00:00:00Z")
    write_rows(path, [row(10.0 + repeat, repeat=repeat, date=date) for repeat, date in enumerate(days)])
    _, _, facts = draw(FIG09, path, tmp_path, PAPER)
    assert json.loads(facts.read_text(encoding="utf-8"))["measured"] == list(days)


@pytest.mark.parametrize(
    ("panel", "model", "title"),
    [
        ("7B, len=512", "llama-small", "llama-small, len=512\n(paper: 7B)"),
        ("7B, len=512", "llama2-7b", "llama2-7b, len=512\n(paper: 7B)"),
        ("decode", "llama-small", "decode"),
        ("Distinct", "", "Distinct"),
    ],
)
def test_a_panel_carries_the_name_of_the_model_that_was_measured(panel, model, title):
    assert named(panel, pd.DataFrame({"model": [model]})) == title


def test_a_stand_in_is_said_to_be_one():
    assert "llama-small beside the paper's 7B" in described(frame_of([row(1.0, model="llama-small")]))
    assert "beside" not in described(frame_of([row(1.0, model="llama2-7b")]))


@pytest.mark.parametrize(("counts", "banded"), [((5, 5), [1, 8]), ((5, 4), [8]), ((2, 2), [8])])
def test_no_band_is_drawn_where_a_repeat_has_fewer_than_five_samples(counts, banded):
    """Of batch 1, whose repeats have `counts` samples; those of batch 8 have nine."""
    sampled = {"p10": 9.0, "median": 10.0, "p90": 12.0}
    rows = [row(value, repeat=i, batch_size=batch, statistic=name, unit="samples" if name == "count" else "us")
            for batch, numbers in ((1, counts), (8, (9, 9))) for i, number in enumerate(numbers)
            for name, value in {**sampled, "count": float(number)}.items()]  # fmt: skip
    found = interval(merged_rows(rows), "batch_size")
    assert found["batch_size"].tolist() == banded
    assert set(found["p10"]) == {9.0}
    assert set(found["p90"]) == {12.0}
    assert has_bands(merged_rows(rows))
    assert has_bands(merged_rows([one for one in rows if one.batch_size == 1])) == (1 in banded)


def test_rows_are_in_the_order_of_models_systems_and_popularities_whatever_ran_first():
    """Bars of a figure stood in the order of the run, and those of two machines differently."""
    models, panels, systems = ("", "llama2-7b", "llama2-70b"), ("b", "a"), ("punica", "hf_peft", "Loop")
    cells = list(itertools.product(models, panels, systems, ("Distinct", "Uniform", "Skewed", "Identical")))
    ran = cells[-12:] + cells[12:-12] + cells[:12]  # whole panels, the last first
    ran = [cell for cell in ran if cell[3] == "Identical"] + [cell for cell in ran if cell[3] != "Identical"]
    rows = in_order(pd.DataFrame(ran, columns=["model", "panel", "system", "workload"]).assign(rank=16))
    found = list(rows.drop(columns="rank").itertuples(index=False, name=None))
    order = list(dict.fromkeys(cell[1] for cell in ran))
    assert found == sorted(cells, key=lambda cell: (models.index(cell[0]), order.index(cell[1])))
    assert in_order(rows).equals(rows)


def test_panels_of_ranks_are_in_the_order_of_ranks_whatever_ran_first():
    """Figure 9 began with rank 16 where its ranks were measured in runs of their own."""
    ran = [row(1.0, panel=f"r={rank}", rank=rank, workload=name)
           for rank in (16, 64, 8) for name in ("Uniform", "Distinct")]  # fmt: skip
    rows = in_order(frame_of(ran))
    assert rows["panel"].drop_duplicates().tolist() == ["r=8", "r=16", "r=64"]
    assert rows["workload"].tolist() == 3 * ["Distinct", "Uniform"]


def test_repeats_become_one_point_of_the_quiet_ones():
    values = ((10.0, False), (12.0, False), (50.0, True))
    rows = [row(value, repeat=i, disturbed=loud) for i, (value, loud) in enumerate(values)]
    rows += [row(value - 1, repeat=i, disturbed=loud, statistic="p10") for i, (value, loud) in enumerate(values)]
    rows += [row(20, repeat=i, disturbed=False, statistic="count", unit="samples") for i in range(3)]
    rows.append(row(7.0, batch_size=2))
    made = merged_rows(rows).set_index(["batch_size", "statistic"])
    assert made["value"].to_dict() == {(1, "median"): 11, (1, "p10"): 9, (1, "count"): 20, (2, "median"): 7}
    assert made["repeats"].to_dict() == {(1, "median"): 2, (1, "p10"): 2, (1, "count"): 3, (2, "median"): 1}
    assert not made["disturbed"].eq(True).any()
    loud = merged_rows([row(value, repeat=i, disturbed=True) for i, value in enumerate((1.0, 2.0, 6.0))])
    assert loud["value"].tolist() == [2.0]
    assert loud["disturbed"].tolist() == [True]
    assert described(loud).endswith("median of 3 repeats; hollow: disturbed")


def curves(*disturbed):
    """Figure 9 at one rank: SGMV and its expand, at batch sizes 1, 4 and 16; ``disturbed`` of SGMV."""
    rows = [row(10.0 * n, batch_size=n, disturbed=n in disturbed) for n in (1, 4, 16)]
    return frame_of([*rows, *(row(5.0 * n, batch_size=n, system="SGMV expand") for n in (1, 4, 16))])


def test_disturbed_points_are_hollow_and_expand_is_dotted():
    def lines(*disturbed):
        figure = panels(curves(*disturbed), read_figure(PAPER, "9").query("panel == 'none'"), FIG09.overlay)
        above, below = figure.axes
        return above.lines, below.lines

    above, below = lines()
    assert [line.get_linestyle() for line in above] == ["-", ":"]
    assert list(above[1].get_ydata()) == [5, 20, 80]
    assert [list(line.get_ydata()) for line in below] == [[1, 4, 16]]
    above, below = lines(4)
    for line in (above[1], below[1]):
        assert (list(line.get_xdata()), line.get_markerfacecolor()) == ([4], "white")
    assert list(below[1].get_ydata()) == [4]


def test_new_operators_have_colours_of_their_own_in_figure_8():
    names = [*OmegaConf.load(CONF / "figure/fig08_lora_operator.yaml").systems, "tiles", "selit", "a third"]
    with style.themed():
        figure = panels(frame_of([row(1.0, system=name) for name in names]), read_figure(PAPER, "8"), FIG08.overlay)
    solid = [line.get_color() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert len(solid) == len(set(solid)) == len(names)
    assert [handle.get_color() for handle in figure.legends[0].legend_handles[::2]] == solid


def test_both_roofs_are_measured_or_of_the_data_sheet(tmp_path):
    on_gpu = settle(composed(tmp_path, "scale=paper", "hardware=h200", name=FIG07.name), FIG07)
    roofs = [point for point in FIG07.points(on_gpu) if point.panel.startswith("roof")]
    assert [point.panel for point in roofs] == ["roof", SHEET]
    sheet = FIG07.measure(on_gpu, roofs[1])
    assert [(one.value, one.unit, one.kind) for one in sheet] == [
        (4.8, "TB/s", "datasheet"), (989, "TFLOP/s", "datasheet"),
    ]  # fmt: skip
    on_cpu = settle(composed(tmp_path, "scale=smoke", "hardware=cpu", name=FIG07.name), FIG07)
    assert [point.panel for point in FIG07.points(on_cpu) if point.panel.startswith("roof")] == ["roof"]


def test_roofs_are_named_by_how_they_are_known():
    fixed = {"figure": "7", "workload": "", "system": "", "rank": None, "batch_size": None, "device": "NVIDIA H200"}
    rows = []
    for panel, kind, bandwidth, peak in (("roof", "measured", 4.2, 700.0), (SHEET, "datasheet", 4.8, 989.0)):
        fixed |= {"panel": panel, "kind": kind, "statistic": "value"}
        rows.append(row(bandwidth, **{**fixed, "metric": "memory_bandwidth_line", "unit": "TB/s"}))
        rows.append(row(peak, **{**fixed, "metric": "peak_fp16_line", "unit": "TFLOP/s"}))
    points = (("latency", "us", 3.0), ("achieved_flops", "FLOP/s", 1e11), ("arithmetic_intensity", "FLOP/byte", 0.9))
    for name, unit, value in points:
        rows.append(row(value, figure="7", panel="", metric=name, unit=unit, statistic="median"))
    figure = draw_roofline(frame_of(rows), read_figure(PAPER, "7"))
    legend = next(axis.get_legend() for axis in figure.axes if axis.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == [
        "NVIDIA H200, measured: 4,200 GB/s, 700 TFLOP/s", "NVIDIA H200, data sheet: 4,800 GB/s, 989 TFLOP/s",
        "paper, A100: 1,935 GB/s, 312 TFLOP/s",
    ]  # fmt: skip


SPEED = {"punica": (900, 1000), "continuous_batching": (100, 1250)}


def served():
    fixed = {"figure": "11", "panel": "7B Model", "model": "llama-small", "batch_size": 32, "statistic": "value"}
    rows = []
    for system, values in SPEED.items():
        for workload, value in zip(("Distinct", "Identical"), values, strict=True):
            cell = {**fixed, "system": system, "workload": workload}
            rows.append(row(value, **{**cell, "metric": "throughput", "unit": "token/s"}))
            for metric, number in (("requests", 256), ("total_tokens", 8000), ("new_tokens", 7800)):
                rows.append(row(number, **{**cell, "metric": metric, "unit": metric, "statistic": "count"}))
    return frame_of(rows)


def test_bars_are_relative_to_the_best_system_on_identical():
    rows = served().query("metric == 'throughput'")
    relative = relative_to_best(rows).set_index(["system", "workload"])["value"]
    assert relative.to_dict() == {
        ("punica", "Distinct"): 0.72, ("punica", "Identical"): 0.8,
        ("continuous_batching", "Distinct"): 0.08, ("continuous_batching", "Identical"): 1.0,
    }  # fmt: skip


def test_bars_are_relative_to_nothing_where_the_best_may_be_missing():
    """An H100 whose backbone was not measured on Identical showed Punica as the best there."""
    rows = served().query("metric == 'throughput'")
    gap = rows[(rows["system"] == "punica") | (rows["workload"] == "Distinct")]
    assert relative_to_best(gap).empty
    assert not_measured(rows) == ""
    assert not_measured(gap) == "not measured: continuous batching, one adapter on Identical"
    both = pd.concat([gap, rows.assign(panel="13B Model", model="llama2-13b")])
    assert not_measured(both) == "not measured: continuous batching, one adapter on Identical, llama-small"


def test_bars_are_labelled_with_two_or_three_digits():
    labels = {0.0025: "0.0025", 0.846: "0.85", 1.9: "1.90", 7.44: "7.4", 9.97: "10", 24.6: "25", 4087: "4087"}
    assert {value: short(value) for value in labels} == labels


def test_a_machine_of_which_only_the_capacity_is_known_has_a_figure_of_load():
    about = {"figure": "ext latency under load", "panel": "capacity", "workload": "Distinct", "model": "llama2-7b"}
    about |= {"system": "punica", "batch_size": 32, "statistic": "value", "device": "x", "timer": "host_clock"}
    rows = pd.DataFrame([{**about, "scale": "gpu", "metric": "capacity", "value": 3.0, "unit": "request/s"}])
    figure = draw_load(rows, pd.DataFrame())
    assert not any(axis.lines for axis in figure.axes)


def test_serving_bars_have_the_papers_deepspeed_and_say_their_regime():
    figure = draw_serving(served(), read_figure(PAPER, "11").query("panel == '7B Model'"))
    written = [text.get_text() for text in figure.axes[0].texts]
    assert {"68 DS", "635 DS"} <= set(written)
    assert "DS: DeepSpeed" in figure.legends[0].get_texts()[-1].get_text()
    title = figure.get_suptitle().replace("\n", " ")
    assert "256 requests, 8,000 tokens, 2.5 % of them of prompts" in title
    assert "; one run; " in title


def test_a_system_with_wrong_tokens_has_no_bar_in_the_hero_figure():
    wrong = served().query("system == 'punica'").assign(system="punica_last_admitted", value=9e9)
    paper = read_figure(PAPER, "11").query("panel == '7B Model'")
    alone, both = (draw_serving(rows, paper) for rows in (served(), pd.concat([served(), wrong])))
    assert len(alone.axes[0].patches) == len(both.axes[0].patches) > 0
    assert "punica_last_admitted" not in legend_of(both)


def test_the_hero_figure_has_policies_beside_the_papers_bars_on_a_linear_axis():
    paper = read_figure(PAPER, "11").query("panel == '7B Model'")
    rows = pd.concat([served(), served().query("system == 'punica'").assign(system="hf_peft")])
    figure = draw_hero(rows, paper)
    (axis,) = figure.axes
    assert axis.get_yscale() == "linear"
    assert axis.get_ylim()[0] == 0
    systems = [name for name in SHOWN if name in set(served()["system"])]
    workloads = set(served()["workload"])
    assert len(axis.patches) == 2 * len(systems) * len(workloads)
    hatched = [bar.get_hatch() is not None for bar in axis.patches]
    assert sum(hatched) == len(hatched) // 2
    expected = {*map(name_of, systems), *(f"paper, A100: {PAPER_NAMES[name]}" for name in systems)}
    assert set(legend_of(figure)) == expected


FOREIGN = ("vllm", "fastertransformer")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def on_ranks(rows, model):
    """`rows` as Figure 12 has them, with steps."""
    steps = rows[rows["metric"] == "throughput"].assign(metric="step_latency", unit="ms")
    return pd.concat([rows, steps]).assign(panel="any, tp 2", model=model, figure="12")


def loaded():
    """Three systems under one load."""
    about = {"figure": "ext latency under load", "panel": "load 80 %", "workload": "Distinct", "model": "llama2-7b"}
    about |= {"batch_size": 32, "statistic": "value", "timer": "host_clock", "scale": "gpu", "device": "x"}
    cells = (("offered_rate", 3.0), ("time_to_first_token", 9.0), ("time_to_first_token_p95", 20.0))
    systems = ("punica", "continuous_batching", "static_batching")
    rows = [{**about, "system": system, "metric": name, "value": x} for system in systems for name, x in cells]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", ["serving", "ranks", "load"])
def test_a_policy_on_our_engine_is_named_by_what_it_does(name):
    """Its bars were called (vLLM) and (FasterTransformer), which were never run; the title says whose policy it is."""
    serving = served().replace({"system": {"punica": "static_batching"}})
    drawn = {
        "serving": lambda: draw_serving(serving, read_figure(PAPER, "11").query("panel == '7B Model'")),
        "ranks": lambda: draw_ranks(on_ranks(serving, "llama2-70b"), read_figure(PAPER, "12")),
        "load": lambda: draw_load(loaded(), pd.DataFrame()),
    }
    figure = drawn[name]()
    assert {"continuous batching, one adapter", "static batching, one adapter"} <= set(legend_of(figure))
    assert not [text for text in legend_of(figure) if any(word in text.lower() for word in FOREIGN)]
    title = figure.get_suptitle().replace("\n", " ")
    assert "continuous batching: the policy of vLLM (2023), static batching: the policy of FasterTransformer" in title


def test_a_model_of_another_size_does_not_stand_beside_the_papers_70b():
    for model, bars in (("llama2-7b", 4), ("llama2-70b", 4 + 4), ("llama-tiny", 4)):
        figure = draw_ranks(on_ranks(served(), model), read_figure(PAPER, "12"))
        above = figure.axes[0]
        assert ("paper, A100" in legend_of(figure)) == (bars > 4)
        assert len(above.patches) == bars, model
        assert ("beside the paper's 70B" in above.get_title()) == (bars > 4)


def test_a_title_says_the_repeats_that_each_point_has():
    """It said the most that any has."""

    def often(*cells):
        return how_often(pd.DataFrame(cells, columns=["system", "workload", "repeats"]).assign(**fixed))

    fixed = {"statistic": "median", "timer": "events"}
    assert often(("punica", "Distinct", 3), ("hf_peft", "Distinct", 3)) == "median of 3 repeats"
    assert often(("punica", "Distinct", 1)) == "one run"
    mixed = (("punica", "Distinct", 3), ("punica", "Uniform", 2), ("hf_peft", "Distinct", 1), ("hf_peft", "Zipf", 1))
    assert often(*mixed) == "median of 1 to 3 repeats (hf_peft: 1; Uniform: 2)"
    fixed["timer"] = ""
    assert often(*mixed) == ""  # simulated


def test_a_title_names_systems_of_one_model_and_says_that_single_points_have_fewer_repeats():
    """It named the systems that have fewer on every model, and was silent about the rest."""

    def often(*cells):
        frame = pd.DataFrame(cells, columns=["system", "model", "workload", "repeats"])
        return how_often(frame.assign(statistic="median", timer="events"))

    whole = [("punica", model, workload, 2) for model in ("7b", "13b") for workload in ("Distinct", "Identical")]
    peft = [("hf_peft", model, "Distinct", 1) for model in ("7b", "13b")]
    static = [("static", "7b", "Distinct", 2), ("static", "13b", "Distinct", 1), ("static", "13b", "Identical", 1)]
    cell = [("continuous", "13b", "Distinct", 2), ("continuous", "13b", "Identical", 1)]
    assert often(*whole, *peft) == "median of 1 to 2 repeats (hf_peft: 1)"
    assert often(*whole, *peft, *static) == "median of 1 to 2 repeats (hf_peft: 1; 13b static: 1)"
    named = "hf_peft: 1; 13b static: 1; and single cells"
    assert often(*whole, *peft, *static, *cell) == f"median of 1 to 2 repeats ({named})"
    assert often(*whole, *cell) == "median of 1 to 2 repeats"


def test_a_disturbed_bar_is_hollow():
    rows = served()
    hit = (rows["system"] == "punica") & (rows["workload"] == "Distinct") & (rows["metric"] == "throughput")
    rows = rows.assign(disturbed=hit)
    above = draw_serving(rows, read_figure(PAPER, "11").query("panel == 'none'")).axes[0]
    faces = [patch.get_facecolor()[:3] for patch in above.patches]
    assert faces.count((1.0, 1.0, 1.0)) == 1


def test_the_lowest_bar_of_any_panel_is_seen():
    """13B's slowest bar lay below 7B's scale, which both share."""
    small = served()
    slower = small["value"].where(small["metric"] != "throughput", small["value"] / 10)
    rows = pd.concat([small, small.assign(panel="13B Model", model="llama2-13b", value=slower)])
    figure = draw_serving(rows, read_figure(PAPER, "11").query("panel == 'none'"))
    lowest = rows.loc[rows["metric"] == "throughput", "value"].min()
    for axis in figure.axes[:2]:
        assert axis.get_ylim()[0] < lowest / 1.4


def test_bars_of_all_panels_stand_in_one_order_and_say_how_often_each_was_measured():
    """13B's slowest systems, measured last, stood at its end and 7B's at its beginning."""
    small = served()
    small = small.assign(repeats=1 + (small["system"] == "punica"))
    again = small.assign(panel="13B Model", model="llama2-13b").iloc[::-1]
    figure = draw_serving(pd.concat([small, again]), read_figure(PAPER, "11").query("panel == 'none'"))
    colours = [[patch.get_facecolor() for patch in axis.patches[:4]] for axis in figure.axes[:2]]
    lefts = [[round(patch.get_x(), 6) for patch in axis.patches[:4]] for axis in figure.axes[:2]]
    assert sorted(zip(*(lefts[0], colours[0]), strict=True)) == sorted(zip(*(lefts[1], colours[1]), strict=True))
    assert "median of 1 to 2 repeats (continuous batching: 1)" in figure.get_suptitle().replace("\n", " ")


def test_a_legend_keeps_within_its_figure():
    """The last column of a narrow figure's was cut off."""
    figure = plt.figure(figsize=(4.8, 3.0), layout="constrained")
    handles = [Patch(label=f"a name of some thirty letters {i}") for i in range(6)]
    style.caption(figure, "title", "here", handles, 4)
    (legend,) = figure.legends
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
