"""The command of trials: choice, progress, rows, exit code, records, and mistakes that are one error each."""

import dataclasses
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")
pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.commands import reliability as command
from experiments.commands.reliability import Options, reliability
from experiments.harness.schema import ConfigError
from experiments.measure.records import RowsError, read_rows, write_rows
from experiments.reliability import process
from experiments.reliability.groups import all_trials, file_of
from experiments.reliability.process import outcome_of, run_apart
from experiments.reliability.rows import COUNTS, command_of, rows_of
from experiments.reliability.trial import SIZES, Outcome
from experiments.report.machines import rows_files
from experiments.report.results import trials_table

GOOD = Outcome(10, 4, 10, {"host_memory_growth": (1.5, "MiB"), "pages_kept": (0, "count")})
BAD = Outcome(10, 4, 8, {}, ["request-3 ended 2 times"])


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the processes of trials by outcomes, by name."""
    monkeypatch.setattr(command.environment, "hardware_slug", lambda: "cpu")

    def replaced(**outcomes: Outcome) -> None:
        monkeypatch.setattr(command, "run_apart", lambda trial, *_: outcomes.get(trial.name, GOOD))

    return replaced


def options(folder: Path, *trials: str, **fields: Any) -> Options:
    return Options(list(trials), outputs=str(folder / "outputs"), results=str(folder / "results"), **fields)


def test_rows_and_a_line_of_progress_for_each_trial(run_as: Any, tmp_path: Path, capsys: Any) -> None:
    run_as()
    reliability(options(tmp_path, "load", "same_tokens"))
    rows = read_rows(tmp_path / "outputs/cpu/reliability.csv")
    assert {row.system for row in rows} == {"engine_soak", "server_soak", "same_tokens"}
    soak = {row.metric: (row.value, row.unit) for row in rows if row.system == "engine_soak"}
    assert soak == {
        "tried": (10, "count"), "injected": (4, "count"), "survived": (10, "count"), "lost": (0, "count"),
        "host_memory_growth": (1.5, "MiB"), "pages_kept": (0, "count"),
    }  # fmt: skip
    assert all(row.commit and row.date and row.device and row.source_hash for row in rows)
    said = capsys.readouterr().out
    assert "[1/3] engine_soak: Requests over ten times more adapters than slots" in said
    assert said.count("s so far, about") == 3
    assert "tried 10, injected 4, survived 10, lost 0; host_memory_growth 1.5 MiB" in said


def test_a_loss_is_told_kept_in_the_rows_and_gives_status_1(run_as: Any, tmp_path: Path, capsys: Any) -> None:
    run_as(engine_soak=BAD)
    with pytest.raises(SystemExit) as stopped:
        reliability(options(tmp_path, "load"))
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert "lost 2\n    lost: request-3 ended 2 times" in said
    assert json.loads(said.strip().splitlines()[-1])["lost"] == 2
    rows = read_rows(tmp_path / "outputs/cpu/reliability.csv")
    assert {row.system: row.value for row in rows if row.metric == "lost"} == {"engine_soak": 2, "server_soak": 0}


def test_a_trial_again_replaces_its_rows_and_another_seed_stands_beside_them(run_as: Any, tmp_path: Path) -> None:
    run_as()
    for seed in (0, 1, 1):
        reliability(options(tmp_path, "load", size="smoke", seed=seed))
    rows = read_rows(tmp_path / "outputs/cpu/smoke/reliability.csv")
    assert len(rows) == 2 * 2 * 6
    assert {command_of(row) for row in rows} >= {
        'make reliability ARGS="trials=[engine_soak] size=smoke seed=1 device=cpu"'
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trials": ["soak"]}, r"trials=\['soak'\] are unknown: choose from .*engine_soak"),
        ({"trials": ["graphs_and_batch_sizes"]}, "needs an NVIDIA GPU"),
        ({"size": "big"}, "size=big is unknown: choose one of smoke, laptop, full"),
        ({"device": "tpu"}, "device=tpu is unknown: choose one of auto, cpu, cuda"),
        ({"device": "cuda"}, "device=cuda needs an NVIDIA GPU"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
    ],
)
def test_mistakes_are_one_error_before_anything_runs(run_as: Any, tmp_path: Path, fields: Any, said: str) -> None:
    run_as()
    with pytest.raises(ConfigError, match=said):
        reliability(options(tmp_path).model_copy(update=fields))
    assert list(tmp_path.iterdir()) == []


def test_trials_that_need_a_gpu_are_left_out_aloud(run_as: Any, tmp_path: Path, capsys: Any) -> None:
    run_as()
    reliability(options(tmp_path, "determinism"))
    assert "left out: graphs_and_batch_sizes needs an NVIDIA GPU\n" in capsys.readouterr().out
    names = {row.system for row in read_rows(tmp_path / "outputs/cpu/reliability.csv")}
    assert names == {"same_tokens", "same_simulation"}


def test_only_rows_of_a_commit_that_gives_their_source_are_recorded(
    run_as: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    trial, fresh = all_trials().get("engine_soak"), tmp_path / "outputs/cpu/reliability.csv"
    target = tmp_path / "results/cpu/reliability.csv"
    run_as()
    checked = []
    monkeypatch.setattr(command, "refuse_other_sources", lambda rows, script, _: checked.append((len(rows), script)))
    rows = [replace(row, commit="abc") for row in rows_of(trial, GOOD, "laptop", 0, "cpu")]
    fresh.parent.mkdir(parents=True)
    for wrong, message in (({"commit": "abc-dirty"}, "uncommitted"), ({"system": "gone"}, "no more"),
                           ({"scale": "smoke"}, "smoke")):  # fmt: skip
        write_rows(fresh, [replace(rows[0], **wrong)])
        with pytest.raises(RowsError, match=message):
            reliability(options(tmp_path, record=True))
        assert not target.exists()
    write_rows(fresh, rows)
    reliability(options(tmp_path, record=True))
    assert read_rows(target) == rows
    assert checked[-1] == (6, "reliability/load")


def test_the_report_has_a_line_for_each_run_and_says_where_there_is_none(tmp_path: Path) -> None:
    trial = all_trials().get("disk_full")
    folders = {name: tmp_path / name for name in ("cpu", "h200")}
    for folder in folders.values():
        folder.mkdir()
    write_rows(folders["cpu"] / "reliability.csv", [
        *rows_of(trial, GOOD, "laptop", 0, "cpu"), *rows_of(trial, BAD, "full", 7, "cpu")])
    head, lines = trials_table(folders["cpu"])
    assert [line[:5] for line in lines] == [
        ["faults: disk_full", "10", "4", "10", "0"], ["faults: disk_full", "10", "4", "8", "2"]]
    assert lines[0][5] == "host memory growth 1.5 MiB; pages kept 0"
    assert lines[1][-1] == '`make reliability ARGS="trials=[disk_full] size=full seed=7 device=cpu"`'
    assert len(head) == len(lines[0])
    assert trials_table(folders["h200"]) is None
    assert rows_files(folders["cpu"]) == []


def test_every_trial_is_described_and_of_one_group() -> None:
    registry = all_trials()
    groups = {registry.get(name).group for name in registry.names()}
    assert groups == {"load", "faults", "input", "isolation", "determinism"}
    for name in registry.names():
        trial = registry.get(name)
        assert trial.about.endswith(".")
        assert 0 < trial.counts["smoke"] <= trial.counts["laptop"] <= trial.counts["full"]
        assert file_of(trial).startswith("reliability/")
    trials = [registry.get(name) for name in registry.names()]
    assert sum(trial.seconds for trial in trials if not trial.needs_gpu) <= 900
    assert sum(trial.seconds for trial in trials if trial.needs_gpu) <= 300


def test_a_process_that_takes_too_long_or_fails_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = all_trials().get("same_simulation")
    slow = dataclasses.replace(trial, seconds=-5.99)  # a limit of 0.1 s
    late = run_apart(slow, "smoke", 0, "cpu")
    assert (late.tried, late.lost) == (1, 1)
    assert "more than 0 s" in late.notes[0]
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    failed = run_apart(trial, "smoke", 0, "cpu")
    assert (failed.tried, failed.lost) == (1, 1)
    assert "exit code 1" in failed.notes[0]


def test_children_of_a_trial_end_with_it() -> None:
    started = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 900 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(started.stdout.readline())
    process._end_session(started)
    started.stdout.read()  # ends when no process of the session holds it
    assert not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text()
    assert started.returncode == -9


def test_an_outcome_survives_the_way_between_processes() -> None:
    assert outcome_of(json.dumps(dataclasses.asdict(BAD))) == BAD
    assert outcome_of(json.dumps(dataclasses.asdict(GOOD))) == GOOD


@pytest.mark.slow
def test_a_trial_in_a_process_of_its_own() -> None:
    outcome = run_apart(all_trials().get("operator_calls"), SIZES[0], 0, "cpu")
    assert (outcome.lost, outcome.notes) == (0, [])
    assert outcome.tried >= all_trials().get("operator_calls").counts[SIZES[0]]
    assert set(COUNTS) == {"tried", "injected", "survived", "lost"}
