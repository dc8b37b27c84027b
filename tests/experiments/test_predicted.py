"""Recorded windows and loads, predicted from others, and what the report says of all predictions."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments.claims.predictions import predictions
from experiments.cluster import predicted
from experiments.cluster.predicted import (
    Window,
    first_token_readings,
    fitted_to,
    p99_first_token,
    predicted_half,
    read_loads,
    recorded_loads,
    windows_of,
    with_joins,
)
from experiments.cluster.served import HOUR, SHARE
from experiments.facts.paper import read_figure
from experiments.fig13_cluster import EXPERIMENT as FIG13
from experiments.harness.catalogue import experiments
from experiments.harness.counted import frame_of
from experiments.measure.records import Row, write_rows
from experiments.simulator import StepCost
from experiments.systems.stream import paper_stream
from experiments.workload.arrivals import Span
from punica.cluster import StepWork

PAPER = Path(__file__).parents[2] / "paper_results"
COST = StepCost("a cost", base=0.01, row=1e-5, kv=1e-7, prefill=1e-4, rank=1e-6)


def values(found) -> dict[str, float]:
    return {one.metric: one.value for one in found}


# windows


def window(repeat, context=600.0, cost=COST) -> Window:
    work = StepWork(32, 32 * context, 1.5, 512)
    return Window("Distinct", repeat, 33.5, 32.0, context, 512, cost.seconds(work))


def test_half_of_the_windows_tells_the_constant_that_predicts_the_other_half():
    elsewhere = replace(COST, base=0.5, name="from other figures")
    windows = [window(i, context=400 + 60 * i) for i in range(8)]
    assert fitted_to(windows, elsewhere).base == pytest.approx(COST.base)
    found = values(predicted_half(windows, elsewhere))
    assert (found["windows_fitted"], found["windows_predicted"]) == (4, 4)
    # a constant, the mean of the fitted half, is off by what the context makes
    assert found["largest_throughput_error"] < 1e-9 < 1e-4 < abs(found["largest_throughput_error_of_a_constant"])
    told = [one.seconds for one in windows]
    assert found["throughput_error_of_a_constant"] == pytest.approx(sum(told[1::2]) / sum(told[::2]) - 1)
    slow = [replace(one, seconds=one.seconds * (1.1 if one.repeat % 2 else 1.0)) for one in windows]
    assert values(predicted_half(slow, elsewhere))["throughput_error"] == pytest.approx(0.1)


def test_windows_are_read_from_rows_of_figure_11_without_disturbed_ones():
    lines = []
    for repeat in range(5):
        told = {"throughput": 350.0, "step_latency": 90.0, "tokens_per_step": 33.0, "mean_batch_size": 32.0}
        for metric, value in {**told, "mean_context": 640.0}.items():
            about = {"system": "punica", "workload": "Distinct", "panel": "7B Model", "rank": 16, "statistic": "value"}
            lines.append({**about, "repeat": repeat, "metric": metric, "value": value, "disturbed": repeat == 4})
    found = windows_of(pd.DataFrame(lines))
    assert [one.repeat for one in found] == [0, 1, 2, 3]
    assert found[0] == Window("Distinct", 0, 33.0, 32.0, 640.0, 512.0, 0.09)
    assert found[0].step.work.prefill_tokens == 1.0
    assert windows_of(pd.DataFrame(lines)[:15]) == []  # three are too few
    assert windows_of(pd.DataFrame(lines).assign(panel="7B Model, stated lengths")) == []


def test_fig13_is_measured_after_the_figures_that_it_predicts():
    names = [experiment.name for experiment in experiments()]
    told = {"fig01_batching", "fig10_layer", "fig11_textgen", "ext_breakdown", "ext_latency_under_load"}
    assert told <= set(names[: names.index(FIG13.name)])


# first tokens under load


FIGURE = {
    "requests": 64, "lengths": "stated", "max_len": 256, "warm": 1.0, "seconds": 20.0, "drain": 5.0, "least": 120.0,
    "longest": 30.0,
}  # fmt: skip
REQUESTS = 113
"""That arrive in the 24 measured seconds of 5 per second, by the settings' seed."""


