"""Simulator: small cases by hand, large ones against invariants of any schedule."""

import numpy as np
import pytest

from experiments.simulator import StepCost, Trace, simulate
from experiments.systems.stream import Timeline
from experiments.workload import RequestLengths, poisson_arrivals, popularity, released_lengths, scaled_lengths
from punica.cluster import SCHEDULING_RULES, ClusterPolicy, StepWork

SECOND = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
A100 = StepCost("like an A100", base=0.018, row=0.0, kv=4e-7, prefill=1e-4, rank=4e-6)


def trace(arrivals, prompts, outputs, adapters=None) -> Trace:
    count = len(arrivals)
    lengths = RequestLengths(np.array(prompts), np.array(outputs))
    return Trace(np.array(arrivals, float), lengths, np.array(adapters or [1] * count), np.full(count, 16))


def cluster(gpus: int, pages: int = 2000, rule: str = "punica", **settings) -> ClusterPolicy:
    policy = ClusterPolicy(rule, **settings)
    for i in range(gpus):
        policy.add_gpu(f"gpu-{i:04}", pages)
    return policy


def random_trace(count: int, rate: float, seed: int, maxlen: int = 256) -> Trace:
    arrivals = poisson_arrivals(rate, 10 * count / rate, seed)[:count]
    adapters = popularity("Skewed").requests(count, seed=seed)
    return Trace(arrivals, scaled_lengths(count, maxlen, seed), adapters + 1, np.full(count, 16))


def test_two_requests_by_hand():
    result = simulate(trace([0.0, 0.5], [5, 7], [3, 2]), cluster(1), SECOND)
    # steps end at 1, 2, 3: the second request waits for the step in flight, then joins the first one's decodes
    assert result.first_token_s.tolist() == [1.0, 2.0]
    assert result.finish_s.tolist() == [3.0, 3.0]
    assert result.tokens.tolist() == [0, 6, 9, 2]  # a prompt counts with its first token
    assert result.batch.tolist() == [[0, 1, 2, 2]]
    assert result.seconds_by_batch[:3].tolist() == [0.0, 1.0, 2.0]
    assert (result.steps, result.evictions, result.busy_seconds) == (3, 0, 3.0)


