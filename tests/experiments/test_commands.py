"""The commands as a user types them. What takes more than a few seconds is marked slow and runs in CI."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.catalogue import experiments
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import Row, read_rows, write_rows
from experiments.plots.draw import draw

ALL = {experiment.name: experiment for experiment in experiments()}


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", f"experiments.{module}", *arguments]
    return subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def alone(folder: Path) -> list[str]:
    """Options of a run into ``folder`` at smoke scale, whose report judges no recorded machine beside it."""
    return ["scale=smoke", "hardware=cpu", f"paths.outputs={folder}", f"paths.results={folder}/recorded"]


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_cfg_job_prints_the_configuration_and_runs_nothing(tmp_path):
    done = command("fig08_lora_operator", "--cfg", "job", "--resolve", f"paths.outputs={tmp_path}", "workload=skewed")
    assert done.returncode == 0, done.stderr
    assert "names:\n  - Skewed" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_help_is_our_own_and_says_what_the_figure_is():
    done = command("fig08_lora_operator", "--help")
    assert done.returncode == 0, done.stderr
    for part in (
        "Figure 8",
        "Claim",
        "Usage: python -m experiments.fig08_lora_operator",
        "scale=smoke",
        "workload: all",
    ):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("scale.repeat=3", "did you mean scale.repeats=?"), ("workload=foo", "Could not find 'workload/foo'")],
)
def test_a_mistake_is_a_message_without_a_traceback(tmp_path, argument, expected):
    done = command("fig08_lora_operator", f"paths.outputs={tmp_path}", argument)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = command("fig08_lora_operator", f"paths.outputs={tmp_path}/file")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write in ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_script_runs_and_multirun_sweeps_an_outer_axis(tmp_path):
    done = command(
        "fig08_lora_operator", "--multirun", "scale=smoke", "hardware=cpu", f"paths.outputs={tmp_path}", "draw=false",
        "workload=skewed,identical", "system=sgmv", "figure.batch_sizes=[1,7]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(outcome["measured"], outcome["skipped"]) for outcome in outcomes] == [(2, 0), (2, 0)]
    rows = read_rows(outcomes[-1]["rows_file"])
    assert {row.workload for row in rows} == {"Skewed", "Identical"}
    assert {row.hardware for row in rows} == {"cpu"}


@pytest.mark.slow
def test_reproduce_resumes_redoes_only_what_was_deleted_and_reports(tmp_path):
    beside_the_recorded = ["scale=smoke", "hardware=cpu", f"paths.outputs={tmp_path}", "figures=[fig08,readme]"]
    first = command("commands.reproduce", *beside_the_recorded)
    assert first.returncode == 0, first.stderr
    assert last_json(first)["measured"] == ["fig08_lora_operator", "readme_backbone"]
    assert Path(last_json(first)["report"]).exists()
    words = [*alone(tmp_path), "figures=[fig08,readme]"]
    second = last_json(command("commands.reproduce", *words))
    assert set(second["measured"]) <= set(last_json(first)["disturbed"])  # none, where nothing else runs
    (tmp_path / "cpu" / "smoke" / "rows" / "readme_backbone.csv").unlink()
    third = last_json(command("commands.reproduce", *words))
    assert set(third["measured"]) - set(second["disturbed"]) == {"readme_backbone"} - set(second["disturbed"])
    assert "readme_backbone" in third["measured"]


@pytest.mark.slow
def test_reproduce_ends_when_its_minutes_are_over_and_goes_on_when_run_again(tmp_path):
    short = """
