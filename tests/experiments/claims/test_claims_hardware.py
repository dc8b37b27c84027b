"""Verdicts on loading adapters (C42, C43) and on 70B (C38 to C40): beside this machine's link, step and GPUs."""

import pandas as pd
import pytest
from claim_rows import frame, laptop, verdict_of

from experiments.claims import VERDICTS

REPRODUCED, SHAPE, _, DIFFERS, _, _, _, NOT_MEASURED, NOT_TESTABLE, _ = VERDICTS
STAND_IN = {"model": "llama-small", "hardware": "cpu", "size": 4_997_120, "load": 0.75, "link": 0.3, "step": 54.0}


def loading(load=1.6, link=1.5, step=20.0, stall=0.1, size=79_953_920, model="llama2-7b", hardware="h200"):
    """Rows of section 5.2 as an H200 with PCIe Gen5 could give them: 80 MB at 53 GB/s."""
    fixed = {"figure": "text 5.2", "model": model, "hardware": hardware, "rank": 16}
    cells = [
        ("layer", "punica", "load_time", 60, "us"), ("model", "punica", "load_time", load, "ms"),
        ("model", "punica", "bytes", size, "byte"), ("model", "per_tensor", "load_time", 9.0, "ms"),
        ("model", "link", "load_time", link, "ms"), ("model", "link", "bandwidth", size / link / 1e6, "GB/s"),
        ("overlap", "punica", "load_time", load, "ms"), ("overlap", "punica", "step_latency_alone", step, "ms"),
        ("overlap", "punica", "stall", stall, "ms"), ("overlap", "per_tensor", "stall", 8.0, "ms"),
    ]  # fmt: skip
    return frame([
        laptop(panel=panel, system=system, metric=metric, value=value, unit=unit, **fixed,
               **({"workload": "Distinct", "batch_size": 32} if panel == "overlap" else {"batch_size": None}))
        for panel, system, metric, value, unit in cells
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("id", "changed", "verdict"),
    [
        ("C42", {"step": 30.0}, SHAPE),  # not reproduced: a layer takes 60 us
        ("C42", {"step": 10.0}, DIFFERS),  # 16 % of the step
        ("C42", {"load": 7.4, "step": 120.0}, SHAPE),
        ("C42", {"load": 7.6, "step": 120.0}, DIFFERS),  # more than five times the plain copy
        ("C42", {"load": 25.0, "link": 20.0, "step": 160.0}, DIFFERS),  # a slow link takes too much of this step
        ("C42", STAND_IN, SHAPE),
        ("C43", {"step": 30.0}, REPRODUCED),
        ("C43", {"step": 30.0, "stall": 1.6}, DIFFERS),  # the rows wait for the load
        ("C43", {"step": 3.0}, DIFFERS),
        ("C43", STAND_IN, NOT_TESTABLE),
    ],
)
def test_loads_are_compared_with_this_link_and_with_a_step(id, changed, verdict):
    assert verdict_of(loading(**changed), id).verdict == verdict


def test_microseconds_of_a_stand_in_are_not_compared_with_the_papers():
    ours, stand_in = (verdict_of(loading(**changed), "C42").quantities for changed in ({}, STAND_IN))
    shares = {"link_efficiency": 1.5 / 1.6, "load_over_step": 0.08}
    assert ours == pytest.approx({**shares, "layer_us": 60, "model_ms": 1.6})
    assert stand_in == pytest.approx({"link_efficiency": 0.4, "load_over_step": 0.75 / 54})


# 70B counts as the paper's where eight GPUs share it; on fewer the shape is judged


def on_gpus(paper_rows, gpus, model="llama2-70b"):
    """The paper's Figure 12 as if we had measured it on that many H200s, under both index rules."""
    rows = paper_rows[(paper_rows["figure"] == "12") & (paper_rows["metric"] == "throughput")]
    rows = pd.concat([rows, rows[rows["system"] == "punica"].assign(system="punica_last_admitted")], ignore_index=True)
    return rows.assign(panel=f"70B Model, tp {gpus}", model=model, hardware="h200", kind="measured")


@pytest.mark.parametrize("id", ["C38", "C39", "C40", "C30"])
@pytest.mark.parametrize(("gpus", "verdict"), [(8, REPRODUCED), (2, SHAPE)])
def test_the_papers_values_reproduce_on_eight_gpus_alone(paper_rows, id, gpus, verdict):
    rows = on_gpus(paper_rows, gpus)
    judged = verdict_of(rows, id)
    assert (judged.verdict, "on 2 GPUs" in judged.our_value) == (verdict, gpus == 2)
    if gpus == 2 and id != "C30":
        slow = rows["system"].eq("punica") & rows["workload"].ne("Uniform")
        assert verdict_of(rows.assign(value=rows["value"].where(~slow, rows["value"] / 2)), id).verdict == DIFFERS


def test_of_several_numbers_of_gpus_the_most_are_judged(paper_rows):
    both = pd.concat([on_gpus(paper_rows, 8), on_gpus(paper_rows, 2).assign(value=1.0)], ignore_index=True)
    assert verdict_of(both, "C38").verdict == REPRODUCED


def test_speedups_are_judged_without_a_model_that_lacks_a_workload_and_name_it(paper_rows):
    half = on_gpus(paper_rows, 2).query("workload != 'Uniform'")
    assert verdict_of(half, "C30").verdict == NOT_MEASURED
    others = paper_rows[paper_rows["figure"] == "11"].assign(hardware="h200", kind="measured")
    judged = verdict_of(pd.concat([others, half], ignore_index=True), "C30")
    assert judged.verdict == REPRODUCED
    assert "left out: punica was not measured on Uniform (llama2-70b)" in judged.our_value


def test_a_smaller_model_on_ranks_is_no_70b_and_no_figure_11(paper_rows):
    small = on_gpus(paper_rows, 2, model="llama2-7b")
    assert [verdict_of(small, id).verdict for id in ("C38", "C28")] == [NOT_MEASURED] * 2
    assert verdict_of(small.assign(model="llama-tiny", hardware="cpu"), "C38").verdict == NOT_TESTABLE
