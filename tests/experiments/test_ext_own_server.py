"""Our server beside its engine: the same texts from both or no rows, rates of one repeat, one process at a time."""

import os
from types import SimpleNamespace

import pytest
from fakes import composed

from experiments import ext_own_server
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError
from experiments.harness.settings import settle
from experiments.http_load.client import Answer, Job
from experiments.http_load.loops import Run
from experiments.measure.records import read_rows
from experiments.own_server import bench as bench_module
from experiments.own_server import process
from experiments.own_server.stream import Stream
from experiments.own_server.worker import saturated, texts
from experiments.workload.arrivals import Span

OWN = next(iter(experiments(["ext_own_server"])))
STREAM = Stream("Zipf", 6, [9, 6], 64, ["a", "b", "c", "d"], 0)


def values(outcome, system: str, panel: str) -> dict[str, float]:
    rows = [row for row in read_rows(outcome.rows_file) if (row.system, row.panel) == (system, panel)]
    return {row.metric: row.value for row in rows if row.statistic in ("value", "median", "count")}


@pytest.mark.slow
def test_server_and_engine_are_measured_in_processes_of_their_own(tmp_path) -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
    outcome = run(composed(tmp_path, "draw=true", name=OWN.name), OWN)
    assert (outcome.measured, outcome.failed) == (3, [])
    engine, server = (values(outcome, name, "6 in flight") for name in ("punica_engine", "punica_server"))
    loaded = values(outcome, "punica_server", "load 80 %")
    assert engine["output_throughput"] > 0
    assert server["throughput_over_engine"] == pytest.approx(server["output_throughput"] / engine["output_throughput"])
    assert loaded["offered_rate"] == pytest.approx(0.8 * server["request_rate"])
    assert server["errors"] == loaded["errors"] == 0
    assert loaded["time_to_first_token"] > 0
    assert outcome.figures == []


# the order, and whose rates


class FakeBench:
    """Numbers in place of processes; `calls` in their order."""

    calls: list[str]

    def __init__(self, *_: object) -> None:
        self.names = ["a", "b", "c", "d", "e", "f"]

    def engine(self, stream: Stream) -> dict[str, float]:
        self.calls.append(f"engine {stream.seed}")
        return {"output_throughput": 100.0 * (1 + stream.seed), "request_rate": 9.0}

    def saturated(self, stream: Stream) -> Run:
        self.calls.append(f"server {stream.seed}")
        return self._run(stream)

    def loaded(self, stream: Stream, rate: float) -> Run:
        self.calls.append(f"load {stream.seed} {rate:g}")
        return self._run(stream)

    def close(self) -> None:
        self.calls.append("close")

    def _run(self, stream: Stream) -> Run:
        """Five answers of eight tokens in two seconds."""
        job = Job("a", [1], 8)
        answers = [Answer(0.1, job, [0.5, 1.0], 8, 1, 1.0, "") for _ in range(5)]
        return Run(Span(0.0, 2.0, 1.0), answers, [0.0] * 10)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    FakeBench.calls = []
    monkeypatch.setattr(bench_module, "OwnBench", FakeBench)
    return FakeBench.calls


def test_each_repeat_compares_with_its_own_engine_and_loads_by_its_own_rate(tmp_path, calls) -> None:
    outcome = run(composed(tmp_path, "scale.passes=2", name=OWN.name), OWN)
    assert outcome.failed == []
    assert calls == ["engine 0", "server 0", "load 0 2", "engine 1", "server 1", "load 1 2", "close"]
    rows = [row for row in read_rows(outcome.rows_file) if row.metric == "throughput_over_engine"]
    assert [(row.repeat, row.value) for row in rows] == [(0, 0.2), (1, 0.1)]


def test_what_a_point_needs_is_measured_where_it_was_not_asked_for(tmp_path, calls) -> None:
    outcome = run(composed(tmp_path, "system=punica_server", name=OWN.name), OWN)
    assert calls == ["engine 0", "server 0", "load 0 2", "close"]
    assert values(outcome, "punica_server", "6 in flight")["throughput_over_engine"] == 0.2


# the engine alone


def test_the_engine_keeps_its_requests_in_flight_and_counts_what_it_generates() -> None:
    added, steps = [], []

    class Engine:
        def add_request(self, request) -> None:
            added.append(request)

        def step(self) -> SimpleNamespace:
            unfinished = len(added) - 2 * len(steps)
            assert unfinished == 4
            steps.append(True)
            tokens = {request.request_id: 1 for request in added[-4:]}
            return SimpleNamespace(tokens=tokens, finished=added[:2], failed=())

    found = saturated(Engine(), {"a": None}, STREAM.jobs(), 4, 0.0, 0.05)
    assert found["output_throughput"] == pytest.approx(2 * found["request_rate"])
    assert 0 < found["request_rate"] <= 2 * len(steps) / 0.05
    names = [request.request_id for request in added]
    assert len(set(names)) == len(names)
    failed = SimpleNamespace(tokens={}, finished=(), failed=[SimpleNamespace(error="NaN")])
    broken = SimpleNamespace(add_request=added.append, step=lambda: failed)
    with pytest.raises(RuntimeError, match="a request failed: NaN"):
        saturated(broken, {}, STREAM.jobs(), 1, 0.0, 0.05)


