"""The plugin: rows, losses and mistakes of trials."""

from pathlib import Path
from typing import Any

import pytest

from experiments.measure.records import read_rows
from tests.reliability.trial import Trial

pytest_plugins = ["pytester"]
TRIALS = """
import pytest
from tests.reliability.trial import sized

@sized("load", 1, 20, 300, seconds=1)
def test_sound(trial):
    trial.injected = trial.count
    trial.expect(True, "")
    trial.values["host_memory_growth"] = (1.5, "MiB")

@sized("load", 1, 20, 300, seconds=1, tiny=6)
def test_broken(trial):
    for number in range(trial.count):
        trial.expect(number == 3, f"note {number}")

@sized("load", 1, 20, 300, seconds=1)
def test_fails(trial):
    pytest.fail("too late")  # as by a time limit
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> Any:
    """Run trials with the plugin alone; the file of their rows, and the result."""
    pytester.makeini("[pytest]\nmarkers = reliability\n slow\n gpu\n")
    pytester.makeconftest("from tests.reliability.conftest import *")
    pytester.makepyfile(test_of_a_test=TRIALS)
    file = pytester.path / "outputs/cpu/reliability.csv"
    return lambda *words: (file, pytester.runpytest_inprocess("--device=cpu", *words))


def test_rows_of_a_sound_and_a_broken_trial(run: Any) -> None:
    from experiments.report.results import trials_table

    file, result = run("-m", "reliability", "--seed", "7")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["test_broken: tried 20, injected 0, survived 1, lost 19; note 0; note 1; note 2;*"])
    rows = {(row.system, row.metric): row for row in read_rows(file)}
    assert {metric: row.value for (name, metric), row in rows.items() if name == "sound"} == {
        "tried": 1, "injected": 20, "survived": 1, "lost": 0, "host_memory_growth": 1.5
    }  # fmt: skip
    assert [row.value for (_, metric), row in rows.items() if metric == "lost"] == [0, 19, 1]
    assert {(row.panel, row.scale, row.repeat, row.hardware) for row in rows.values()} == {("load", "laptop", 7, "cpu")}
    assert all(row.commit and row.date and row.device and row.source_hash for row in rows.values())
    _, lines = trials_table(file.parent)
    assert lines[0][:6] == ["load: sound", "1", "20", "1", "0", "host memory growth 1.5 MiB"]
    assert lines[1][-1] == '`make reliability ARGS="-k test_broken --size laptop --seed 7 --device cpu"`'
    run("-m", "reliability", "--seed", "8", "-k", "sound")
    run("-m", "slow")[1].assert_outcomes(failed=1)  # a tiny trial, without rows
    assert [row.repeat for row in read_rows(file) if row.metric == "lost"] == [7, 7, 7, 8]
    run("-m", "reliability", "--size", "smoke", "-k", "sound")
    assert {row.scale for row in read_rows(file.parent / "smoke" / file.name)} == {"smoke"}


def test_rows_of_uncommitted_code_are_not_recorded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.measure.environment.commit", lambda: "abc-dirty")
    file, result = run("--out", "results")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not (file.parents[2] / "results").exists()


def test_drift_leaks_and_growth(tmp_path: Path) -> None:
    trial, before = Trial(1, 0, "cpu", tmp_path), {"host_memory": 100, "thread": 4, "handle": 9}
    trial.note_rates([100, 100, 1, 1, 1, 1, 90, 90], "token/s")
    assert trial.values["throughput_drift"] == (pytest.approx(-10), "%")
    for threads, handles, pool, lost in ((3, 9, 0, 0), (5, 9, 0, 1), (6, 9, 2, 0), (4, 11, 2, 1)):
        counted = Trial(1, 0, "cpu", tmp_path)
        counted.note_growth(before, {"host_memory": 120, "thread": threads, "handle": handles}, pool)
        assert counted.lost == lost
        assert counted.values["host_memory_growth"] == (20, "MiB")
