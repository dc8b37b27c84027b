"""The timeline: batches of each rule by hand, features by brute force."""

import numpy as np
import pytest

from experiments.systems.timeline import Timeline
from experiments.workload import (
    RequestLengths,
    popularity,
    released_lengths,
    rescaled,
    stated_lengths,
)
from punica.scheduling import ADMISSION_RULES, AdmissionRule

POLICIES = ADMISSION_RULES.names()
PROMPTS, OUTPUTS, ADAPTERS = [3, 2, 5, 1], [4, 2, 1, 3], [1, 1, 2, 2]


def timeline(policy, max_batch=2, prompts=PROMPTS, outputs=OUTPUTS, adapters=ADAPTERS):
    return Timeline(RequestLengths(np.array(prompts), np.array(outputs)), adapters, policy, max_batch)


@pytest.mark.parametrize(
    ("policy", "batches"),
    [
        ("fcfs", ["0", "01", "01", "02", "3", "3", "3"]),
        ("single_adapter", ["0", "01", "01", "0", "2", "3", "3", "3"]),
        ("static", ["01", "01", "01", "01", "23", "23", "23"]),
        ("static_mixed", ["01", "01", "01", "01", "23", "23", "23"]),
    ],
)
def test_batches_step_by_step(policy, batches):
    line = timeline(policy)
    assert line.steps == len(batches)
    assert ["".join(str(request) for request, _ in line.at(step).members) for step in range(line.steps)] == batches


@pytest.mark.parametrize("policy", POLICIES)
def test_stretches_between_two_steps_are_these_steps(policy):
    line = timeline(policy, prompts=PROMPTS * 3, outputs=OUTPUTS * 3, adapters=ADAPTERS * 3)
    for first in range(line.steps):
        for end in (first, first + 1, first + 3, line.steps, line.steps + 2):
            found = list(line.between(first, end))
            assert sum(stretch.steps for stretch in found) == min(end, line.steps) - first
            for stretch in found:
                assert stretch.members == line.at(stretch.first).members
                assert stretch.joined == line.at(stretch.first).joined
                last = line.at(stretch.first + stretch.steps - 1)
                assert [request for request, _ in last.members] == [request for request, _ in stretch.members]


def test_a_static_batch_of_one_adapter_ends_where_the_next_begins():
    line = timeline("static", max_batch=4)
    assert [len(line.at(step).members) for step in range(line.steps)] == [2] * 4 + [2] * 3


def test_a_step_says_who_joins_how_far_all_are_and_how_many_have_begun():
    line = timeline("fcfs")
    assert (line.at(0).members, line.at(0).joined, line.at(0).begun) == (((0, 0),), 1, 1)
    assert (line.at(1).members, line.at(1).joined, line.at(1).begun) == (((0, 1), (1, 0)), 1, 2)
    assert (line.at(2).members, line.at(2).joined, line.at(2).begun) == (((0, 2), (1, 1)), 0, 2)
    idle = timeline("static_mixed").at(3)
    assert (idle.members, idle.joined) == (((0, 3), (1, 2)), 0)


def test_features_are_tokens_rows_context_adapters_and_what_of_it_prompts_are():
    # steps of fcfs: 0 prefilled; 1 joins; both decode; 2 joins 0; 3 prefilled; 3 decodes twice
    assert timeline("fcfs").features().tolist() == [
        [3 + 1, 1, 3, 1, 3, 1],
        [2 + 2, 2, (3 + 1) + 2, 1, 2, 1],
        [2, 2, (3 + 2) + (2 + 1), 1, 0, 0],
        [5 + 2, 2, (3 + 3) + 5, 2, 5, 1],
        [1 + 1, 1, 1, 1, 1, 1],
        [1, 1, 2, 1, 0, 0],
        [1, 1, 3, 1, 0, 0],
    ]
    # a static batch: request 1 is done after two steps and keeps the two tokens that it attended to last
    assert timeline("static_mixed").features()[:4].tolist() == [
        [5 + 2, 2, 3 + 2, 1, 5, 1],
        [2, 2, 4 + 3, 1, 0, 0],
        [1, 2, 5 + 3, 1, 0, 0],
        [1, 2, 6 + 3, 1, 0, 0],
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
def test_all_tokens_are_in_it(policy, workload):
    lengths = rescaled(released_lengths(150), 256)
    adapters = popularity(workload).requests(150).tolist()
    line = Timeline(lengths, adapters, policy, 8)
    features = line.features()
    assert features.shape == (line.steps, 6)
    assert features[:, 0].sum() == lengths.total_tokens
    assert features[:, 1].max() <= 8


def test_the_released_stream_has_the_context_that_the_paper_serves():
    line = Timeline(released_lengths(1000), popularity("Distinct").requests(1000).tolist(), "fcfs", 32)
    assert line.means["context"] / line.means["rows"] == pytest.approx(680, rel=0.01)
    assert line.means["rows"] == pytest.approx(31, rel=0.01)


def test_stated_lengths_are_rescaled_like_released_ones():
    lengths = rescaled(stated_lengths(50), 64)
    assert (lengths.prompt + lengths.output).max() <= 64
    assert lengths.prompt.min() >= 1
    assert lengths.output.min() >= 2
    assert rescaled(stated_lengths(50), 2048).new_tokens == 50 * 101


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "no such rule"}, "'no such rule'.*single_adapter"),
        ({"adapters": [1]}, "one entry for each of 4 requests, got 1"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        timeline(**{"policy": "fcfs", **change})


@pytest.mark.parametrize("step", [-1, 7])
def test_a_step_outside_of_the_stream_is_refused(step):
    with pytest.raises(ValueError, match=rf"step must be in \[0, 7\), got {step}"):
        timeline("fcfs").at(step)


@pytest.fixture
def newest_first(monkeypatch):
    """A rule that takes the request that arrived last, one per step."""

    class NewestFirst(AdmissionRule):
        def candidate(self, waiting, is_resident):
            return waiting[-1]

        def allows(self, candidate, running, admitted):
            return not admitted

    monkeypatch.setitem(ADMISSION_RULES._entries, "newest_first", NewestFirst)


@pytest.mark.usefixtures("newest_first")
def test_a_rule_that_reorders_the_queue_is_replayed_in_its_order():
    line = timeline("newest_first")
    batches = ["".join(str(request) for request, _ in line.at(step).members) for step in range(line.steps)]
    assert batches == ["3", "32", "31", "10", "0", "0", "0"]
    assert line.order == [3, 2, 1, 0]
    assert [line.at(step).begun for step in range(4)] == [1, 2, 3, 4]


def test_a_rule_that_lets_nothing_begin_is_refused(monkeypatch):
    class Never(AdmissionRule):
        def allows(self, candidate, running, admitted):
            return False

    monkeypatch.setitem(ADMISSION_RULES._entries, "never", Never)
    with pytest.raises(ValueError, match="'never' lets no request into an empty batch"):
        timeline("never")
