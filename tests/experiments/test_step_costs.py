"""Cost models of a step: fitted to Figures 1 and 10 alone, they must tell what was not fitted."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.cluster import step_costs
from experiments.cluster.step_costs import a100_of_the_cluster, model_bytes, paper_a100, recorded_cost, timed_layers
from experiments.facts.paper import as_rows, read_figure
from experiments.simulator import StepCost, residuals
from experiments.workload import popularity
from punica.cluster import StepWork

PAPER = Path(__file__).parents[2] / "paper_results"
LAYERS = {"7B": 32, "13B": 40}
TRUE = StepCost("true", base=0.004, row=2e-5, kv=1.5e-7, prefill=2e-5, rank=2e-6)


@pytest.mark.parametrize("role", ["7B", "13B"])
def test_residuals_of_the_fit_are_those_of_its_rows(role):
    fitted = paper_a100(PAPER, role)
    layers = fitted.residuals["layers"]
    assert len(layers.relative) == 4 * 2 * 32
    head = 2 * model_bytes(f"llama2-{role.lower()}").head / 1935e9
    steps = timed_layers(as_rows(read_figure(PAPER, "10")), role, LAYERS[role], head)
    assert residuals(fitted.cost, steps).rms == layers.rms < 0.08
    assert layers.largest < 0.3
    assert fitted.cost.name == f"A100 80GB {role}, paper Figures 1 and 10"


def test_a_row_of_figure_10_is_a_step_of_32_layers():
    rows = as_rows(read_figure(PAPER, "10"))
    published = rows.query("model == '7B' and workload == 'Uniform' and batch_size == 9 and seq_len == 512")["value"]
    steps = [step for step in timed_layers(rows, "7B", 32, 1e-3) if step.work == StepWork(9, 9 * 512, 0, 3 * 16)]
    assert [step.seconds for step in steps] == pytest.approx([32e-6 * published.item() + 1e-3])


def test_prefill_of_another_model_costs_in_proportion_to_its_weights():
    ratio = model_bytes("llama2-13b").weights / model_bytes("llama2-7b").weights
    assert paper_a100(PAPER, "13B").cost.prefill == pytest.approx(ratio * paper_a100(PAPER, "7B").cost.prefill)


def test_the_cluster_had_cards_with_slower_memory():
    fast, slow = paper_a100(PAPER, "7B").cost, a100_of_the_cluster(PAPER)
    read = 2 * model_bytes("llama2-7b").weights
    assert slow.base - fast.base == pytest.approx(read / 1555e9 - read / 1935e9)
    assert slow.prefill == fast.prefill
    assert "40GB" in slow.name


def test_a_model_that_the_paper_did_not_time():
    with pytest.raises(ValueError, match="no layer of '70B'"):
        paper_a100(PAPER, "70B")


def own_rows() -> dict[str, pd.DataFrame]:
    """Rows of Figures 1, 10 and the breakdown as a GPU gives them whose steps take what `TRUE` says."""
    lines = {"1": [], "10": [], "ext breakdown": []}

    def add(figure, metric, unit, scale, work, **columns):
        about = {"statistic": "median", "model": "llama2-7b", "system": "punica", "workload": "", "rank": None}
        value = scale * TRUE.seconds(work)
        lines[figure].append({**about, "panel": "", "metric": metric, "unit": unit, "value": value, **columns})

    for n in (1, 8, 32):
        for length in (128, 512, 2048):
            shape = {"batch_size": n, "seq_len": length}
            add("1", "step_latency", "ms", 1e3, StepWork(n, n * length), panel="decode", **shape)
            add("1", "step_latency", "ms", 1e3, StepWork(0, 0, n * length), panel="prefill", **shape)
            for workload in ("Distinct", "Identical"):
                ranks = 16 * popularity(workload).number_of_adapters(n)
                named = {**shape, "workload": workload, "rank": 16}
                add("10", "layer_latency", "us", 1e6 / 32, StepWork(n, n * length, 0, ranks), **named)
    for workload, ranks in (("", 0), ("Identical", 16), ("Distinct", 512)):
        named = {"batch_size": 32, "seq_len": 512, "workload": workload, "rank": 16}
        add("ext breakdown", "step_latency", "ms", 1e3, StepWork(32, 32 * 512, 0, ranks), panel="decode", **named)
        add("ext breakdown", "step_latency", "ms", 1e3, StepWork(31, 31 * 512, 512, ranks), panel="mixed", **named)
        add("ext breakdown", "added_latency", "ms", 1e3, StepWork(1), panel="mixed", **named)
    alone = {"panel": "prefill", "batch_size": 1, "seq_len": 512, "workload": "Distinct", "rank": 16}
    add("ext breakdown", "step_latency", "ms", 1e3, StepWork(0, 0, 512, 16), **alone)
    return {figure: pd.DataFrame(part) for figure, part in lines.items()}


def test_own_rows_give_back_the_steps_that_made_them():
    fitted = recorded_cost(own_rows(), "h200", "llama2-7b")
    for key in ("base", "row", "kv", "prefill", "rank"):
        assert getattr(fitted.cost, key) == pytest.approx(getattr(TRUE, key), rel=1e-6)
    assert {name: len(found.relative) for name, found in fitted.residuals.items()} == {
        "decodes": 9, "prefills": 9, "layers": 18, "steps": 7,
    }  # fmt: skip
    assert max(found.largest for found in fitted.residuals.values()) < 1e-9
    assert fitted.cost.name == "h200 llama2-7b, own rows of figures 1, 10, ext breakdown"


def test_own_rows_without_adapters_cannot_tell_what_a_rank_costs():
    with pytest.raises(ValueError, match="to tell 'rank' from"):
        recorded_cost({"1": own_rows()["1"]}, "h200", "llama2-7b")


def test_a_gpu_that_nobody_timed_has_its_datasheet():
    cost = step_costs.datasheet_cost("h100", "llama2-7b")
    size = model_bytes("llama2-7b")
    assert cost.seconds(StepWork(4, 1000)) == pytest.approx(2 * (size.weights + 1000 * size.kv) / 3350e9)
    assert np.isfinite(cost.seconds(StepWork(1, 10, 5, 16)))
    assert "roofline" in cost.name
