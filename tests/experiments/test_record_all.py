"""The list of recorded sets against the experiments there are, and a run of it in several calls."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import composed

from experiments.commands import record_all
from experiments.commands.record_all import Ended, Options, Progress, is_whole
from experiments.harness.catalogue import experiments
from experiments.harness.recording import RecordedSet, sets_of
from experiments.harness.schema import ConfigError
from experiments.harness.settings import keys_read, refuse_unread
from experiments.measure.records import Row, RowsError, write_rows

ON_A_CPU = {"fig13_cluster", "ext_placement", "ext_cluster_scale"}
OF_OTHERS = {"ext_server"}
"""Experiments that measure what somebody else runs."""
SETS = [RecordedSet("a", 1.0, rounds=1), RecordedSet("b", 2.0, rounds=2), RecordedSet("c", 3.0, rounds=2, gb=100.0)]


def scripts(hardware):
    return {one.run.split()[0] for one in sets_of(hardware)}


def names(left):
    return [(one.run, round_) for one, round_ in left]


def a_row():
    names = {"figure": "8", "panel": "", "system": "SGMV", "workload": "", "model": "", "hardware": "h200"}
    sizes = {"batch_size": 1, "seq_len": None, "rank": 16}
    return Row(**names, **sizes, metric="latency", value=1.0, unit="us", statistic="median", config_hash="c")


def test_every_experiment_is_in_a_set():
    known = {experiment.name for experiment in experiments()}
    assert known - OF_OTHERS == (known & scripts("h200")) | ON_A_CPU
    assert scripts("cpu") >= ON_A_CPU
    assert {name for name in scripts("h200") if not name.endswith("_tables")} <= known
    assert sets_of("h100") == sets_of("h200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "one"),
    [(name, one) for name in ("cpu", "h200") for one in sets_of(name)],
    ids=lambda one: str(one)[:50],
)
def test_every_set_composes_and_its_words_are_read(hardware, one, tmp_path):
    script = one.run.split()[0]
    if script.startswith("commands.") or script.endswith("_tables"):
        pytest.skip("no figure")
    words = one.command(hardware, 1, "/python")[1:]
    (experiment,) = experiments([script])
    assert composed(tmp_path, *words, name=script).hardware.name == hardware
    refuse_unread(words, keys_read(experiment), script)


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="machine=h999 is unknown: choose machine=a100-40g"):
        sets_of("h999")


def test_a_set_says_what_a_machine_lacks():
    one = RecordedSet("x", 1.0, gb=100.0, gpus=2, vllm=True)
    assert one.missing(None, [141.0, 141.0]).startswith("needs vllm_python=")
    assert one.missing("/p", [141.0]) == "needs 2 GPU(s) of 100 GB"
    assert one.missing("/p", [141.0, 80.0]) == "needs 2 GPU(s) of 100 GB"
    assert one.missing("/p", [141.0, 141.0]) == ""


def test_later_rounds_measure_further_repeats():
    one = RecordedSet("fig08_lora_operator scale=paper", 1.0)
    assert [one.command("h200", round_, None)[-1] for round_ in range(3)] == [f"scale.passes={n}" for n in (1, 2, 3)]
    assert RecordedSet("ext_operator_tables table=all", 1.0, rounds=1).command("h200", 0, None) == [
        "experiments.ext_operator_tables", "table=all",
    ]  # fmt: skip


def test_progress_is_kept_by_rounds_and_for_one_commit(tmp_path):
    path = tmp_path / "record_all.json"
    first = Progress(path, "abc")
    assert names(first.left(SETS)) == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1)]
    first.add(SETS[0], 0, whole=True)
    first.add(SETS[1], 0, whole=False)
    assert names(Progress(path, "abc").left(SETS)) == [("c", 0), ("b", 1), ("c", 1), ("b", 0)], "stopped ones last"
    other = Progress(path, "def")
    assert len(other.left(SETS)) == 5
    with pytest.raises(RowsError, match="holds work of commit abc, this is def"):
        other.refuse_others()


def test_sets_that_decide_claims_are_repeated_before_the_others():
    sets = [RecordedSet("a", 1.0, rounds=1), RecordedSet("b", 1.0, claims="C01", rounds=2)]
    assert names(Progress(Path("none"), "abc").left(sets)) == [("b", 0), ("b", 1), ("a", 0)]


def test_rows_of_another_commit_are_refused_without_progress(tmp_path):
    write_rows(tmp_path / "rows" / "fig.csv", [replace(a_row(), commit="abc")])
    Progress(tmp_path / "record_all.json", "abc").refuse_others()
    with pytest.raises(RowsError, match="holds work of commit abc, this is def"):
        Progress(tmp_path / "record_all.json", "def").refuse_others()


@pytest.mark.parametrize(
    ("facts", "whole"),
    [
        ({}, True), ({"points": 3, "left_out": 0}, True), ({"points": 0, "left_out": 0}, False),
        ({"points": 3, "left_out": 1}, False), ({"left_out": {"fig08": 2}}, False), ({"left_out": {}}, True),
    ],
)  # fmt: skip
def test_a_set_is_done_when_it_had_points_and_left_none_out(facts, whole):
    assert is_whole(facts) == whole


class FakeProcesses:
    """Sets that take their minutes on a fake clock; `answers`: status and facts by script, None while it never ends."""

    def __init__(self, places, now, answers, ran):
        self.free, self._now, self._answers, self._ran, self._running = list(range(places)), now, answers, ran, {}

    @property
    def running(self):
        return [*self._running]

    def start(self, key, words, gpus):
        self._ran.append((key[0].script, words[-1], [one.script for one, _ in self._running]))
        self._running[key] = (self._now[0] + 60.0, [self.free.pop(0) for _ in range(gpus)])

    def ended(self):
        for key in [key for key, (ends, _) in self._running.items() if ends <= self._now[0]]:
            yield self._end(key, *self._answers.get(key[0].script, (0, {})))

    def interrupt(self):
        yield from self.ended()
        for key in [*self._running]:
            yield self._end(key, None, {})

    def _end(self, key, status, facts):
        self.free += self._running.pop(key)[1]
        return Ended(key, status, facts)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A machine of GPUs of 80 GB where a set takes a minute of a fake clock."""
    monkeypatch.setattr(record_all, "REPOSITORY", tmp_path)
    monkeypatch.setattr(record_all, "sets_of", lambda machine: SETS)
    monkeypatch.setattr(record_all, "commit", lambda: "abc")
    ran, now, answers, memory = [], [0.0], {}, [80.0]
    monkeypatch.setattr(record_all, "gpu_memory", lambda machine: memory)
    monkeypatch.setattr(record_all, "Processes", lambda places, logs: FakeProcesses(places, now, answers, ran))
    monkeypatch.setattr(record_all.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(record_all.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 30.0))
    return ran, answers, memory


