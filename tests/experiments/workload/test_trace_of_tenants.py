"""Requests drawn from ServeGen's clients: laws, rates and lengths of a made-up pool, and the committed sample."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from experiments.commands.trace import COLUMNS, Client, Options, clients, trace
from experiments.harness.schema import ConfigError
from experiments.workload.traces import SAMPLE, Trace

EARLY, LATE = {"input_tokens": "{5: 0.5, 9: 0.5}", "output_tokens": "{0: 1.0}"}, {"input_tokens": "{7: 2.0}"}
EMPTY = {"input_tokens": "{}", "output_tokens": "{}"}


@pytest.fixture
def servegen(tmp_path):
    folder = tmp_path / "data" / "pool"
    folder.mkdir(parents=True)
    windows = {"2": "0,2,1,Gamma,0.5,9", "10": "0,1,1,Gamma,1,9\n600,3,1,Weibull,0.5,9", "11": "0,0,0,,0,0"}
    for name, lines in windows.items():
        (folder / f"chunk-{name}-trace.csv").write_text(lines)
        data = {"0": EARLY, "300": EMPTY, "600": EARLY | LATE}
        (folder / f"chunk-{name}-dataset.json").write_text(json.dumps(data))
    return tmp_path


def test_the_window_and_the_lengths_are_the_last_until_the_start(servegen):
    early, late = (list(clients(servegen / "data" / "pool", start)) for start in (599, 600))
    assert [(one.name, one.rate, one.law, one.shape) for one in early] == [
        ("2", 2, "Gamma", 0.5),
        ("10", 1, "Gamma", 1),
    ]
    assert early[0].lengths == [{5: 0.5, 9: 0.5}, {0: 1.0}]
    assert [late[1].rate, late[1].law, late[1].lengths[0]] == [3, "Weibull", {7: 2.0}]


@pytest.mark.parametrize(
    ("law", "shape", "variation"),
    [("Gamma", 0.25, 2.0), ("Gamma", 4.0, 0.5), ("Weibull", 1.0, 1.0), ("Weibull", 0.5, 5**0.5)],
)
def test_gaps_have_the_clients_rate_and_the_fitted_variation(law, shape, variation):
    client = Client("a", 20.0, law, shape, [{5: 1.0, 9: 3.0}, {0: 1.0}])
    found = list(client.requests(1000.0, np.random.default_rng(0)))
    gaps = np.diff([at for at, *_ in found])
    assert found[0][0] >= 0
    assert found[-1][0] < 1000
    assert len(found) == pytest.approx(20_000, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06)
    assert Counter(prompt for *_, prompt, _ in found)[9] / len(found) == pytest.approx(0.75, abs=0.02)
    assert {output for *_, output in found} == {1}  # none is empty


def test_one_command_writes_the_trace_and_its_description(servegen, tmp_path):
    options = Options(servegen=servegen, pool="pool", start=600, requests=400, out=tmp_path / "own.csv")
    trace(options)
    about, text = json.loads((tmp_path / "own.json").read_text()), (tmp_path / "own.csv").read_bytes()
    trace(options)
    assert (tmp_path / "own.csv").read_bytes() == text
    assert (about["sha256"], about["rows"], about["tenants"]) == (hashlib.sha256(text).hexdigest(), 400, 2)
    own = Trace(tmp_path / "own.csv", "lora", "client")
    assert np.bincount(own.adapters).max() / 400 == pytest.approx(0.6, abs=0.15)
    assert own.requests[-1].arrival == pytest.approx(400 / 5, rel=0.4)


@pytest.mark.parametrize("line", ["0,1,1,Pareto,1,1", "0,1,1,Gamma,0,1", "0,1,1,Gamma", "0,-1,1,Weibull,1,1"])
def test_a_file_of_another_format_is_refused(servegen, line):
    (servegen / "data" / "pool" / "chunk-11-trace.csv").write_text(f"0,0,0,,0,0\n{line}")
    with pytest.raises(ConfigError, match=r"chunk-11-trace.csv, line 2"):
        trace(Options(servegen=servegen, pool="pool"))


def test_a_pool_that_is_not_there_is_refused(servegen):
    with pytest.raises(ConfigError, match=r"no client"):
        trace(Options(servegen=servegen, pool="absent"))


def test_the_committed_sample_is_the_one_that_its_description_names():
    about, sample = json.loads(SAMPLE.with_suffix(".json").read_text()), Trace(SAMPLE, "lora", "client")
    assert hashlib.sha256(SAMPLE.read_bytes()).hexdigest() == about["sha256"]
    assert (len(sample.requests), sample.adapters.max() + 1) == (about["rows"], about["tenants"]) == (1000, 26)
    assert SAMPLE.read_text().partition("\n")[0].split(",") == [*about["columns"]] == [*COLUMNS]
