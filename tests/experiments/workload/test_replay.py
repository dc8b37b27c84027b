"""Scheduling replays, against the exact numbers of ``paper_results/workload_reference.csv`` and a step-by-step loop."""

import csv
from pathlib import Path

import numpy as np
import pytest

from experiments.workload import (
    popularity,
    released_lengths,
    replay_continuous,
    replay_one_adapter,
    replay_static,
)

REFERENCE = Path(__file__).parents[3] / "paper_results" / "workload_reference.csv"
RULES = {"Punica": replay_continuous, "vLLM": replay_one_adapter, "HF": replay_static}
QUANTITIES = {
    "steps": lambda r, n: r.steps,
    "decode_steps_total": lambda r, n: r.steps,
    "useful_rows_per_step": lambda r, n: r.mean_batch,
    "max_bs": lambda r, n: r.largest_batch,
    "frac_full": lambda r, n: r.share(32, 32),
    "frac_bs_1_3": lambda r, n: r.share(1, 3),
    "batches": lambda r, n: r.batches,
    "seg_intended_mean": lambda r, n: r.mean_segments,
    "seg_intended_max": lambda r, n: max(r.steps_by_segments),
    "mean_bs": lambda r, n: n / r.batches if r.batches else r.mean_batch,
}
with REFERENCE.open(newline="") as _stream:
    SIMULATED = [line for line in csv.DictReader(_stream) if line["item"].startswith("scheduling simulation")]
LINES = [line for line in SIMULATED if line["quantity"] in QUANTITIES]


def rule_of(line):
    return line["item"].split(": ")[1].split()[0].strip(",")


CASES = sorted({(rule_of(line), line["num_requests"], line["workload"]) for line in LINES})


@pytest.mark.parametrize(("rule", "n", "workload"), CASES, ids=["-".join(case) for case in CASES])
def test_replay_equals_the_reference(rule, n, workload):
    outputs = released_lengths(int(n)).output.tolist()
    replay = RULES[rule](outputs, popularity(workload).requests(int(n)).tolist())
    mine = [x for x in LINES if (rule_of(x), x["num_requests"], x["workload"]) == (rule, n, workload)]
    assert len(mine) >= 4
    for line in mine:
        value = QUANTITIES[line["quantity"]](replay, int(n))
        decimals = len(line["value"].partition(".")[2])
        assert f"{value:.{decimals}f}" == line["value"], line["quantity"]


def step_by_step(outputs, adapters, max_batch):
    """Punica's rule one step at a time: the jumps of the replay must not change its counts."""
    waiting, running, sizes = list(zip(outputs, adapters, strict=True)), [], []
    while waiting or running:
        if waiting and len(running) < max_batch:
            running.append(list(waiting.pop(0)))
        sizes.append(len(running))
        running = [[left - 1, adapter] for left, adapter in running if left > 1]
    return sizes


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_jumps_change_nothing(max_batch):
    stream = np.random.default_rng(max_batch)
    outputs = stream.integers(1, 9, 40).tolist()
    adapters = stream.integers(0, 4, 40).tolist()
    sizes = step_by_step(outputs, adapters, max_batch)
    replay = replay_continuous(outputs, adapters, max_batch)
    assert replay.steps == len(sizes)
    assert replay.mean_batch == pytest.approx(np.mean(sizes))
    assert replay.largest_batch == max(sizes)


def test_one_token_requests_never_decode():
    replay = replay_one_adapter([1, 3], [0, 0])
    assert (replay.prefill_steps, replay.decode_steps, replay.steps) == (2, 2, 4)


def test_adapters_do_not_mix_where_the_rule_forbids_it():
    assert replay_one_adapter([2, 2], [0, 1]).largest_batch == 1
    assert replay_static([2, 2], [0, 1]).batches == 2
    assert replay_continuous([2, 2], [0, 1]).largest_batch == 2


@pytest.mark.parametrize(
    ("outputs", "adapters", "max_batch", "words"),
    [
        ([1], [0, 1], 4, "got 1 and 2"),
        ([], [], 4, "at least one request"),
        ([2, 0], [0, 0], 4, "at least one new token"),
        ([2], [0], 0, "max_batch must be at least 1, got 0"),
    ],
    ids=["lengths", "empty", "no token", "batch"],
)
def test_bad_input(outputs, adapters, max_batch, words):
    for rule in RULES.values():
        with pytest.raises(ValueError, match=words):
            rule(outputs, adapters, max_batch)
