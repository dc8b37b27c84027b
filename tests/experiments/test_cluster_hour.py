"""The hour of Figure 13, simulated: what the paper shows of it comes out, though none of it was fitted."""

from pathlib import Path

import pytest

from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.cluster.step_costs import model_bytes
from experiments.facts.paper import read_figure

PAPER = Path(__file__).parents[2] / "paper_results"
SIZE = model_bytes("llama2-7b")


def published(metric: str) -> float:
    return read_figure(PAPER, "13").query("metric == @metric")["value"].item()


def test_the_hour_has_the_paper_count_of_requests_and_tokens():
    asked = paper_hour(PAPER)
    assert len(asked.arrivals) == pytest.approx(published("total_requests"), rel=0.03)
    assert asked.lengths.total_tokens == pytest.approx(published("total_tokens"), rel=0.06)
    assert asked.arrivals.tolist() == paper_hour(PAPER).arrivals.tolist()
    assert asked.arrivals.tolist() != paper_hour(PAPER, seed=1).arrivals.tolist()


def test_the_cluster_has_the_paper_memory():
    policy = paper_cluster("punica", SIZE)
    assert len(policy.gpus) == 16
    held = {gpu.num_pages * 8_388_608 + 2 * (SIZE.weights + SIZE.head) for gpu in policy.gpus.values()}
    assert len(held) == 1
    assert 28e9 < held.pop() < 32e9 - 32 * 79_953_920


def test_the_first_minutes_of_the_hour_are_those_of_the_whole():
    whole, part = paper_hour(PAPER), paper_hour(PAPER, seconds=300)
    assert part.arrivals.tolist() == whole.arrivals[whole.arrivals < 300].tolist()


def test_a_larger_cluster_is_asked_for_more_and_for_mixed_ranks():
    asked = paper_hour(PAPER, load=2.0, workload="Zipf", ranks=(8, 64))
    assert len(asked.arrivals) == pytest.approx(2 * published("total_requests"), rel=0.03)
    assert set(asked.ranks) == {8, 64}
    pairs = set(zip(asked.adapters.tolist(), asked.ranks.tolist(), strict=True))
    assert len(pairs) == len(set(asked.adapters.tolist())) > 100  # an adapter has one rank
