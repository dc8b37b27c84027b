"""What `make record` takes: rows that are of the commit they name, and samples as long as there is room."""

import random
import subprocess
from pathlib import Path

import pytest

from experiments.commands import commits as commits_module
from experiments.commands import record
from experiments.commands.commits import Commits, refuse_other_sources
from experiments.harness.samples import add_samples, read_samples, samples_file
from experiments.harness.source import fingerprint, tree_of
from experiments.measure.records import Row, RowFile, RowsError, read_rows

BASE = {
    "figure": "8", "panel": "Skewed", "system": "SGMV", "workload": "Skewed", "model": "", "hardware": "cpu",
    "seq_len": None, "rank": 16, "metric": "latency", "value": 100.0, "unit": "us", "statistic": "count",
    "config_hash": "c", "repeat": 0,
}  # fmt: skip


def a_row(batch_size=1, **columns):
    return Row(batch_size=batch_size, **{**BASE, **columns})


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two commits that differ in the code of `experiments/fig08.py`, and what its rows must say: commit -> hash."""
    root, told = tmp_path_factory.mktemp("repository"), {}

    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    for name in ("experiments", "punica"):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text("")
    for code in ("A = 1\n", "A = 2\n"):
        (root / "experiments" / "fig08.py").write_text(code)
        git("add", "-A")
        git("commit", "-q", "-m", code)
        for one in (fingerprint, tree_of):
            one.cache_clear()
        commit = git("rev-parse", "--short=12", "HEAD")
        told[commit] = fingerprint(root / "experiments" / "fig08.py", root)
    return root, told


@pytest.fixture
def commits(repository):
    with Commits(repository[0]) as found:
        yield found


def test_rows_that_are_of_their_commits_are_taken_however_many_these_are(repository, commits):
    first, second = repository[1].items()
    assert first[1] != second[1]
    rows = [a_row(commit=commit, source_hash=source) for commit, source in (first, second)]
    refuse_other_sources([*rows, a_row(commit="abc-dirty"), a_row(commit="unknown")], "fig08", commits)


def test_rows_of_another_source_than_their_commit_are_refused_with_rows_figure_and_commit(repository, commits):
    (first, theirs), (second, ours) = repository[1].items()
    rows = [a_row(commit=first, source_hash=ours), a_row(2, commit=first, source_hash=ours), a_row(commit=second)]
    with pytest.raises(RowsError) as caught:
        refuse_other_sources(rows, "fig08", commits)
    said = str(caught.value)
    assert f"2 rows of figure 8 with source {ours}: commit {first} gives {theirs}" in said
    assert f"1 rows of figure 8 with source unknown: commit {second} gives {ours}" in said
    assert "force=true" in said


@pytest.mark.parametrize(("commit", "script"), [("0123456789ab", "fig08"), ("HEAD", "fig99")])
def test_a_commit_or_a_script_that_git_does_not_have_is_refused(commits, commit, script):
    with pytest.raises(RowsError, match=f"commit {commit} is not in this repository with that script"):
        refuse_other_sources([a_row(commit=commit, source_hash="a")], script, commits)


@pytest.fixture
def fresh_and_recorded(tmp_path):
    """Batch 1 and 2 recorded with one sample, batch 1 measured again with another."""
    fresh, recorded = RowFile(tmp_path / "rows" / "fig08.csv"), RowFile(tmp_path / "results" / "cpu" / "fig08.csv")
    for file, batches, sample in ((recorded, (1, 2), 5.0), (fresh, (1,), 6.0)):
        rows = [a_row(batch, source_hash=f"{sample}") for batch in batches]
        file.replace(rows)
        add_samples(file, [(row, [sample]) for row in rows])
    return fresh, recorded


def samples(file):
    return {line["batch_size"]: line["samples"] for line in read_samples(samples_file(file.path))}


def test_samples_go_along_with_their_rows_and_those_of_rows_that_stay_remain(fresh_and_recorded):
    fresh, recorded = fresh_and_recorded
    record.promote(recorded.path, fresh.rows)
    record.promote_samples(fresh.path, recorded.path, recorded.path.parents[1])
    assert samples(recorded) == {1: [6.0], 2: [5.0]}


def test_samples_that_are_all_of_other_rows_are_said_to_be(fresh_and_recorded, capsys):
    fresh, recorded = fresh_and_recorded
    recorded.replace([a_row(batch, source_hash="later") for batch in (1, 2)])
    record.promote_samples(fresh.path, recorded.path, recorded.path.parents[1])
    assert not samples_file(recorded.path).exists()
    assert f"fig08: no samples; those in {samples_file(fresh.path)} are of other rows" in capsys.readouterr().err


def test_samples_stay_where_they_are_when_the_recorded_set_would_grow_too_large(
    fresh_and_recorded, monkeypatch, capsys
):
    fresh, recorded = fresh_and_recorded
    luck = random.Random(0)
    add_samples(fresh, [(fresh.rows[0], [luck.random() for _ in range(5000)])])
    record.promote(recorded.path, fresh.rows)
    monkeypatch.setattr(record, "MOST_BYTES", 10_000)
    record.promote_samples(fresh.path, recorded.path, recorded.path.parents[1])
    assert samples(recorded) == {2: [5.0]}  # those of batch 1 were of the row that went
    assert f"fig08: samples stay in {samples_file(fresh.path)}" in capsys.readouterr().err


def test_a_release_takes_rows_of_one_commit(tmp_path):
    rows = [a_row(commit="abcdef012345"), a_row(2, commit="0123456789ab")]
    record.refuse_other_commits(tmp_path, rows, "")
    record.refuse_other_commits(tmp_path, rows[:1], "abcdef0")
    record.refuse_other_commits(tmp_path, rows[:1], "abcdef0123456789abcdef0123456789abcdef01")
    with pytest.raises(RowsError, match=r"other commits than abcdef0 \(1 of 0123456789ab\)"):
        record.refuse_other_commits(tmp_path, rows, "abcdef0")
    with pytest.raises(RowsError, match=r"commit=4028000000\.0 is none"):
        record.refuse_other_commits(tmp_path, rows, "4028000000.0")


def test_recorded_rows_and_their_samples_get_the_hash_of_their_commit(repository, commits, tmp_path, monkeypatch):
    monkeypatch.setattr(commits_module, "script_of", lambda path: Path("fig08.py"))
    (first, ours), (second, theirs) = repository[1].items()
    rows = [
        a_row(1, commit=first, source_hash="by another rule"), a_row(2, commit=second, source_hash="b"),
        a_row(4, commit="abc-dirty", source_hash="c"), a_row(8, commit="0" * 12, source_hash="d"),
    ]  # fmt: skip
    path = tmp_path / "fig08.csv"
    file = RowFile(path)
    file.replace(rows)
    add_samples(file, [(row, [1.0, 2.0]) for row in rows])
    assert [name for name, _ in commits_module.rehash(tmp_path, commits)] == ["fig08.csv"]
    assert [row.source_hash for row in read_rows(path)] == [ours, theirs, "", ""]
    assert [line["source_hash"] for line in read_samples(samples_file(path))] == [ours, theirs, "", ""]
