"""What `make record` takes, `make record-all`, whose sets are measured in calls, and the check of recorded rows."""

import json
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from fakes import BASE, PAPER, composed, git

from experiments.commands import record_all
from experiments.commands.record import promote, refuse, refuse_other_sources, source_hashes
from experiments.commands.record_all import Options, left
from experiments.commands.rows import faults
from experiments.harness.catalogue import RecordedSet, experiments, sets_of
from experiments.harness.schema import REPOSITORY
from experiments.harness.settings import keys_read, refuse_unread
from experiments.harness.source import fingerprint, read
from experiments.measure.records import RowsError, read_rows, write_rows
from experiments.plots.floors import floors
from experiments.report.machines import machine_of, recorded_folders
from experiments.report.reproducing import recorded
from experiments.report.results import notes
from tests.experiments.report.report_rows import decode_rows

ROW = replace(BASE, hardware="cpu", statistic="count", config_hash="c", commit="abc")


def a_row(batch_size=1, **columns):
    return replace(ROW, batch_size=batch_size, **columns)


@pytest.mark.parametrize(
    "columns", [{"scale": "smoke"}, {"commit": "0123456789ab-dirty"}, {"commit": "unknown"}, {"commit": ""}], ids=str
)
def test_rows_that_cannot_be_repeated_are_not_recorded(columns):
    with pytest.raises(RowsError):
        refuse([a_row(), a_row(**columns)], allow_dirty="scale" in columns)
    if "commit" in columns:
        refuse([a_row(**columns)], allow_dirty=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two commits that differ in the code of `experiments/fig08.py`, and what its rows must say: commit -> hash."""
    root, told = tmp_path_factory.mktemp("repository"), {}
    git(root, "init", "-q")
    for name in ("experiments", "punica"):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text("")
    for code in ("A = 1\n", "A = 2\n"):
        (root / "experiments" / "fig08.py").write_text(code)
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", code)
        for one in (fingerprint, read):
            one.cache_clear()
        commit = git(root, "rev-parse", "--short=12", "HEAD")
        told[commit] = fingerprint(root / "experiments" / "fig08.py", root)
    return root, told


def test_rows_are_taken_if_their_sources_are_those_of_their_commits(repository):
    (first, ours), (second, theirs) = repository[1].items()
    assert ours != theirs
    rows = [a_row(commit=first, source_hash=ours), a_row(commit=second, source_hash=theirs), a_row(commit="a-dirty")]
    with source_hashes(repository[0]) as source_hash:
        refuse_other_sources(rows, "fig08", source_hash)
        with pytest.raises(RowsError, match=f"2 rows with source {theirs}: commit {first} gives {ours}"):
            refuse_other_sources([a_row(i, commit=first, source_hash=theirs) for i in (1, 2)], "fig08", source_hash)
        for commit, script in (("0123456789ab", "fig08"), (first, "fig99")):
            with pytest.raises(RowsError, match=f"commit {commit} is not in this repository with that script"):
                refuse_other_sources([a_row(commit=commit, source_hash="a")], script, source_hash)


def test_fresh_points_replace_recorded_ones_and_others_stay(tmp_path, capsys):
    path = tmp_path / "results" / "fig08.csv"
    write_rows(path, [a_row(batch, source_hash="old") for batch in (1, 2)])
    promote(path, [a_row(1, source_hash="new")])
    assert {row.batch_size: row.source_hash for row in read_rows(path)} == {1: "new", 2: "old"}
    assert "1 recorded points without fresh rows stay (Skewed)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "one"),
    [(name, one) for name in ("cpu", "h200") for one in sets_of(name)
     if not (one.script.startswith("commands.") or one.script.endswith("_tables"))],
    ids=lambda one: str(one)[:50],
)  # fmt: skip
def test_every_set_composes_and_its_words_are_read(hardware, one, tmp_path):
    words = one.command(hardware, 1, "/python")[1:]
    (experiment,) = experiments([one.script])
    assert composed(tmp_path, *words, name=one.script).hardware.name == hardware
    refuse_unread(words, keys_read(experiment), one.script)


def test_a_set_needs_gpus_of_its_memory_and_vllm():
    one = RecordedSet("x", 1.0, gb=100.0, gpus=2, vllm=True)
    assert one.missing(None, [141.0, 141.0])
    assert one.missing("/p", [141.0, 80.0])
    assert one.missing("/p", [141.0, 141.0]) == ""


def test_rounds_measure_one_repeat_more_each_and_those_of_claims_come_first():
    tables = RecordedSet("ext_tables table=all", 1.0, rounds=1)
    claims = RecordedSet("b x=1", 1.0, claims="C01", rounds=2)
    assert left([tables, claims], []) == [(claims, 0), (claims, 1), (tables, 0)]
    assert left([tables, claims], [("b x=1", 0)]) == [(claims, 1), (tables, 0)]
    assert [claims.command("h200", round_, None)[-1] for round_ in (0, 1)] == ["scale.passes=1", "scale.passes=2"]
    assert "scale.passes" not in " ".join(tables.command("h200", 0, None))


PROGRAM = """
import json, os, sys, time
try:
    time.sleep({seconds})
finally:
    with open("{ran}", "a") as file:
        file.write("{name}" + chr(10))
print(json.dumps({facts}), flush=True)
os._exit({status})
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Measure `sets` in a call; return its last line, and what ran. `how`: set -> its seconds, status and points."""
    monkeypatch.setattr(record_all, "REPOSITORY", tmp_path)
    monkeypatch.setattr(record_all, "commit", lambda: "abc")

    def program(one, machine, round_, vllm_python):
        about = {"seconds": 0, "status": 0, "facts": {}, **how.get(one.run, {})}
        code = PROGRAM.format(name=f"{one.run} {round_}", ran=tmp_path / "ran", **about)
        return ["timeit", "-n1", "-r1", code]

    def run(sets, gpus, limit=9.0, **about):
        how.clear()
        how.update(about)
        monkeypatch.setattr(record_all, "sets_of", lambda machine: sets)
        monkeypatch.setattr(record_all, "gpu_memory", lambda machine: [80.0] * gpus)
        (tmp_path / "ran").write_text("")
        with suppress(SystemExit):
            record_all.record_all(Options(machine="h200", limit=limit))
        return json.loads(capsys.readouterr().out.splitlines()[-1]), (tmp_path / "ran").read_text().splitlines()

    how = {}
    monkeypatch.setattr(RecordedSet, "command", program)
    return run


def test_calls_continue_and_failures_are_told(call):
    small, large = RecordedSet("a", 0.0, rounds=2), RecordedSet("c", 0.0, gb=100.0)
    told, ran = call([small, large], 1, a={"status": 1})
    assert (ran, told["failed"], told["left"]) == (["a 0", "a 1"], ["round 1: a", "round 2: a"], 2)
    assert set(told["not_on_this_machine"]) == {"c"}
    told, ran = call([small, large], 1)
    assert (ran, told["left"]) == (["a 0", "a 1"], 0)
    assert call([small, large], 1)[1] == []
    for facts, left_ in (({"points": 0}, 1), ({"points": 3, "left_out": 1}, 1), ({"left_out": {}}, 0)):
        assert call([RecordedSet("a", 0.0, rounds=3)], 1, a={"facts": facts})[0]["left"] == left_


@pytest.mark.slow
def test_a_set_is_interrupted_at_the_limit_and_one_of_more_minutes_is_not_begun(call):
    began = time.monotonic()
    told, ran = call([RecordedSet("a", 0.0), RecordedSet("b", 1.0)], 1, 0.1, a={"seconds": 60})
    assert time.monotonic() - began < 30
    assert (ran, told["left"], told["failed"]) == (["a 0"], 6, [])


def test_rows_of_another_commit_and_uncommitted_code_are_refused(call, tmp_path, monkeypatch):
    write_rows(tmp_path / "outputs/h200/rows/fig.csv", [a_row(commit="def")])
    with pytest.raises(RowsError, match="holds work of commit def, this is abc"):
        call([RecordedSet("a", 0.0)], 1)
    monkeypatch.setattr(record_all, "commit", lambda: "abc-dirty")
    with pytest.raises(RowsError, match="the tree is of abc-dirty"):
        call([RecordedSet("a", 0.0)], 1)


STAMPED = {"hardware": "gpu", "commit": "abc", "source_hash": "s", "config_hash": "c", "date": "d", "device": "G",
           "python": "3", "torch": "2", "scale": "gpu", "calib_gemm_us": 1.0, "calib_copy_us": 1.0}  # fmt: skip


@pytest.mark.slow
def test_recorded_rows_have_no_faults():
    assert [fault for folder in recorded_folders(REPOSITORY / "results") for fault in faults(folder)] == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({}, ""), ({"hardware": "cpu"}, "hardware cpu is not gpu"), ({"torch": ""}, "torch is not given"),
     ({"scale": "smoke"}, "smoke"), ({"calib_copy_us": None}, "calib_copy_us"), ({"commit": "a-dirty"}, "uncommitted"),
     ({"value": 0.0}, "above 0"), ({"value": float("inf")}, "finite"), ({"commit": "--help"}, "is no hash"),
     ({"commit": "../a"}, "is no hash"),
     ({"source_hash": "x"}, "gives s")], ids=str,
)  # fmt: skip
def test_faults_are_named(wrong, fault, tmp_path):
    write_rows(tmp_path / "gpu" / "fig01_batching.csv", [replace(row, **{**STAMPED, **wrong}) for row in decode_rows()])
    found = "\n".join(faults(tmp_path / "gpu", lambda commit, script: "s"))
    assert fault in found if fault else not found
    (tmp_path / "gpu" / "FROM.md").write_text("Ada <script>")
    assert "FROM.md: write who measured" in next(faults(tmp_path / "gpu"))


def test_reports_name_who_measured(tmp_path):
    write_rows(tmp_path / "fig01_batching.csv", decode_rows())
    (tmp_path / "FROM.md").write_text("Ada,\na machine\n")
    machine = machine_of(tmp_path, tmp_path, PAPER, "gpu")
    assert notes(machine)[0] == "Measured by others: Ada, a machine"
    assert "| gpu, by Ada, a machine |" in recorded({"gpu": machine})
    assert floors(machine.rows.assign(hardware="rtx-4090"), tmp_path / "fig01_batching.csv").empty, "no data sheet"
