"""`make reproduce`: a point of every figure whatever the time, what failed is said first, a full disk in one line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import composed
from omegaconf import OmegaConf

from experiments.commands import report, reproduce
from experiments.commands.batch import batch_main
from experiments.harness.budget import Budget
from experiments.harness.catalogue import experiments
from experiments.harness.command import or_exit
from experiments.harness.passes import Outcome
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.records import RowsError, read_rows, write_rows
from tests.experiments.report.report_rows import decode_rows, folders_in

REMEDY = "; the rows are on disk: once that is mended, make report judges and shows them"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run `make reproduce` with one figure that is measured at once; `left` is what it has to measure."""
    cfg = OmegaConf.create({**OmegaConf.to_container(composed(tmp_path), enum_to_str=True), "figures": ["fig08"]})
    rows = tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"

    def run(left):
        def one(*_):
            if left:
                write_rows(rows, decode_rows())
            return Outcome("fig08_lora_operator", 1, measured=left, rows_file=str(rows))

        monkeypatch.setattr(reproduce, "composed", lambda experiment: cfg)
        monkeypatch.setattr(reproduce, "run", one)
        return reproduce.reproduce(cfg)

    rows.parent.mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("error", "said", "traces"),
    [
        (RowsError("fig01.csv, line 2: damaged"), "fig01.csv, line 2: damaged", 0),
        (OSError(13, "Permission denied"), "[Errno 13] Permission denied", 0),
        (ZeroDivisionError("of a formula"), "ZeroDivisionError: of a formula", 1),
    ],
    ids=["rows", "disk", "defect"],
)
def test_a_report_that_fails_keeps_the_run_and_the_next_writes_it(measured, error, said, traces, monkeypatch, capsys):
    def fails(places):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(report, "write_fresh", fails)
        assert measured(1) == 1
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert (last["measured"], last["report"], last["failed"]) == (["fig08_lora_operator"], "", {"report": said})
    assert f"report failed: {said}{REMEDY}" in err.splitlines()
    assert f"\nFailed (1):\n  report: {said}\n\nMeasured 1 points of 1 figures in 0.0 minutes" in err
    assert err.count("Traceback") == traces
    asked = []
    monkeypatch.setattr(report, "write_fresh", lambda places: asked.append(places) or fails(places))
    assert (measured(0), len(asked)) == (1, 1)  # though nothing new was measured


def test_a_page_that_is_newer_than_its_rows_is_not_written_again(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_fresh", lambda places: pytest.fail("written again"))
    write_rows(tmp_path / "cpu" / "smoke" / "rows" / "fig01_batching.csv", decode_rows())
    (tmp_path / "cpu" / "smoke" / report.PAGE).write_text("a page")
    assert measured(0) == 0
    assert "Nothing new was measured" in capsys.readouterr().err


def test_what_failed_comes_first_with_its_reason_then_what_was_measured_and_left_out():
    outcomes = {
        "fig01_batching": Outcome("fig01_batching", points=12, measured=10, left_out=2),
        "fig08_lora_operator": Outcome("fig08_lora_operator", points=9, skipped=7, failed=["a: off", "b: off"]),
    }
    failures = {"fig13_cluster": "ValueError:\n nothing", "fig08_lora_operator": "a: off; b: off"}
    assert reproduce.failed(failures, outcomes) == [
        "Failed (2):",
        "  fig13_cluster: ValueError: nothing",
        "  fig08_lora_operator: a: off; and 1 more of its points",
        "",
    ]
    assert reproduce.failed({}, outcomes) == []
    lines = reproduce.measured(outcomes.values(), 17.44, 0.0)
    assert lines[0] == "Measured 10 points of 1 figures in 17.4 minutes; 7 points were up to date."
    assert lines[1].startswith("Left out for want of time: 2 points of fig01_batching; make reproduce again")
    (line,) = reproduce.measured([outcomes["fig08_lora_operator"]], 0.1, 0.0)
    assert "Left out" not in line
    over = " ".join(reproduce.measured(outcomes.values(), 21.0, 4.96))
    assert "in 21.0 minutes, 5.0 more than planned, since every figure has a point whatever the time" in over


def test_what_was_left_out_of_many_figures_is_said_in_two_lines():
    outcomes = [Outcome(f"ext_latency_under_load_{number}", 9, measured=1, left_out=number) for number in range(1, 26)]
    lines = reproduce.measured(outcomes, 17.44, 3.0)
    assert len(lines) <= 4
    assert "325 points of ext_latency_under_load_25, " in " ".join(lines)
    assert max(map(len, lines)) <= 100


def test_the_line_of_json_is_for_programs_alone(measured, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert measured(1) == 0
    assert capsys.readouterr().out == ""


QUICK = ("fig07_sgmv_roofline", "sec6_norm", "fig13_cluster")
OF_A_KIND = (
    "fig08_lora_operator", "fig11_textgen", "fig12_textgen_70b", "sec53_migration", "ext_moe", "ext_many_adapters",
)  # fmt: skip
"""Operators, windows, ranks in processes of their own, copies, experts, streams; `make smoke` measures every figure."""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_A_KIND)])
def test_a_figure_whose_time_is_over_has_a_point_and_a_picture(tmp_path, name):
    (experiment,) = experiments([name])
    outcome = run(composed(tmp_path, "draw=true", name=name), experiment, Budget(0.0, firm=True))
    assert outcome.failed == []
    assert outcome.measured >= 1
    assert outcome.measured + outcome.left_out == outcome.points
    assert read_rows(outcome.rows_file)
    assert bool(outcome.figures) == bool(experiment.overlay or experiment.drawn_by)


