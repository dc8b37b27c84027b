"""What the report says of predictions."""

import pandas as pd
from fakes import PAPER

from experiments.claims.predictions import predictions
from experiments.cluster.served import HOUR, SHARE
from experiments.facts.paper import read_figure
from experiments.harness.counted import frame_of


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
    parts = pd.concat([rows, stream], ignore_index=True).assign(figure="13")
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
    ends = predicted_rows().query("metric == 'total_tokens' and panel == @HOUR")
    ends = [ends.assign(metric=f"total_tokens_{end}", value=value) for end, value in (("low", 11.0), ("high", 22.0))]
    spans = {one.what: one.span for one in predictions(pd.concat([predicted_rows(), *ends]), PAPER)}
    assert spans["Figure 13, tokens (follow from the input)"] == " (11 to 22)"
    rows = predicted_rows()
    assert predictions(rows[rows["panel"] != HOUR], PAPER) == []