def test_who_takes_a_place_in_the_same_second_counts_beside_who_left_it_but_no_batch_is_larger_than_allowed():
    tenth = StepCost("ten steps a second", base=0.1, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
    result = simulate(trace([0.0, 0.0, 0.0], [4, 4, 4], [3, 9, 3]), cluster(1, max_batch_size=2), tenth)
    assert result.batch[0, 0] == 3  # the third took the first one's place
    assert len(result.seconds_by_batch) == 3
    assert result.seconds_by_batch[2] > 0


def test_an_engine_that_works_ahead_lets_who_arrives_during_a_step_join_one_later():
    asked = trace([0.0, 1.5, 3.5], [5, 7, 3], [9, 4, 2])
    result = simulate(asked, cluster(1), SECOND, works_ahead=True)
    # the step from 2 is launched at 1, before the second arrives; the one from 3 at 2, with it
    assert result.first_token_s.tolist() == [1.0, 4.0, 6.0]
    assert simulate(asked, cluster(1), SECOND).first_token_s.tolist() == [1.0, 3.0, 5.0]
    assert result.finish_s.tolist() == [9.0, 7.0, 7.0]


def test_nothing_is_begun_ahead_of_a_step_with_which_all_leave():
    asked = trace([0.0, 1.5], [5, 7], [2, 2])
    for works_ahead in (False, True):  # the step from 1 to 2 is the first one's last
        assert simulate(asked, cluster(1), SECOND, works_ahead=works_ahead).first_token_s.tolist() == [1.0, 3.0]


def test_who_waits_takes_the_place_of_who_leaves_at_once():
    asked = trace([0.0, 0.0, 0.0, 1.5], [5, 7, 3, 4], [9, 2, 3, 2])
    for works_ahead in (False, True):  # one prompt per step: the second has its two tokens at 2 and 3
        result = simulate(asked, cluster(1, max_batch_size=2), SECOND, works_ahead=works_ahead, own_queue=True)
        assert result.first_token_s.tolist() == [1.0, 2.0, 4.0, 7.0]


@pytest.mark.parametrize("rate", [5.0, 25.0])
def test_working_ahead_changes_no_throughput_and_delays_first_tokens_by_a_step_at_most(rate):
    asked = random_trace(300, rate, seed=3)
    plain, ahead = (simulate(asked, cluster(1), A100, works_ahead=works, own_queue=True) for works in (False, True))
    longest = A100.seconds(StepWork(32, 32 * 256, 256, 32 * 16))
    delay = np.median(ahead.first_token_s - asked.arrivals) - np.median(plain.first_token_s - asked.arrivals)
    assert -1e-9 <= delay <= longest
    assert ahead.finish_s.max() == pytest.approx(plain.finish_s.max(), rel=0.03)
    assert ahead.tokens.sum() == plain.tokens.sum()


def test_a_gpu_sleeps_until_the_next_arrival():
    result = simulate(trace([0.0, 10.25], [4, 4], [1, 2]), cluster(1), SECOND)
    assert result.finish_s.tolist() == [1.0, 12.25]
    assert (result.batch > 0).sum() == 3


def test_a_step_costs_what_the_model_says():
    cost = StepCost("parts", base=1.0, row=10.0, kv=100.0, prefill=1000.0, rank=0.5)
    result = simulate(trace([0.0], [3], [3]), cluster(1), cost)
    # prefill of 3; then a decode that reads 4 tokens, then one that reads 5; one adapter of rank 16 in each
    assert result.first_token_s[0] == 1 + 3000 + 8
    assert result.finish_s[0] == result.first_token_s[0] + (1 + 10 + 400 + 8) + (1 + 10 + 500 + 8)


def test_a_step_with_a_prompt_takes_its_constant_once():
    cost = StepCost("joins", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0, join=0.25)
    result = simulate(trace([0.0, 0.0], [3, 4], [3, 1]), cluster(1), cost)
    assert result.first_token_s.tolist() == [1.25, 2.5]
    assert result.finish_s.tolist() == [3.5, 2.5]


def test_kernels_that_pad_ranks_read_every_adapter_at_the_largest():
    lengths = RequestLengths(np.array([1, 1]), np.array([2, 2]))
    asked = Trace(np.zeros(2), lengths, np.array([1, 2]), np.array([8, 64]))
    cost = StepCost("ranks alone", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=1.0)
    # a step with the first alone, one with both, one with the second alone
    assert simulate(asked, cluster(1), cost).finish_s.tolist() == [9 + 73, 9 + 73 + 65]
    assert simulate(asked, cluster(1), cost, padded_ranks=True).finish_s.tolist() == [9 + 129, 9 + 129 + 65]


def test_one_gpu_takes_the_steps_that_the_timeline_of_the_paper_takes():
    lengths = released_lengths(200)
    adapters = popularity("Uniform").requests(200)
    steps = Timeline(lengths, adapters.tolist(), "fcfs", 32).steps
    result = simulate(Trace(np.zeros(200), lengths, adapters + 1, np.full(200, 16)), cluster(1, 10_000), SECOND)
    assert result.steps == steps
    assert result.finish_s.max() == steps
    assert result.tokens.sum() == lengths.total_tokens


@pytest.mark.parametrize("rule", SCHEDULING_RULES.names())
def test_everybody_is_served_once_whatever_the_rule_even_with_few_pages(rule):
    asked = random_trace(400, 60.0, seed=3)
    policy = cluster(3, 40, rule, max_batch_size=8)
    result = simulate(asked, policy, A100)
    assert result.evictions > 0
    assert result.longest_queue > 0
    assert result.tokens.sum() == asked.lengths.total_tokens
    assert (result.first_token_s > asked.arrivals).all()
    assert (result.finish_s >= result.first_token_s).all()
    assert policy.requests == {}
    assert all(gpu.used_pages == 0 for gpu in policy.gpus.values())
    assert result.seconds_by_batch[0] == 0
    assert result.busy_seconds <= 3 * result.finish_s.max()


def test_the_same_seed_gives_the_same_result_and_another_one_does_not():
    first, again, other = (simulate(random_trace(300, 30.0, seed), cluster(4), A100) for seed in (1, 1, 2))
    assert first.finish_s.tolist() == again.finish_s.tolist()
    assert first.batch.tolist() == again.batch.tolist()
    assert first.finish_s.tolist() != other.finish_s.tolist()


def test_punica_consolidates_and_least_loaded_spreads():
    asked = random_trace(600, 12.0, seed=5, maxlen=1024)
    punica, spread = (simulate(asked, cluster(8, rule=rule), A100) for rule in ("punica", "least_loaded"))
    assert (punica.batch > 0).sum(axis=0).mean() < 0.6 * (spread.batch > 0).sum(axis=0).mean()
    shares = [one.seconds_by_batch[24:].sum() / one.busy_seconds for one in (punica, spread)]
    assert shares[0] > shares[1]
    assert punica.busy_seconds < spread.busy_seconds


def test_the_cost_model_is_named():
    assert simulate(trace([0.0], [1], [1]), cluster(1), A100).cost_model == "like an A100"


def test_bad_input():
    with pytest.raises(ValueError, match="arrivals must ascend"):
        trace([1.0, 0.0], [1, 1], [1, 1])
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="arrivals must ascend"):
            trace([wrong], [1], [1])
    with pytest.raises(ValueError, match="one arrival, length, adapter and rank per request"):
        trace([1.0], [1, 1], [1, 1])
    with pytest.raises(ValueError, match="the policy has 0 GPUs"):
        simulate(trace([0.0], [1], [1]), ClusterPolicy(), A100)
    with pytest.raises(ValueError, match="the largest GPU holds 32"):
        simulate(trace([0.0], [30], [4]), cluster(1, 2), A100)
    with pytest.raises(RuntimeError, match="'nothing' gives a step"):
        simulate(trace([0.0], [1], [1]), cluster(1), StepCost("nothing", 0, 0, 0, 0, 0))
