"""Simulator: small cases by hand, and a stream against the timeline of the paper's engine."""

import numpy as np
import pytest

from experiments.simulator import StepCost, Trace, simulate
from experiments.systems.stream import Timeline
from experiments.workload import RequestLengths, popularity, released_lengths
from punica.cluster import ClusterPolicy

SECOND = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)


def trace(arrivals, prompts, outputs) -> Trace:
    count = len(arrivals)
    lengths = RequestLengths(np.array(prompts), np.array(outputs))
    return Trace(np.array(arrivals, float), lengths, np.full(count, 1), np.full(count, 16))


def one_gpu(pages: int = 2000, **settings) -> ClusterPolicy:
    policy = ClusterPolicy("punica", **settings)
    policy.add_gpu("gpu", pages)
    return policy


def test_two_requests_by_hand():
    result = simulate(trace([0.0, 0.5], [5, 7], [3, 2]), one_gpu(), SECOND)
    # steps end at 1, 2, 3: the second request waits for the step in flight, then joins the first one's decodes
    assert result.first_token_s.tolist() == [1.0, 2.0]
    assert result.finish_s.tolist() == [3.0, 3.0]
    assert result.tokens.tolist() == [0, 6, 9, 2]  # a prompt counts with its first token
    assert result.batch.tolist() == [[0, 1, 2, 2]]
    assert result.seconds_by_batch[:3].tolist() == [0.0, 1.0, 2.0]
    assert (result.steps, result.evictions, result.cost_model) == (3, 0, "a step is a second")


def test_a_place_taken_over_within_a_second_counts_twice_but_no_batch_is_larger_than_allowed():
    tenth = StepCost("ten steps a second", base=0.1, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
    result = simulate(trace([0.0, 0.0, 0.0], [4, 4, 4], [3, 9, 3]), one_gpu(max_batch_size=2), tenth)
    assert result.batch[0, 0] == 3  # the third took the first one's place
    assert len(result.seconds_by_batch) == 3
    assert result.seconds_by_batch[2] > 0


@pytest.mark.parametrize(
    ("arrivals", "prompts", "outputs", "plain", "ahead"),
    [
        # the step from 2 is launched at 1, before the second arrives; the one from 3 at 2, with it
        pytest.param([0.0, 1.5, 3.5], [5, 7, 3], [9, 4, 2], [1, 3, 5], [1, 4, 6], id="one step later"),
        pytest.param([0.0, 1.5], [5, 7], [2, 2], [1, 3], [1, 3], id="nothing ahead of the last step of all"),
        pytest.param([0.0, 10.25], [4, 4], [1, 2], [1, 11.25], [1, 11.25], id="sleeps until the next arrival"),
    ],
)
def test_an_engine_that_works_ahead_lets_a_request_that_arrives_during_a_step_join_one_later(
    arrivals, prompts, outputs, plain, ahead
):
    for works_ahead, expected in ((False, plain), (True, ahead)):
        result = simulate(trace(arrivals, prompts, outputs), one_gpu(), SECOND, works_ahead=works_ahead)
        assert result.first_token_s.tolist() == expected


def test_a_step_costs_what_the_model_says_its_constant_of_a_prompt_once():
    cost = StepCost("parts", base=1.0, row=10.0, kv=100.0, prefill=1000.0, rank=0.5, join=0.25)
    result = simulate(trace([0.0], [3], [3]), one_gpu(), cost)
    # prefill of 3; then a decode that reads 4 tokens, then one that reads 5; one adapter of rank 16 in each
    assert result.first_token_s[0] == 1 + 3000 + 8 + 0.25
    assert result.finish_s[0] == result.first_token_s[0] + (1 + 10 + 400 + 8) + (1 + 10 + 500 + 8)


def test_one_gpu_takes_the_steps_that_the_timeline_of_the_paper_takes():
    lengths = released_lengths(200)
    adapters = popularity("Uniform").requests(200)
    steps = Timeline(lengths, adapters.tolist(), "fcfs", 32).steps
    result = simulate(Trace(np.zeros(200), lengths, adapters + 1, np.full(200, 16)), one_gpu(10_000), SECOND)
    assert (result.steps, result.finish_s.max(), result.tokens.sum()) == (steps, steps, lengths.total_tokens)