@pytest.mark.slow
@pytest.mark.parametrize("points", [1, 4])
def test_rows_of_the_first_points_of_all_figures_are_judged_and_shown(tmp_path, points):
    places, scripts = folders_in(tmp_path), {one.name for one in experiments()}
    for path in (REPOSITORY / "results" / "cpu").glob("*.csv"):
        if path.stem not in scripts:
            continue  # verdicts
        rows = read_rows(path)
        first = list(dict.fromkeys(row.point for row in rows))[:points]
        write_rows(places.fresh_rows / path.name, [row for row in rows if row.point in first])
    _, files = report.write_fresh(places)
    assert all(file.exists() for file in files)


@pytest.mark.slow
def test_without_time_reproduce_ends_well_with_a_point_of_figures_of_every_kind(tmp_path):
    """Operators, engines with ratios of other rows, ranks in processes of their own, simulations."""
    names = ["fig08_lora_operator", "fig11_textgen", "fig12_textgen_70b", "fig13_cluster"]
    late = """
from experiments.commands import reproduce as module
module.minutes_of = lambda configs: dict.fromkeys(configs, 0.0001)
module.batch_main("reproduce", "", module.reproduce, "figures", measures=True)
"""
    words = ["scale=smoke", "hardware=cpu", f"paths.outputs={tmp_path}", f"figures=[{','.join(names)}]"]
    words = [sys.executable, "-c", late, *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (sorted(said["measured"]), said["failed"]) == (sorted(names), {})
    drawn = {one.name for one in experiments(names) if one.overlay or one.drawn_by}
    assert drawn <= {Path(file).stem for file in said["figures"]}
    assert "Traceback" not in done.stderr
    assert "more than planned, since every figure has a point whatever the time" in " ".join(done.stderr.split())
    begun = [line for line in done.stderr.splitlines() if line.startswith("figure ")]
    assert len(begun) == 4
    assert begun[2].startswith("figure 3 of 4: fig12_textgen_70b, ")
    assert begun[2].endswith("no time left: one measurement of it")


def test_progress_says_the_place_of_a_figure_and_the_time_left_in_all(measured, capsys):
    assert measured(1) == 0
    assert "figure 1 of 1: fig08_lora_operator, no limit of time" in capsys.readouterr().err.splitlines()


def test_a_disk_that_fills_up_ends_the_run_in_one_line(measured, monkeypatch, capsys):
    def full(*_):
        raise RowsError("fig08.csv: 9 rows cannot be written (No space left on device)") from OSError(28, "full")

    monkeypatch.setattr(report, "write_fresh", full)
    with pytest.raises(SystemExit) as ended:
        or_exit(lambda: measured(1))
    said = [line for line in capsys.readouterr().err.splitlines() if "No space" in line or "Failed" in line]
    assert (ended.value.code, said) == (2, ["error: fig08.csv: 9 rows cannot be written (No space left on device)"])
    with pytest.raises(SystemExit):
        or_exit(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device", "a.png")))
    said = capsys.readouterr().err
    assert said.startswith("error: a.png cannot be written (No space left on device): make room there, or choose")


def test_a_full_disk_is_one_line_before_anything_is_measured(tmp_path):
    words = [sys.executable, "-m", "experiments.commands.reproduce", "scale=smoke", f"paths.outputs={tmp_path}/new"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=REPOSITORY, check=False, env=os.environ,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot write in {tmp_path}/new/cpu")
    assert done.stderr.endswith("make room there, or choose another folder with paths.outputs=<folder>\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("figures=fig08", "must be a list, which has brackets: figures=[value,value]"),
        ("figures=fig08,fig09", "Ambiguous value"),
        ("figures=[8", "no viable alternative at input '[8'"),
        ("figure.minutes.laptop=0.01", "figure.minutes.laptop=0.01 is of one figure, and reproduce takes many"),
        ("+figure.minutes.laptop=0.01", "is of one figure"),
        ("~scale", "~scale: ~ is no home folder here, and no key can be deleted"),
        ("paths.outputs=~/results", "paths.outputs=~/results: ~ is no home folder here"),
        ("scale=foo", "Could not find 'scale/foo' Available options in 'scale': gpu laptop paper smoke"),
        ("scale.repeats=many", "scale.repeats=many must be a valid integer"),
        ("scale.repeat=3", "did you mean scale.repeats=?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["reproduce", words])
    with pytest.raises(SystemExit) as ended:
        batch_main("reproduce", "", lambda cfg: pytest.fail("it ran"), "figures", measures=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith("error: ")) == (2, True)
    assert said in line


@pytest.mark.parametrize("entry", ["2", "fig2", "fig0", "fig99", "nope"])
def test_an_unknown_figure_is_one_line_with_those_there_are(entry):
    with pytest.raises(ConfigError) as refused:
        experiments([entry])
    said = f"figures has {entry!r}, but a figure's number or how one of these begins is: fig07_sgmv_roofline, fig08_"
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("1", "fig01_batching"), ("fig1", "fig01_batching"), ("fig01", "fig01_batching"),
        ("Figure 1", "fig01_batching"), ("08", "fig08_lora_operator"), ("fig11", "fig11_textgen"),
        ("12", "fig12_textgen_70b"),
        ("fig13_cluster", "fig13_cluster"), ("sec6", "sec6_norm"), ("readme", "readme_backbone"),
    ],
)  # fmt: skip
def test_a_figure_is_named_by_its_number_or_the_beginning_of_its_name(entry, name):
    assert [experiment.name for experiment in experiments([entry])] == [name]
