"""Requests from ServeGen's clients: windows, laws, rates and lengths of a made-up pool; the committed sample."""

import hashlib
import json

import numpy as np
import pytest

from experiments.commands.trace import COLUMNS, Options, clients, drawn, trace
from experiments.harness.schema import ConfigError
from experiments.workload.traces import SAMPLE, Trace

EARLY = {"input_tokens": "{5: 0.5, 9: 0.5}", "output_tokens": "{0: 1.0}"}
PARTS = {"0": EARLY, "300": {"input_tokens": "{}", "output_tokens": "{}"}, "600": EARLY | {"input_tokens": "{7: 2.0}"}}


@pytest.fixture
def servegen(tmp_path):
    (folder := tmp_path / "data" / "pool").mkdir(parents=True)
    windows = {"2": "0,2,1,Gamma,0.5,9", "10": "0,1,1,Gamma,1,9\n600,3,1,Weibull,0.5,9", "11": "0,0,0,,0,0"}
    for name, lines in windows.items():
        (folder / f"chunk-{name}-trace.csv").write_text(lines)
        (folder / f"chunk-{name}-dataset.json").write_text(json.dumps(PARTS))
    return tmp_path


def test_window_and_lengths_are_the_last_until_the_start(servegen):
    early, late = (list(clients(servegen / "data" / "pool", start)) for start in (599, 600))
    lengths = [{5: 0.5, 9: 0.5}, {0: 1.0}]
    assert early == [("2", 2, "Gamma", 0.5, lengths), ("10", 1, "Gamma", 1, lengths)]
    assert late[1] == ("10", 3, "Weibull", 0.5, [{7: 2.0}, {0: 1.0}])


LAWS = [("Gamma", 0.25, 2.0), ("Gamma", 4.0, 0.5), ("Weibull", 1.0, 1.0), ("Weibull", 0.5, 5**0.5)]


@pytest.mark.parametrize(("law", "shape", "variation"), LAWS)
def test_gaps_have_the_rate_and_the_fitted_variation(law, shape, variation):
    found = list(drawn(("a", 20.0, law, shape, [{5: 1.0, 9: 3.0}, {0: 1.0}]), 1000.0, np.random.default_rng(0)))
    times, _, prompts, outputs = map(np.array, zip(*found, strict=True))
    assert len(found) == pytest.approx(20_000, rel=0.06)
    assert np.diff(times).std() / np.diff(times).mean() == pytest.approx(variation, rel=0.06)
    assert (times.min() >= 0, times.max() < 1000, set(outputs)) == (True, True, {1})  # none is empty
    assert (prompts == 9).mean() == pytest.approx(0.75, abs=0.02)


def test_one_command_writes_the_trace_and_its_description(servegen, tmp_path):
    options = Options(servegen=servegen, pool="pool", start=600, requests=400, out=tmp_path / "own.csv")
    for _ in range(2):
        trace(options)
        about, text = json.loads((tmp_path / "own.json").read_text()), (tmp_path / "own.csv").read_bytes()
        found = (about["sha256"], about["rows"], about["tenants"])
        assert found == (hashlib.sha256(text).hexdigest(), 400, 2)
    own = Trace(tmp_path / "own.csv", "lora", "client")
    assert np.bincount(own.adapters).max() / 400 == pytest.approx(0.6, abs=0.15)
    assert own.requests[-1].arrival == pytest.approx(400 / 5, rel=0.4)


@pytest.mark.parametrize("line", ["0,1,1,Pareto,1,1", "0,1,1,Gamma,0,1", "0,1,1,Gamma", "0,-1,1,Weibull,1,1"])
def test_what_is_no_pool_is_refused(servegen, line):
    (servegen / "data" / "pool" / "chunk-11-trace.csv").write_text(f"0,0,0,,0,0\n{line}")
    for pool, words in (("pool", "chunk-11-trace.csv, line 2"), ("absent", "no client")):
        with pytest.raises(ConfigError, match=words):
            trace(Options(servegen=servegen, pool=pool))


@pytest.mark.parametrize("text", [None, "{", '{"0": {}}', '{"0": {"input_tokens": "{1", "output_tokens": "{}"}}'])
def test_lengths_that_cannot_be_read_are_refused(servegen, text):
    path = servegen / "data" / "pool" / "chunk-2-dataset.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=r"chunk-2-dataset.json cannot be read"):
        trace(Options(servegen=servegen, pool="pool", out=servegen / "own.csv"))


def test_the_committed_sample_is_the_one_that_its_description_names():
    about, sample = json.loads(SAMPLE.with_suffix(".json").read_text()), Trace(SAMPLE, "lora", "client")
    assert hashlib.sha256(SAMPLE.read_bytes()).hexdigest() == about["sha256"]
    assert (len(sample.requests), sample.adapters.max() + 1) == (about["rows"], about["tenants"]) == (1000, 26)
    assert SAMPLE.read_text().partition("\n")[0].split(",") == [*about["columns"]] == [*COLUMNS]
