"""Cost models of steps and adapter loads: fitted to rows that a known cost made, the paper's, and recorded ones."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.cluster.costs import (
    FROM_DISK,
    FROM_MEMORY,
    a100_of_the_cluster,
    chosen_cost,
    decoding,
    fitted_loads,
    load_cost,
    model_bytes,
    paper_a100,
    recorded_cost,
    recorded_load_costs,
    timed,
    timed_links,
    timed_reads,
)
from experiments.cluster.simulated_hour import fit_readings
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import ConfigError
from experiments.simulator import StepCost, residuals
from experiments.workload import popularity
from punica.cluster import StepWork

ROOT = Path(__file__).parents[2]
PAPER, RESULTS = ROOT / "paper_results", ROOT / "results"
OF_LAYERS = {"metric": "layer_latency", "system": "punica"}
TRUE = StepCost("true", base=0.004, row=2e-5, kv=1.5e-7, prefill=2e-5, rank=2e-6)


# the paper's A100


@pytest.mark.parametrize(("role", "num_layers"), [("7B", 32), ("13B", 40)])
def test_residuals_of_the_fit_are_those_of_its_rows(role, num_layers):
    fitted = paper_a100(PAPER, role)
    layers = fitted.residuals["layers"]
    assert len(layers.relative) == 4 * 2 * 32
    head = 2 * model_bytes(f"llama2-{role.lower()}").head / 1935e9
    steps = timed(as_rows(read_figure(PAPER, "10")), role, decoding, num_layers, head, **OF_LAYERS)
    assert residuals(fitted.cost, steps).rms == layers.rms < 0.08
    assert layers.largest < 0.3


def test_a_row_of_figure_10_is_a_step_of_32_layers():
    rows = as_rows(read_figure(PAPER, "10"))
    published = rows.query("model == '7B' and workload == 'Uniform' and batch_size == 9 and seq_len == 512")["value"]
    steps = timed(rows, "7B", decoding, 32, 1e-3, **OF_LAYERS)
    found = [step.seconds for step in steps if step.work == StepWork(9, 9 * 512, 0, 3 * 16)]
    assert found == pytest.approx([32e-6 * published.item() + 1e-3])


def test_another_model_has_prefills_by_its_weights_and_the_cluster_cards_with_slower_memory():
    fast, slow, large = paper_a100(PAPER, "7B").cost, a100_of_the_cluster(PAPER), paper_a100(PAPER, "13B").cost
    small, larger = (model_bytes(name).weights for name in ("llama2-7b", "llama2-13b"))
    assert large.prefill / fast.prefill == pytest.approx(larger / small)
    assert slow.base - fast.base == pytest.approx(2 * small / 1555e9 - 2 * small / 1935e9)
    assert slow.prefill == fast.prefill


# other GPUs


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


def test_own_rows_without_adapters_cannot_tell_what_a_rank_costs():
    without = {figure: rows[rows["workload"] == ""] for figure, rows in own_rows().items()}
    with pytest.raises(ValueError, match="to tell 'rank' from"):
        recorded_cost(without, "h200", "llama2-7b")


def test_a_gpu_without_rows_has_its_datasheet():
    cost, size = chosen_cost("roofline:h100", "llama2-7b", PAPER, RESULTS), model_bytes("llama2-7b")
    assert cost.seconds(StepWork(4, 1000)) == pytest.approx(2 * (size.weights + 1000 * size.kv) / 3350e9)
    assert np.isfinite(cost.seconds(StepWork(1, 10, 5, 16)))


# adapter loads


def link(rank: int, milliseconds: float, **columns) -> dict:
    about = {"panel": "model", "system": "punica", "workload": "", "rank": rank, "metric": "load_time", "unit": "ms"}
    return {**about, "statistic": "median", "disturbed": None, "value": milliseconds, **columns}


def read(seconds: float, **columns) -> list[dict]:
    return [
        link(16, value, **{"panel": "few", "workload": "Zipf", "metric": metric, **columns})
        for metric, value in ((FROM_DISK, 1e3 * seconds + 10), (FROM_MEMORY, 10.0))
    ]


def test_a_line_over_the_ranks_and_a_proportion_are_found():
    links = [link(rank, 0.5 + 0.25 * rank) for rank in (8, 16, 64)]
    links += [link(16, 4500.0, panel="overlap", workload="Distinct", unit="us")]
    others = ({"panel": "layer"}, {"system": "pageable"}, {"statistic": "p90"}, {"metric": "host_time"})
    links += [link(8, 9.0, **columns) for columns in others]
    reads = [*read(0.16), *read(0.89, workload="Uniform", disturbed=True), read(0.05, workload="Skewed")[1]]
    found = fitted_loads("a machine", timed_links(pd.DataFrame(links)), timed_reads(pd.DataFrame(reads)))
    assert found.cost.host_seconds(32) == pytest.approx(8.5e-3)
    assert found.cost.disk_seconds(32) == pytest.approx(0.32)
    assert max(one.largest for one in found.residuals.values()) < 1e-9


def test_residuals_tell_what_a_line_does_not():
    uneven = pd.DataFrame([link(rank, ms) for rank, ms in ((8, 1), (16, 3), (32, 4))])
    found = fitted_loads("uneven", timed_links(uneven), timed_reads(pd.DataFrame(read(0.08))))
    host = found.residuals["loads_from_host"]
    assert 0.05 < host.median < 0.2 < host.largest < 0.5
    assert found.residuals["loads_from_disk"].relative.tolist() == pytest.approx([0.0])
    rows = {one.metric: one.value for one in fit_readings({"load": found})}
    assert rows["load_host_rank"] == pytest.approx(1e6 * found.cost.host_rank)
    assert rows["residual_median_loads_from_host"] == host.median


def test_recorded_loads_of_the_papers_rank_take_milliseconds_and_reads_a_hundred(tmp_path):
    found = recorded_load_costs(RESULTS)["h200", "llama2-7b"]
    assert len(found.residuals["loads_from_host"].relative) >= 5
    assert found.residuals["loads_from_host"].largest < 0.1
    cost = load_cost(RESULTS, "h200", "llama2-7b")
    assert 1e-3 < cost.host_seconds(16) < 5e-3 < 0.02 < cost.disk_seconds(16) < 1
    with pytest.raises(ConfigError, match=r"'nowhere' has no recorded loads of llama2-7b; machines that have: .*h200"):
        load_cost(RESULTS, "nowhere", "llama2-7b")