def test_texts_are_those_of_requests_alone_with_their_adapters() -> None:
    def generate(prompts, adapter, params):
        assert (len(prompts), params.ignore_eos, params.max_new_tokens) == (1, True, 3)
        return [SimpleNamespace(text=f"{adapter} {prompts[0]}")]

    jobs = [Job("a", [1], 3), Job("base", [2], 3)]
    assert texts(SimpleNamespace(generate=generate), {"a": "A"}, jobs) == ["A [1]", "None [2]"]


def test_the_stream_has_new_prompts_and_the_same_lengths_and_adapters_again() -> None:
    jobs = STREAM.jobs()
    first, second = ([next(jobs) for _ in range(6)] for _ in range(2))
    assert [(job.model, len(job.prompt), job.new_tokens) for job in first] == [
        (job.model, len(job.prompt), job.new_tokens) for job in second
    ]
    assert [job.prompt for job in first] != [job.prompt for job in second]
    assert {job.model for job in first} == set(STREAM.adapters)


# the check, and processes


def bench_of(texts: list[str], server_says: str, monkeypatch) -> bench_module.OwnBench:
    """A bench without folders, whose server has one answer for all."""
    bench = object.__new__(bench_module.OwnBench)
    bench._check, bench._texts, bench._server = [Job("a", [1], 2), Job("base", [1], 2)], texts, None
    bench._arguments, bench._environment = [], {}
    monkeypatch.setattr(bench_module, "OwnServer", lambda *_: SimpleNamespace(url="http://x", close=lambda: None))
    answer = SimpleNamespace(status_code=200, json=lambda: {"choices": [{"text": server_says}]})
    monkeypatch.setattr(bench_module.httpx2, "post", lambda *_, **__: answer)
    return bench


def test_a_server_with_other_texts_than_its_engine_has_no_rows(tmp_path, monkeypatch) -> None:
    bench = bench_of(["w1 w2", "w1 w3"], "w1 w2", monkeypatch)
    bench._path = tmp_path
    with pytest.raises(CheckFailed, match="says 'w1 w2' as base, its engine alone 'w1 w3'"):
        bench._url()
    assert bench._server is None, "it is ended"


def test_adapters_that_change_nothing_are_refused(tmp_path, monkeypatch) -> None:
    bench = bench_of([], "", monkeypatch)
    bench._path, bench._sizes = tmp_path, {"in_flight": 1, "warm": 0, "seconds": 1}
    monkeypatch.setattr(
        bench_module, "run_module", lambda *_: (tmp_path / "found.json").write_text('{"texts": ["same", "same"]}')
    )
    with pytest.raises(CheckFailed, match="adapters change the text of 0 of 1 requests"):
        bench.engine(None)


def test_a_process_that_fails_says_what_it_said_last(tmp_path) -> None:
    with pytest.raises(CheckFailed, match=r"exit code 1, and said last:\n.*No module named punica.nothing"):
        process.run_module("punica.nothing", [], os.environ, tmp_path / "log")


# what is refused


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("figure.in_flight=2", "figure.in_flight=2 must be at least figure.batch_size=3"),
        ("figure.load=100", "figure.load=100 must be in"), ("figure.seconds=0", "figure.seconds=0.* above 0"),
        ("figure.warm=-1", "figure.warm=-1"), ("figure.adapters=3", "figure.adapters=3 must be at least 4"),
        ("figure.lengths=[4000,9]", "above the positions of llama-tiny"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path, override, words) -> None:
    with pytest.raises(ConfigError, match=words):
        OWN.points(settle(composed(tmp_path, override, name=OWN.name), OWN))


def test_what_cannot_be_measured_here_is_said(tmp_path, monkeypatch, capsys) -> None:
    assert OWN.points(settle(composed(tmp_path, "scale=laptop", name=OWN.name), OWN)) == []
    assert "scale=smoke tries the code" in capsys.readouterr().err
    monkeypatch.setattr(ext_own_server, "PACKAGES", ("fastapi", "no_such_package"))
    assert OWN.points(settle(composed(tmp_path, name=OWN.name), OWN)) == []
    assert "no_such_package missing: pip install 'punica[serve]'" in capsys.readouterr().err