def loads(folder: Path, p99: float, requests: int = REQUESTS, panels: tuple[str, ...] = ("load 60",)) -> None:
    """Rows of a machine that was loaded by the clock, and their configuration."""
    about = {"figure": "ext latency under load", "system": "punica", "workload": "Distinct", "model": "llama2-7b"}
    about |= {"hardware": "h200", "batch_size": 8, "seq_len": None, "rank": 16, "unit": "", "repeat": 0}
    near = {"offered_rate": 5.0, "load": 0.6, "time_to_first_token_p99": p99, "requests": requests}
    near |= {"decode_step": 4.0, "prefill_step": 9e9}
    far = {"offered_rate": 9.0, "load": 1.2, "time_to_first_token_p99": 9e9, "decode_step": 4.0, "prefill_step": 12.0}
    base = {"offered_rate": 1.0, "decode_step": 4.0, "prefill_step": 14.0}
    parts = [*((panel, near) for panel in panels), ("load 120", far), ("baseline capacity", base)]
    lines = [
        Row(**about, panel=panel, metric=name, value=value) for panel, part in parts for name, value in part.items()
    ]
    write_rows(folder / "h200" / "ext_latency_under_load.csv", lines)
    config = {"figure": FIGURE, "adapters": {"seed": 3}, "hardware": {"device": "cuda"}}
    (folder / "h200" / "ext_latency_under_load.json").write_text(json.dumps(config))


@pytest.fixture
def load(tmp_path):
    loads(tmp_path, p99=1.0)
    (found,) = recorded_loads(tmp_path)["h200", "llama2-7b"]  # beyond capacity the queue is as long as the run
    return found


def test_first_tokens_under_load_are_compared_below_capacity(tmp_path, load):
    first = values(first_token_readings(load, COST))
    assert first["p99_error"] == pytest.approx(first["p99_first_token"] - 1)
    for suffix, seconds in (("_low", load.joining[0]), ("_high", load.joining[-1])):
        wait = p99_first_token(load, with_joins(load, COST, seconds))
        assert first[f"p99_error{suffix}"] == pytest.approx(wait / load.p99 - 1)
    assert "p99_error_of_a_constant" not in first, "one load alone has no other"
    spread = values(first_token_readings(replace(load, others=(0.5, 1.5)), COST, seeds=3))
    assert spread["p99_error_of_a_constant"] == pytest.approx(1.0 / load.p99 - 1)
    assert spread["p99_first_token_low"] <= spread["p99_first_token"] <= spread["p99_first_token_high"]
    assert spread["p99_first_token_low"] < spread["p99_first_token_high"]
    assert spread["p99_first_token"] == first["p99_first_token"]


def test_a_constant_knows_loads_of_other_rates_alone(tmp_path):
    loads(tmp_path, p99=2000.0, panels=("load 60", "load 80"))
    assert [one.others for one in read_loads(tmp_path / "h200")["llama2-7b"]] == [(2.0,), (2.0,)]


def test_the_requests_of_a_load_arrive_again_as_the_driver_sent_them(monkeypatch, load):
    names = ("warm", "seconds", "drain", "least", "longest")
    for rate in (1.0, 3.0, 50.0):
        span, again = Span(**{name: FIGURE[name] for name in names}).at(rate), replace(load, rate=rate, repeat=2)
        assert np.array_equal(again.arrivals(), span.arrivals(rate, 3 + 2))
        assert np.array_equal(again.counts(again.arrivals()), span.counts(again.arrivals()))
    served = []
    monkeypatch.setattr(predicted, "simulate", lambda trace, *_, **__: served.append(trace) or SimpleNamespace(
        first_token_s=trace.arrivals + 1.0))  # fmt: skip
    assert p99_first_token(replace(load, workload="Skewed"), COST) == pytest.approx(1.0)
    jobs = itertools.cycle(paper_stream("Skewed", 64, 256, 100, "stated"))
    sent = [(len(job.prompt), job.new_tokens, job.adapter_id) for job, _ in zip(jobs, served[0].arrivals, strict=False)]
    again = zip(served[0].lengths.prompt, served[0].lengths.output, served[0].adapters, strict=True)
    assert sent == [tuple(map(int, one)) for one in again]


