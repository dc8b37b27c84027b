"""`workload=trace`: a file's requests in Figure 11, under loads on servers, beside a popularity; and refusals."""

from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from fakes import points_of, settled

from experiments.ext_servers import EXPERIMENT as SERVERS
from experiments.ext_traces import EXPERIMENT as TRACES
from experiments.fig08_lora_operator import EXPERIMENT as FIG08
from experiments.fig11_textgen import EXPERIMENT as FIG11
from experiments.fig11_textgen import sizes_of
from experiments.harness import ConfigError
from experiments.servers.stream import Stream
from experiments.systems.bench import StreamBench
from experiments.workload.arrivals import Span
from experiments.workload.traces import TRACE, Trace

BENCH = SimpleNamespace(world=SimpleNamespace(vocab_size=64, limits=None))


@pytest.fixture
def azure(tmp_path):
    lines = [f"{at},{prompt},5" for at, prompt in ((0, 10), (0, 11), (0, 12), (9, 13))]
    (tmp_path / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return "workload=trace", f"workload.path={tmp_path / 'azure.csv'}", "workload.format=azure", "workload.adapter=Zipf"


def test_figure_11_serves_the_requests_of_the_file(tmp_path, azure):
    cfg = settled(tmp_path, FIG11, "system=punica", "scale.requests=3", *azure)
    (point,) = FIG11.points(cfg)
    assert (point.panel, point.workload) == ("7B Model, trace azure by Zipf", TRACE)
    jobs = StreamBench(BENCH.world, sizes_of(cfg)[1], (1, 1)).jobs(TRACE)
    assert [(len(job.prompt), job.new_tokens) for job in jobs] == [(10, 5), (11, 5), (12, 5)]
    assert {job.adapter_id for job in jobs} == {1, 2}
    cfg.workload.adapter = "Distinct"
    assert FIG11.points(cfg)[0].settings["trace"] != point.settings["trace"]


REFUSED = {
    "workload.adapter=tenant": "no tenant .*workload.adapter=client, Distinct",
    "workload.path=/absent.csv": r"workload.path=/absent.csv cannot be read: .*No such file",
    "workload.format=azure": "no column TIMESTAMP",
    "workload.format=parquet": "workload.format=parquet must be 'lora', 'azure'",
    "workload.names=[Trace,Skewer]": "'Skewer', which is unknown",
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_trace_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path, given):
    with pytest.raises(ConfigError, match=REFUSED[given]):
        points_of(tmp_path, FIG11, "workload=trace", given)
    with pytest.raises(ConfigError, match="workload=trace is not read by fig08_lora_operator"):
        settled(tmp_path, FIG08, "workload=trace")
    assert settled(tmp_path, TRACES, "workload=zipf", "workload.format=azure").workload.format == "azure"
    with pytest.raises(ConfigError, match=r"workload.path is read with workload=trace alone"):
        settled(tmp_path, FIG11, "workload.path=/absent.csv")


def test_loads_on_servers_have_the_traces_adapters_lengths_and_bursts(tmp_path, azure):
    trace = Trace(tmp_path / "azure.csv", "azure", "Identical")
    stream = Stream(TRACE, ["a", "b"], 4, [9, 6], 64, 0, trace)
    sizes = [(job.model, len(job.prompt), job.new_tokens) for job in islice(stream.jobs(), 5)]
    assert sizes == [("a", size, 5) for size in (10, 11, 12, 13, 10)]
    span = Span(0.0, 1.0, 2.0, bursts=trace.arrivals)
    assert span.arrivals(2.0, 0) == pytest.approx([0, 0, 0, 1.5, 2, 2, 2])
    points = points_of(tmp_path, SERVERS, *azure)
    assert {point.panel for point in points if "trace" in point.settings} == {"4 in flight", "8 requests/s"}


def test_beside_a_trace_a_popularity_has_its_lengths_rate_and_number_of_adapters(tmp_path, azure):
    cfg = settled(tmp_path, TRACES, *azure[1:], "figure.max_len=40")
    cells = [(point.panel, point.workload) for point in TRACES.points(cfg)]
    assert cells == [("capacity", TRACE), *[(f"load {n} %", w) for w in (TRACE, "Zipf") for n in cfg.figure.loads]]
    (own, bursts), (others, poisson) = (TRACES._stream(cfg, BENCH, name) for name in (TRACE, "Zipf"))
    sizes = [Counter((len(job.prompt), job.new_tokens) for job in jobs) for jobs in (own, others)]
    assert sizes[0] == sizes[1] == Counter({(size, 5): 1 for size in (10, 11, 12, 13)})
    assert {job.adapter_id for job in others} <= {job.adapter_id for job in own} == {1, 2, 3}
    assert bursts.at(8.0).arrivals(8.0, 0)[:4] == pytest.approx([0, 0, 0, 0.375])
    assert len(poisson.arrivals(200.0, 0)) == pytest.approx(len(bursts.arrivals(200.0, 0)), rel=0.2)
