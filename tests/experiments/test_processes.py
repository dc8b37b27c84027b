"""Commands at once: their GPUs and cores, their last lines, and their end."""

import json
import os
import time

import pytest

from experiments.commands.record_all import VISIBLE, Processes

SEEN = "import json, os; print(json.dumps([os.environ.get('CUDA_VISIBLE_DEVICES'), sorted(os.sched_getaffinity(0))]))"


def once(code):
    """Words that run `code` as a module's command does; timeit prints a line of its own behind it."""
    return ["timeit", "-n1", "-r1", code]


def wait_for(processes):
    found = []
    while processes.running:
        found += processes.ended()
        time.sleep(0.02)
    return {one.key: one for one in found}


def seen(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith("[")]


def test_alone_a_command_has_the_machine_as_it_is(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    processes = Processes(1, tmp_path)
    processes.start("a", once(SEEN), 1)
    assert processes.free == []
    assert wait_for(processes)["a"].status == 0
    assert seen(capfd.readouterr().out) == [[None, sorted(os.sched_getaffinity(0))]]
    assert processes.free == [0]
    assert not [*tmp_path.iterdir()]


def test_each_has_gpus_and_cores_of_its_own_and_a_log(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv(VISIBLE, "3,5,7")
    cores = sorted(os.sched_getaffinity(0))
    processes = Processes(3, tmp_path)
    processes.start("a", once(f"{SEEN}; import sys; print(1, file=sys.stderr)"), 1)
    processes.start("b", once(SEEN), 2)
    assert processes.free == []
    assert {name: one.status for name, one in wait_for(processes).items()} == {"a": 0, "b": 0}
    out, errors = capfd.readouterr()
    assert f"on GPU 1, 2, progress in {tmp_path / 'record_all_gpu1.log'}" in errors
    devices = [device for device, _ in seen(out)]
    assert sorted(devices) == ["3", "5,7"]
    assert processes.free == [0, 1, 2]
    assert (tmp_path / "record_all_gpu0.log").read_text() == "1\n"
    assert sorted(os.sched_getaffinity(0)) == cores, "this process keeps its own"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_cores_are_shared_out(tmp_path, capfd):
    processes = Processes(2, tmp_path)
    for name in ("a", "b"):
        processes.start(name, once(SEEN), 1)
    wait_for(processes)
    first, second = (set(cores) for _, cores in seen(capfd.readouterr().out))
    assert len(first) == len(second) == len(os.sched_getaffinity(0)) // 2
    assert not first & second


def test_facts_are_the_last_line_and_an_interrupted_command_has_no_status(tmp_path):
    told = 'print(chr(123) + chr(34) + "points" + chr(34) + ":0}")'
    processes = Processes(1, tmp_path)
    processes.start("told", once(f"{told}; raise SystemExit(3)"), 1)
    (one,) = wait_for(processes).values()
    assert (one.status, one.facts) == (1, {"points": 0})
    processes.start("slow", once("import time; time.sleep(60)"), 1)
    (stopped,) = processes.interrupt()
    assert (stopped.key, stopped.status, stopped.facts, processes.free) == ("slow", None, {}, [0])