def test_first_tokens_wait_a_step_or_two_until_the_gpu_is_full(load):
    step = COST.seconds(StepWork(8, 8 * 130, 100, 128))
    light, heavy = (p99_first_token(replace(load, rate=rate), COST) for rate in (2.0, 400.0))
    assert COST.base < light < 4 * step
    assert heavy > 10 * light


# what the report says


def predicted_rows(share=0.70) -> pd.DataFrame:
    """The paper's hour as if a simulation had given it, with another share of full batches."""
    paper = read_figure(PAPER, "13")
    rows = paper.assign(panel=HOUR, system="punica", cost_model="a cost")
    rows.loc[rows["metric"] == SHARE, "value"] = share
    full = rows[rows["metric"] == SHARE]
    stricter = (f"{SHARE}_capped_seconds", "share_of_step_time_batch_ge_31")
    rows = pd.concat([rows, *(full.assign(metric=name, value=share - 0.1) for name in stricter)])
    stream = read_figure(PAPER, "11").query("metric == 'throughput' and system == 'Punica'")
    model = stream["model"].map({"7B": "llama2-7b", "13B": "llama2-13b"})
    stream = stream.assign(panel="simulated Figure 11", system="punica", model=model)
    errors = pd.DataFrame({"metric": ["throughput_error", "largest_throughput_error"], "value": [-0.06, 0.08]})
    errors = errors.assign(system="h200", model="7b", panel="simulated windows")
    parts = pd.concat([rows, stream, errors], ignore_index=True).assign(figure="13")
    named = {name: parts.get(name, "") for name in frame_of([]).columns}
    about = {"kind": "simulated", "statistic": "value", "scale": "laptop", "hardware": "cpu", "repeat": 0}
    return pd.DataFrame(named).assign(**about, disturbed=None)


def test_predictions_say_how_far_off_they_are_and_whether_that_was_asked():
    found = {one.what: one for one in predictions(predicted_rows(), PAPER)}
    (share,) = [one for what, one in found.items() if "as the paper's code counts" in what]
    assert (share.off, share.met) == ("-2.5 points", True)
    (steps,) = [one for what, one in found.items() if "(share of GPU time in steps)" in what]
    assert (steps.off, steps.asked, steps.met) == ("-12.5 points", "within 5 points", False)
    bar = found["Figure 11, 13B Skewed (token/s)"]
    assert (bar.off, bar.closer) == ("+0.0 %", False)  # nothing is closer than the published bar itself
    over_time = found["Figure 13, active GPUs over time (correlation)"]
    assert (over_time.met, over_time.guess) == (True, "the request rate 80 s before -0.006")
    windows, furthest = [one for what, one in found.items() if "windows" in what]
    assert (windows.off, windows.asked, windows.met) == ("-6.0 %", "within 5 %", False)
    assert (furthest.off, furthest.asked, furthest.met) == ("+8.0 %", "-", None)
    ends = predicted_rows().query("metric == 'total_tokens' and panel == @HOUR")
    ends = [ends.assign(metric=f"total_tokens_{end}", value=value) for end, value in (("low", 11.0), ("high", 22.0))]
    spans = {one.what: one.span for one in predictions(pd.concat([predicted_rows(), *ends]), PAPER)}
    assert spans["Figure 13, tokens (follow from the input)"] == " (11 to 22)"
    rows = predicted_rows()
    assert predictions(rows[rows["panel"] != HOUR], PAPER) == []
