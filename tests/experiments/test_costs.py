"""Cost models of steps and adapter loads: fitted to rows that a known cost made, the paper's, and recorded ones."""

import pandas as pd
import pytest
from fakes import PAPER

from experiments.cluster.costs import (
    FROM_DISK,
    FROM_MEMORY,
    decoding,
    fitted_loads,
    model_bytes,
    paper_a100,
    recorded_cost,
    timed,
    timed_links,
    timed_reads,
)
from experiments.facts.paper import as_rows, read_figure
from experiments.simulator import StepCost, residuals
from experiments.workload import popularity
from punica.cluster import StepWork

OF_LAYERS = {"metric": "layer_latency", "system": "punica"}
TRUE = StepCost("true", base=0.004, row=2e-5, kv=1.5e-7, prefill=2e-5, rank=2e-6)


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
