"""Verdicts on loading adapters (C42, C43): against this machine's link, its decode step, and the paper's model."""

import pytest
from claim_rows import frame, loading, verdict_of

from experiments.claims import VERDICTS

REPRODUCED, SHAPE, _, DIFFERS, _, _, _, NOT_MEASURED, NOT_TESTABLE, _ = VERDICTS


def h200_loading(load=1.6, link=1.5, step=20.0, stall=0.1, size=79_953_920, **more):
    """Rows of section 5.2 as an H200 with PCIe Gen5 could give them: 80 MB at 53 GB/s."""
    fixed = {"model": "llama2-7b", "hardware": "h200", "kind": "measured", "statistic": "median", **more}
    return frame(
        [
            loading("layer", "punica", "load_time", 60, "us", **fixed),
            loading("model", "punica", "load_time", load, **fixed),
            loading("model", "punica", "bytes", size, "byte", **fixed),
            loading("model", "per_tensor", "load_time", 9.0, **fixed),
            loading("model", "link", "load_time", link, **fixed),
            loading("model", "link", "bandwidth", size / link / 1e6, "GB/s", **fixed),
            loading("overlap", "punica", "load_time", load, **fixed),
            loading("overlap", "punica", "step_latency_alone", step, **fixed),
            loading("overlap", "punica", "stall", stall, **fixed),
            loading("overlap", "per_tensor", "stall", 8.0, **fixed),
        ]
    )


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"step": 30.0}, SHAPE),  # not reproduced: a layer takes 60 us
        ({"step": 10.0}, DIFFERS),  # 16 % of the step
        ({"load": 7.4, "step": 120.0}, SHAPE),
        ({"load": 7.6, "step": 120.0}, DIFFERS),  # more than five times the plain copy
        ({"load": 25.0, "link": 20.0, "step": 170.0}, SHAPE),
        ({"load": 25.0, "link": 20.0, "step": 160.0}, DIFFERS),  # a slow link takes too much of this step
    ],
    ids=["layer", "long", "five-copies", "more-copies", "slow-link", "slow-link-long"],
)
def test_loads_are_compared_with_this_link_and_with_a_step(changed, verdict):
    assert verdict_of(h200_loading(**changed), "C42").verdict == verdict


def test_loads_say_what_they_were_compared_with():
    assert verdict_of(h200_loading(), "C42").our_value == (
        "60 us per layer, 1.6 ms per model (llama2-7b, 80 MB): 0.080 of a 20 ms step; 0.94 of a plain copy's 53.3 GB/s"
    )
    assert verdict_of(h200_loading(), "C43").our_value == (
        "1.6 ms / 20 ms = 0.080 (llama2-7b); the step beside a load +0.5 %"
    )


STAND_IN = {"model": "llama-small", "hardware": "cpu", "size": 4_997_120, "load": 0.75, "link": 0.3, "step": 54.0}


def test_microseconds_of_a_stand_in_are_not_compared_with_the_papers():
    verdict = verdict_of(h200_loading(**STAND_IN), "C42")
    assert verdict.quantities == pytest.approx({"link_efficiency": 0.4, "load_over_step": 0.75 / 54})
    assert verdict.verdict == SHAPE


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"step": 30.0}, REPRODUCED),
        ({"step": 20.0}, SHAPE),
        ({"step": 30.0, "stall": 1.6}, DIFFERS),  # the rows wait for the load
        ({"step": 3.0}, DIFFERS),
    ],
    ids=["hidden", "shorter-step", "stall", "too-short"],
)
def test_a_load_hides_when_it_is_short_and_the_step_does_not_wait(changed, verdict):
    assert verdict_of(h200_loading(**changed), "C43").verdict == verdict


def test_a_cpu_has_nothing_to_hide_a_load_behind():
    verdict = verdict_of(h200_loading(**STAND_IN), "C43")
    assert verdict.verdict == NOT_TESTABLE
    assert verdict.reason == (
        "a load must run beside a step, and on a CPU it runs on the cores of the step; measured 0.75 ms / 54 ms = "
        "0.014 (llama-small); the step beside a load +0.2 %"
    )


@pytest.mark.parametrize(("panel", "id"), [("layer", "C42"), ("model", "C42"), ("overlap", "C42"), ("overlap", "C43")])
def test_loading_needs_its_panels(panel, id):
    rows = h200_loading()
    verdict = verdict_of(rows[rows["panel"] != panel], id)
    assert verdict.verdict == NOT_MEASURED
    assert f"panel={panel}" in verdict.reason
