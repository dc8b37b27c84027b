"""The A100 of the paper: fitted to Figures 1 and 10, it must tell what was not fitted."""

from pathlib import Path

import numpy as np
import pytest

from experiments.claims.paper import as_rows, read_figure
from experiments.cluster.step_costs import FittedCost, paper_a100, timed_layers
from punica.cluster import ClusterPolicy, ModelBytes, StepWork, Trace, residuals, simulate
from punica.workload import PAPER_WORKLOADS, popularity, released_lengths

PAPER = Path(__file__).parents[2] / "paper_results"
SIZES = {
    "7B": ModelBytes.llama(4096, 11008, 32, 32, 32, 32000),
    "13B": ModelBytes.llama(5120, 13824, 40, 40, 40, 32000),
}
LAYERS = {"7B": 32, "13B": 40}


def a100(model: str) -> FittedCost:
    return paper_a100(PAPER, model, LAYERS[model], SIZES[model], SIZES["7B"])


@pytest.mark.parametrize("model", ["7B", "13B"])
def test_residuals_of_the_fit_are_those_of_its_rows(model):
    fitted = a100(model)
    assert len(fitted.layers.relative) == 4 * 2 * 32
    steps = timed_layers(as_rows(read_figure(PAPER, "10")), model, LAYERS[model])
    assert residuals(fitted.cost, steps).rms == fitted.layers.rms < 0.08
    assert fitted.layers.largest < 0.3
    assert fitted.cost.name == f"A100 {model}, paper Figures 1 and 10"


def test_a_row_of_figure_10_is_a_step_of_32_layers():
    rows = as_rows(read_figure(PAPER, "10"))
    published = rows.query("model == '7B' and workload == 'Uniform' and batch_size == 9 and seq_len == 512")["value"]
    steps = [step for step in timed_layers(rows, "7B", 32) if step.work == StepWork(9, 9 * 512, 0, 3 * 16)]
    assert [step.seconds for step in steps] == pytest.approx([32e-6 * published.item()])


def test_prefill_of_another_model_costs_in_proportion_to_its_weights():
    ratio = SIZES["13B"].weights / SIZES["7B"].weights
    assert a100("13B").cost.prefill == pytest.approx(ratio * a100("7B").cost.prefill)


def test_a_model_that_the_paper_did_not_time():
    with pytest.raises(ValueError, match="no layer of '70B'"):
        paper_a100(PAPER, "70B", 80, SIZES["13B"], SIZES["7B"])


@pytest.mark.parametrize("workload", PAPER_WORKLOADS)
@pytest.mark.parametrize("model", ["7B", "13B"])
def test_figure_11_is_predicted_within_15_percent(model, workload):
    lengths = released_lengths(1024)
    asked = Trace(np.zeros(1024), lengths, popularity(workload).requests(1024) + 1, np.full(1024, 16))
    policy = ClusterPolicy()
    policy.add_gpu("a100-80g", SIZES[model].pages(0.9 * 80e9, policy.page_size, 32, 16))
    result = simulate(asked, policy, a100(model).cost)
    paper = as_rows(read_figure(PAPER, "11"))
    paper = paper.query("metric == 'throughput' and system == 'punica'")
    published = paper.query("model == @model and workload == @workload")["value"].item()
    assert lengths.total_tokens / result.finish_s.max() == pytest.approx(published, rel=0.15)
