"""The list of recorded sets against the experiments there are, and a run of it in several calls."""

import json
import shlex

import pytest
from fakes import composed

from experiments.commands import record_all
from experiments.commands.record_all import Options, Progress, RecordedSet, run_for, sets_of
from experiments.harness.catalogue import experiments
from experiments.harness.schema import ConfigError
from experiments.harness.settings import keys_read, refuse_unread
from punica.measure.records import RowsError

ON_A_CPU = {"fig13_cluster", "ext_placement", "ext_cluster_scale"}
OF_OTHERS = {"ext_server"}
"""Experiments that measure what somebody else runs."""
SETS = [RecordedSet("a", 1.0, rounds=1), RecordedSet("b", 2.0, rounds=2), RecordedSet("c", 3.0, rounds=2, gb=100.0)]


def scripts(hardware):
    return {one.run.split()[0] for one in sets_of(hardware)}


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
    words = one.command(hardware, 1, "figure.vllm_python=/python")[1:]
    (experiment,) = experiments([script])
    assert composed(tmp_path, *words, name=script).hardware.name == hardware
    refuse_unread(words, keys_read(experiment), script)


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="machine=h999 is unknown: choose machine=a100-40g"):
        sets_of("h999")


def test_a_set_says_what_a_machine_lacks():
    one = RecordedSet("x", 1.0, gb=100.0, gpus=2, needs="figure.vllm_python")
    assert one.missing("", [141.0, 141.0]) == "needs more='figure.vllm_python=...'"
    assert one.missing("figure.vllm_python=/p", [141.0]) == "needs 2 GPU(s) of 100 GB"
    assert one.missing("figure.vllm_python=/p", [141.0, 80.0]) == "needs 2 GPU(s) of 100 GB"
    assert one.missing("figure.vllm_python=/p", [141.0, 141.0]) == ""


def test_later_rounds_measure_further_repeats():
    one = RecordedSet("fig08_lora_operator scale=paper", 1.0)
    assert [one.command("h200", round_, "")[-1] for round_ in range(3)] == [f"scale.passes={n}" for n in (1, 2, 3)]
    assert RecordedSet("ext_operator_tables table=all", 1.0, rounds=1).command("h200", 0, "") == [
        "experiments.ext_operator_tables", "table=all",
    ]  # fmt: skip


def test_progress_is_kept_by_rounds_and_for_one_commit(tmp_path):
    path = tmp_path / "record_all.json"
    first = Progress(path, "abc")
    assert [(one.run, round_) for one, round_ in first.left(SETS)] == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1)]
    first.add(SETS[0], 0)
    first.add(SETS[1], 0)
    assert [(one.run, round_) for one, round_ in Progress(path, "abc").left(SETS)] == [("c", 0), ("b", 1), ("c", 1)]
    with pytest.raises(RowsError, match="is of commit abc, this is def"):
        Progress(path, "def")


def test_a_command_is_interrupted_at_the_limit():
    assert run_for(60.0, ["timeit", "-n1", "-r1", "pass"]) == 0
    assert run_for(60.0, ["timeit", "-n1", "-r1", "raise SystemExit(3)"]) == 1
    assert run_for(0.3, ["timeit", "-n1", "-r1", "import time; time.sleep(60)"]) is None


def test_calls_continue_and_failures_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record_all, "REPOSITORY", tmp_path)
    monkeypatch.setattr(record_all, "sets_of", lambda hardware: SETS)
    monkeypatch.setattr(record_all, "commit", lambda: "abc")
    monkeypatch.setattr(record_all, "gpu_memory", lambda: [80.0])
    ran, now, broken = [], [0.0], {"b"}
    monkeypatch.setattr(record_all.time, "monotonic", lambda: now[0])

    def fake_run(seconds, words):
        ran.append(shlex.join(words))
        now[0] += 60.0
        return 1 if words[0] == "experiments.b" and broken else 0

    monkeypatch.setattr(record_all, "run_for", fake_run)

    def call(limit):
        record_all.record_all(Options(machine="h200", limit=limit))

    def told():
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    call(1.0)
    assert ran == ["experiments.a hardware=h200"]
    assert told()["left"] == 2  # both rounds of b; c needs a larger GPU
    with pytest.raises(SystemExit):
        call(1.0)
    answer = told()
    assert answer["failed"] == ["round 1: b"]
    assert answer["not_on_this_machine"] == {"c": "needs 1 GPU(s) of 100 GB"}
    broken.clear()
    call(9.0)
    assert ran[2:] == [f"experiments.b hardware=h200 scale.passes={n}" for n in (1, 2)]
    assert told()["left"] == 0


def test_uncommitted_code_is_refused(monkeypatch):
    monkeypatch.setattr(record_all, "commit", lambda: "abc-dirty")
    with pytest.raises(RowsError, match="the tree is of abc-dirty: commit"):
        record_all.record_all(Options(machine="cpu"))
