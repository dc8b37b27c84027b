"""The hour of Figure 13, simulated: what the paper shows of it comes out, though none of it was fitted."""

from pathlib import Path

import numpy as np
import pytest

from experiments.claims.paper import read_figure
from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.cluster.step_costs import paper_a100
from punica.cluster import ModelBytes, simulate

PAPER = Path(__file__).parents[2] / "paper_results"
SIZE = ModelBytes.llama(4096, 11008, 32, 32, 32, 32000)


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
    held = {gpu.num_pages * 8_388_608 + 2 * SIZE.weights for gpu in policy.gpus.values()}
    assert len(held) == 1
    assert 28e9 < held.pop() < 32e9 - 32 * 79_953_920


@pytest.mark.slow
def test_the_heat_map_and_the_active_gpus_of_figure_13_are_predicted():
    result = simulate(paper_hour(PAPER), paper_cluster("punica", SIZE), paper_a100(PAPER, "7B", 32, SIZE, SIZE).cost)
    assert result.share_of_cells(31) == pytest.approx(published("share_of_active_cells_batch_ge_31"), abs=0.05)
    active = read_figure(PAPER, "13").query("metric == 'active_gpus_60s_mean'").sort_values("t_s")
    starts = active["t_s"].astype(int)
    simulated = [result.active_gpus[start : start + 60].mean() for start in starts]
    assert np.corrcoef(simulated, active["value"])[0, 1] > 0.9