from experiments.commands import reproduce as module
module.minutes_of = lambda configs: dict.fromkeys(configs, 0.0005)
module.batch_main("reproduce", "", module.reproduce, "figures", measures=True)
"""
    words = [*alone(tmp_path), "figures=[fig08,readme]"]
    done = subprocess.run(
        [sys.executable, "-c", short, *words], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    left_out = last_json(done)["left_out"]
    assert set(left_out) == {"fig08_lora_operator", "readme_backbone"}
    said = " ".join(done.stderr.split())
    assert f"Left out for want of time: {sum(left_out.values())} points of " in said
    assert last_json(command("commands.reproduce", *words))["left_out"] == {}


@pytest.mark.slow
def test_a_figure_that_fails_does_not_stop_the_others(tmp_path):
    rows = tmp_path / "cpu" / "smoke" / "rows"
    rows.mkdir(parents=True)
    (rows / "fig08_lora_operator.csv").write_text("not,rows\n")
    done = command("commands.reproduce", *alone(tmp_path), "figures=[fig08,readme]")
    assert done.returncode == 1
    assert last_json(done)["measured"] == ["readme_backbone"]
    assert "line 1" in last_json(done)["failed"]["fig08_lora_operator"]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_choice_that_no_chosen_figure_reads_is_refused(tmp_path):
    words = [f"paths.outputs={tmp_path}", "figures=[fig08,readme]", "model=llama-tiny"]
    done = command("commands.reproduce", *words)
    assert done.returncode == 2
    assert (
        "error: model=llama-tiny would change nothing, model is not read by any of fig08_lora_operator" in done.stderr
    )
    done = command("commands.report", f"paths.outputs={tmp_path}", "model=llama-tiny")
    assert done.returncode == 2
    assert "model is not read by make report" in done.stderr
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.slow
def test_a_choice_that_one_chosen_figure_reads_is_taken(tmp_path):
    words = [*alone(tmp_path), "figures=[fig08,fig01]", "model=llama-tiny"]
    done = command("commands.reproduce", *words, "draw=false")
    assert done.returncode == 0, done.stderr
    assert last_json(done)["measured"] == ["fig08_lora_operator", "fig01_batching"]


@pytest.mark.slow
def test_an_unknown_figure_is_refused(tmp_path):
    done = command("commands.reproduce", f"paths.outputs={tmp_path}", "figures=[fig99]")
    assert done.returncode == 2
    assert "figures has 'fig99'" in done.stderr


def fake_rows(scale: str = "laptop", commit: str = "0123456789ab") -> list[Row]:
    base = Row(
        figure="8", panel="Skewed", system="SGMV", workload="Skewed", model="", hardware="cpu", batch_size=1,
        seq_len=None, rank=16, metric="latency", value=100.0, unit="us", statistic="median", timer="host_clock",
        scale=scale, commit=commit, date="2026-01-01T00:00:00Z", device="some CPU",
    )  # fmt: skip
    return [replace(base, batch_size=rows, statistic=kind) for rows in (1, 8, 64) for kind in ("median", "p10", "p90")]


@pytest.mark.slow
def test_record_promotes_rows_and_figures(tmp_path):
    write_rows(tmp_path / "cpu" / "rows" / "fig08_lora_operator.csv", fake_rows(commit="0123-dirty"))
    words = ["hardware=cpu", f"paths.outputs={tmp_path}", f"paths.results={tmp_path}/r", f"paths.figures={tmp_path}/f"]
    done = command("commands.record", *words)
    assert done.returncode == 1
    assert not (tmp_path / "r").exists()
    done = command("commands.record", *words, "allow_dirty=true")
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "r" / "cpu" / "fig08_lora_operator.csv")) == 9
    assert (tmp_path / "f" / "cpu" / "fig08_lora_operator.png").exists()


@pytest.mark.slow
def test_figures_draws_recorded_rows_without_measuring(tmp_path):
    write_rows(tmp_path / "r" / "h200" / "fig08_lora_operator.csv", [replace(r, hardware="h200") for r in fake_rows()])
    words = [
        "hardware=h200",
        f"paths.outputs={tmp_path}/o",
        f"paths.results={tmp_path}/r",
        f"paths.figures={tmp_path}/f",
    ]
    done = command("commands.figures", *words)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "f" / "h200" / "fig08_lora_operator.json").read_text())
    assert (facts["commits"], facts["hardware"], facts["rows"]) == (["0123456789ab"], ["h200"], 9)
    assert not (tmp_path / "o" / "h200" / "figures").exists()
    nothing = command("commands.figures", "hardware=cpu", *words[1:])
    assert nothing.returncode == 2
    assert "no rows to draw" in nothing.stderr


def test_a_picture_carries_the_commit_and_the_paper(tmp_path):
    write_rows(tmp_path / "fig08_lora_operator.csv", fake_rows())
    _, png, facts = draw(
        ALL["fig08_lora_operator"], tmp_path / "fig08_lora_operator.csv", tmp_path, REPOSITORY / "paper_results"
    )
    assert b"commit 0123456789ab" in png.read_bytes()
    assert str(tmp_path) not in facts.read_text()