def call(capsys, limit):
    """Call it; return its last line."""
    with suppress(SystemExit):
        record_all.record_all(Options(machine="h200", limit=limit))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_calls_continue_and_failures_are_told(world, capsys):
    ran, answers, _ = world
    answers["b"] = 1, {}
    assert call(capsys, 1.0)["left"] == 2  # both rounds of b; c needs a larger GPU
    assert [name for name, *_ in ran] == ["a"]
    told = call(capsys, 2.0)
    assert told["failed"] == ["round 1: b"]
    assert told["not_on_this_machine"] == {"c": "needs 1 GPU(s) of 100 GB"}
    del answers["b"]
    assert call(capsys, 9.0)["left"] == 0
    assert ran[-2:] == [("b", f"scale.passes={n}", []) for n in (1, 2)]


@pytest.mark.parametrize("answer", [(None, {}), (0, {"points": 2, "left_out": 1}), (0, {"points": 0})])
def test_a_set_that_never_ends_stops_no_other(world, capsys, answer):
    ran, answers, _ = world
    answers["a"] = answer
    assert call(capsys, 1.0)["left"] == 3
    assert call(capsys, 5.0)["left"] == 1
    assert [name for name, *_ in ran] == ["a", "b", "b", "a"]


def test_as_many_sets_as_gpus_are_measured_at_once_and_two_rounds_of_one_are_not(world, capsys):
    ran, _, memory = world
    memory.append(80.0)
    assert call(capsys, 9.0)["left"] == 0
    assert [(name, beside) for name, _, beside in ran] == [("a", []), ("b", ["a"]), ("b", [])]


def test_a_set_of_several_gpus_is_waited_for(world, capsys, monkeypatch):
    ran, _, memory = world
    memory.append(80.0)
    sets = [RecordedSet("a", 1.0, rounds=1), RecordedSet("d", 1.0, rounds=1, gpus=2), RecordedSet("e", 1.0, rounds=1)]
    monkeypatch.setattr(record_all, "sets_of", lambda machine: sets)
    assert call(capsys, 9.0)["left"] == 0
    assert [(name, beside) for name, _, beside in ran] == [("a", []), ("d", []), ("e", [])]


def test_uncommitted_code_is_refused(monkeypatch):
    monkeypatch.setattr(record_all, "commit", lambda: "abc-dirty")
    with pytest.raises(RowsError, match="the tree is of abc-dirty: commit"):
        record_all.record_all(Options(machine="cpu"))
