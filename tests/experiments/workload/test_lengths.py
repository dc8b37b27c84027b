"""Request lengths and the batches that they form, against the paper's code to the digit; lengths of another scale."""

import csv

import numpy as np
import pytest
from fakes import PAPER

from experiments.claims.text import ONE_ADAPTER, mean_batch, replay, share
from experiments.workload import released_lengths, scaled_lengths, stated_lengths

QUANTITIES = {
    "prompt_tokens": lambda r: r.prompt.sum(),
    "new_tokens": lambda r: r.new_tokens,
    "total_tokens": lambda r: r.total_tokens,
    "mean_prompt_len": lambda r: r.prompt.mean(),
    "median_prompt_len": lambda r: np.median(r.prompt),
    "max_prompt_len": lambda r: r.prompt.max(),
    "mean_output_len": lambda r: r.output.mean(),
    "min_output_len": lambda r: r.output.min(),
    "max_total_len": lambda r: (r.prompt + r.output).max(),
}
RULES = {"Punica": "fcfs", "vLLM": ONE_ADAPTER, "HF": "static"}
OF_STEPS = {
    "steps": lambda steps, prefills: steps.total() + prefills,
    "decode_steps_total": lambda steps, prefills: steps.total(),
    "max_bs": lambda steps, _: max(steps),
    "frac_full": lambda steps, _: share(steps, 32, 32),
    "frac_bs_1_3": lambda steps, _: share(steps, 1, 3),
}
with (PAPER / "workload_reference.csv").open(newline="") as _stream:
    REFERENCE = list(csv.DictReader(_stream))
LINES = [line for line in REFERENCE if line["item"] == "request generator"]
REPLAYS = [line for line in REFERENCE if line["item"].startswith("scheduling simulation")]


def same(value: float, printed: str) -> bool:
    return f"{value:.{len(printed.partition('.')[2])}f}" == printed


def test_the_released_generator_equals_the_reference():
    assert len(LINES) == 3 * len(QUANTITIES)
    for line in LINES:
        lengths = released_lengths(int(line["num_requests"]), int(line["maxlen"]))
        assert same(QUANTITIES[line["quantity"]](lengths), line["value"]), line


@pytest.mark.parametrize("workload", ["Distinct", "Uniform", "Skewed", "Identical"])
@pytest.mark.parametrize("rule", RULES)
def test_steps_of_each_rule_equal_the_reference(rule, workload):
    known = [line for line in REPLAYS if f": {rule}" in line["item"] and line["workload"] == workload]
    compared = 0
    for line in known:
        count = int(line["num_requests"])
        steps = replay(RULES[rule], workload, count)
        compute = {**OF_STEPS, "mean_bs": lambda steps, _: mean_batch(steps)} if rule != "HF" else OF_STEPS
        if line["quantity"] in compute:
            # finished rows of a static batch stay in it, so the timeline's sizes are not those of useful rows
            value = compute[line["quantity"]](steps, count if rule == "vLLM" else 0)
            assert same(value, line["value"]), line
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("maxlen", [4, 64, 257, 2048])
def test_released_lengths_fit_and_begin_alike(maxlen):
    lengths = released_lengths(3000, maxlen)
    assert (lengths.prompt + lengths.output).max() <= max(maxlen, 4)
    assert min(lengths.prompt.min(), lengths.output.min()) >= 1
    assert released_lengths(100, maxlen).output.tolist() == lengths.output[:100].tolist()


@pytest.mark.parametrize("maxlen", [16, 64, 2048])
def test_scaled_keeps_the_mix(maxlen):
    full, small = released_lengths(1000), scaled_lengths(1000, maxlen)
    assert (small.prompt + small.output).max() <= maxlen
    assert (small.prompt.min() >= 1, small.output.min() >= 2) == (True, True)
    assert small.new_tokens == pytest.approx(full.new_tokens * maxlen / 2048, rel=0.08)
    assert np.corrcoef(full.output, small.output)[0, 1] > 0.99
    assert maxlen < 2048 or small.output.tolist() == full.output.tolist()


@pytest.mark.parametrize("n", [1, 37, 1000])
def test_stated_count_is_exact(n):
    lengths = stated_lengths(n)
    assert (lengths.new_tokens, lengths.output.min() >= 1) == (101 * n, True)
    assert lengths.prompt.tolist() == released_lengths(n).prompt.tolist()
