"""`workload=trace`: requests of a file in Figure 11 and under loads on a server, and what it refuses."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from fake_server import fake_server
from fakes import composed

from experiments.ext_prefix_cache import EXPERIMENT as PREFIX
from experiments.ext_servers import EXPERIMENT as SERVERS
from experiments.fig11_textgen import EXPERIMENT as FIG11
from experiments.fig11_textgen import sizes_of
from experiments.harness import ConfigError
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows
from experiments.servers.stream import TracedStream
from experiments.systems.bench import StreamBench
from experiments.workload.arrivals import Span
from experiments.workload.traces import SAMPLE, TRACE, Trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n},{10 + n},5\n" for n in (0, 0, 0, 9))


@pytest.fixture
def azure(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE)
    return "workload=trace", f"workload.path={tmp_path / 'azure.csv'}", "workload.format=azure", "workload.adapter=Zipf"


def test_figure_11_serves_the_requests_of_the_file(tmp_path, azure):
    cfg = settle(composed(tmp_path, "system=punica", "scale.requests=3", *azure, name=FIG11.name), FIG11)
    (point,) = FIG11.points(cfg)
    assert (point.panel, point.workload) == ("7B Model, trace azure by Zipf", TRACE)
    jobs = StreamBench(SimpleNamespace(vocab_size=64, limits=None), sizes_of(cfg)[1], (1, 1)).jobs(TRACE)
    assert [(len(job.prompt), job.new_tokens) for job in jobs] == [(10, 5)] * 3
    assert {job.adapter_id for job in jobs} == {1, 2}
    cfg.workload.adapter = "Distinct"
    (other,) = FIG11.points(cfg)
    assert other.settings["trace"] != point.settings["trace"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["workload.adapter=tenant"], r"no tenant .*client, session, Distinct"),
        (["workload.path=/absent.csv"], r"workload.path=/absent.csv cannot be read: .*No such file"),
        (["workload.format=azure"], r"line 2, column TIMESTAMP"),
        (["workload.format=parquet"], r"workload.format=parquet must be 'lora', 'azure'"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        FIG11.points(settle(composed(tmp_path, "workload=trace", *given, name=FIG11.name), FIG11))


def test_figures_of_popularities_refuse_a_trace(tmp_path):
    with pytest.raises(ConfigError, match="workload=trace is not read by ext_prefix_cache"):
        settle(composed(tmp_path, "workload=trace", name="ext_prefix_cache"), PREFIX)


def test_a_stream_for_servers_has_the_traces_adapters_lengths_and_bursts(tmp_path, azure):
    trace = Trace(tmp_path / "azure.csv", "azure", "Distinct")
    stream = TracedStream(TRACE, ["a", "b"], 4, [9, 6], 64, 0, trace=trace)
    names = [["a", "b"][adapter % 2] for adapter in trace.adapters]
    assert [job.model for job in islice(stream.jobs(), 5)] == [*names, names[0]]
    assert [(len(job.prompt), job.new_tokens) for job in islice(stream.jobs(), 5)] == [(10, 5)] * 3 + [(19, 5), (10, 5)]
    assert stream.arrivals(2.0, Span(0.0, 1.0, 2.0)) == pytest.approx([0, 0, 0, 1.5, 2, 2, 2])


@pytest.mark.slow
def test_a_server_is_loaded_by_a_trace(tmp_path, azure):
    with fake_server("right") as fake:
        given = [f"figure.url={fake.url}", "figure.requests=4", "figure.in_flight=[2]", "figure.seconds=0.3"]
        outcome = run(composed(tmp_path, *given, *azure[:3], "workload.adapter=Identical", name=SERVERS.name), SERVERS)
        sizes = {len(body["prompt"]) for body in fake.bodies}
    rows = read_rows(outcome.rows_file)
    assert outcome.failed == []
    assert {(row.workload, row.panel) for row in rows} == {(TRACE, "2 in flight"), (TRACE, "8 requests/s")}
    assert sizes == {10, 19}


def test_of_engines_a_trace_loads_servers_alone(tmp_path):
    cfg = settle(composed(tmp_path, "workload=trace", "figure.adapters=26", name=SERVERS.name), SERVERS)
    points = SERVERS.points(cfg)
    assert {point.panel for point in points if point.workload == TRACE} == {"4 in flight", "8 requests/s"}
    assert Trace(SAMPLE, "lora", "client", cfg.figure.requests).digest in [p.settings.get("trace") for p in points]
    assert np.unique(Trace(SAMPLE, "lora", "client").adapters).size == 26
