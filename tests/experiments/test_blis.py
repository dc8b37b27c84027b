"""BLIS's format and rule: its formulas give back what was recorded, and a rule finds the cost that made its steps."""

from pathlib import Path

import numpy as np
import pytest

from experiments.cluster.blis import DEFAULT_TIERS, Options, lora_block, recorded_steps, rule
from experiments.cluster.costs import load_cost
from experiments.ext_placement import step_rules
from experiments.harness.schema import ConfigError

RESULTS, MODEL = Path(__file__).parents[2] / "results", "llama2-7b"
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
