"""Cost models of steps and adapter loads, fitted to rows of a known cost, the paper's, recorded ones; and BLIS's."""

import numpy as np
import pandas as pd
import pytest
from fakes import PAPER

from experiments.cluster import costs
from experiments.cluster.blis import DEFAULT_TIERS, Options, lora_block, recorded_steps, rule
from experiments.cluster.costs import load_cost
from experiments.ext_placement import step_rules
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import ConfigError
from experiments.simulator import StepCost, residuals
from experiments.workload import popularity
from punica.cluster import StepWork

OF_LAYERS = {"metric": "layer_latency", "system": "punica"}
TRUE = StepCost("true", base=0.004, row=2e-5, kv=1.5e-7, prefill=2e-5, rank=2e-6)


@pytest.mark.parametrize(("role", "num_layers"), [("7B", 32), ("13B", 40)])
def test_residuals_of_the_fit_are_those_of_its_rows(role, num_layers):
    fitted = costs.paper_a100(PAPER, role)
    layers = fitted.residuals["layers"]
    assert len(layers.relative) == 4 * 2 * 32
    head = 2 * costs.model_bytes(f"llama2-{role.lower()}").head / 1935e9
    steps = costs.timed(as_rows(read_figure(PAPER, "10")), role, costs.decoding, num_layers, head, **OF_LAYERS)
    assert residuals(fitted.cost, steps).rms == layers.rms < 0.08
    assert layers.largest < 0.3


def test_a_row_of_figure_10_is_a_step_of_32_layers():
    rows = as_rows(read_figure(PAPER, "10"))
    published = rows.query("model == '7B' and workload == 'Uniform' and batch_size == 9 and seq_len == 512")["value"]
    steps = costs.timed(rows, "7B", costs.decoding, 32, 1e-3, **OF_LAYERS)
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
    fitted = costs.recorded_cost(own_rows(), "h200", "llama2-7b")
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
        for metric, value in ((costs.FROM_DISK, 1e3 * seconds + 10), (costs.FROM_MEMORY, 10.0))
    ]


def test_a_line_over_the_ranks_and_a_proportion_are_found():
    links = [link(rank, 0.5 + 0.25 * rank) for rank in (8, 16, 64)]
    links += [link(16, 4500.0, panel="overlap", workload="Distinct", unit="us")]
    others = ({"panel": "layer"}, {"system": "pageable"}, {"statistic": "p90"}, {"metric": "host_time"})
    links += [link(8, 9.0, **columns) for columns in others]
    reads = [*read(0.16), *read(0.89, workload="Uniform", disturbed=True), read(0.05, workload="Skewed")[1]]
    timed = costs.timed_links(pd.DataFrame(links)), costs.timed_reads(pd.DataFrame(reads))
    found = costs.fitted_loads("a machine", *timed)
    assert found.cost.host_seconds(32) == pytest.approx(8.5e-3)
    assert found.cost.disk_seconds(32) == pytest.approx(0.32)
    assert max(one.largest for one in found.residuals.values()) < 1e-9


RESULTS, MODEL = PAPER.parent / "results", "llama2-7b"
PLAIN, ADAPTERS = np.array([4.0, 9.0, 6.0]), np.array([1, 32, 7])
MADE = {True: PLAIN * (1 + 0.02 * ADAPTERS), False: PLAIN + 0.02 * ADAPTERS}


@pytest.mark.parametrize("relative", MADE)
def test_a_rule_finds_its_coefficient_and_the_other_one_does_not(relative):
    steps = np.stack([PLAIN, MADE[relative], ADAPTERS], axis=1)
    each, errors = rule(steps, relative)
    assert (each, errors.largest) == (pytest.approx(0.02), pytest.approx(0, abs=1e-12))
    assert rule(steps, not relative)[1].largest > 1e-3
    assert rule(steps, relative, each=0.0)[1].relative == pytest.approx(PLAIN / MADE[relative] - 1)


def test_the_file_gives_back_recorded_loads_and_steps():
    steps = recorded_steps(RESULTS, "h200", MODEL)
    block = lora_block(RESULTS, Options(machine="h200", tenants=3, out="x"))
    load = block["load_base_latency_us"] + 16 * block["footprint_bytes_per_rank"] / block["load_bandwidth_bytes_us"]
    assert load == pytest.approx(1e6 * load_cost(RESULTS, "h200", MODEL).host_seconds(16))
    assert block["step_overhead_tiers"] == {16: {"k6": rule(steps[16], relative=True)[0], "k7": 1.0}}
    assert {*steps[16][:, 2]} == {1, 32}
    assert (steps[16][:, 1] > steps[16][:, 0]).all()
    assert [adapter["rank"] for adapter in block["adapters"]] == [16] * 3
    with pytest.raises(ConfigError, match=f"no recorded loads of {MODEL}"):
        lora_block(RESULTS, Options(machine="cpu", out="x"))


def test_placement_has_the_errors_of_each_rule_on_the_recorded_steps():
    steps = recorded_steps(RESULTS, "h200", MODEL)[16]
    found = {reading.metric: reading.value for reading in step_rules(steps, 16)}
    assert found["residual_rms_blis"] == rule(steps, relative=True)[1].rms < found["residual_rms_blis_defaults"]
    assert found["residual_largest_by_rank"] == rule(steps, relative=False)[1].largest
    assert found["residual_largest_blis_defaults"] == rule(steps, relative=True, each=DEFAULT_TIERS[16])[1].largest
