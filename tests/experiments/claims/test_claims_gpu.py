"""Figures 1 and 10 of both models, as a GPU gives them at scale=gpu: every claim about them is judged."""

import pandas as pd
import pytest
from claim_rows import frame, laptop, verdict_of

from experiments.claims import VERDICTS
from experiments.workload.popularity import PAPER_WORKLOADS

REPRODUCED, SHAPE, _, DIFFERS, *_ = VERDICTS
MODELS = {"llama2-7b": 6.0, "llama2-13b": 10.0}
BATCHES = (1, 2, 4, 8, 16, 32)
GPU = {"hardware": "h200", "scale": "gpu", "kind": "measured"}


def steps(growth, prefill_power=1.0):
    """Figure 1: decode grows by `growth[length]` from batch 1 to 32, prefill as its tokens to the power."""
    rows = []
    for model, base in MODELS.items():
        fixed = {"metric": "step_latency", "system": "backbone", "model": model, **GPU}
        for length, factor in growth.items():
            for batch in BATCHES:
                place = {**fixed, "batch_size": batch, "seq_len": length}
                rows.append(laptop("1", panel="decode", value=base * (1 + (factor - 1) * (batch - 1) / 31), **place))
                rows.append(laptop("1", panel="prefill", value=base * (batch * length / 128) ** prefill_power, **place))
    return frame(rows)


def layers(short=1.4, long=1.9, distinct=1.1):
    """Figure 10: growth from batch 1 to 32 at len 512 and 2048, and Distinct over Identical at batch 32."""
    rows = []
    for model, base in MODELS.items():
        for length, growth in ((512, short), (2048, long)):
            for workload in PAPER_WORKLOADS:
                for batch in BATCHES:
                    value = 30 * base * (1 + (growth - 1) * (batch - 1) / 31)
                    value *= distinct if workload == "Distinct" and batch == 32 else 1.0
                    fixed = {**GPU, "timer": "cuda_graph", "unit": "us", "metric": "layer_latency", "rank": 16}
                    place = {"model": model, "batch_size": batch, "seq_len": length, "workload": workload}
                    panel = f"{'7B' if '7b' in model else '13B'}, len={length}"
                    rows.append(laptop("10", panel=panel, system="punica", value=value, **fixed | place))
    return frame(rows)


GROWTH = {128: 1.1, 512: 1.4, 1024: 1.7, 1536: 2.0, 2048: 2.3}


@pytest.mark.parametrize(
    ("id", "rows", "verdict"),
    [
        ("C01", steps(GROWTH), REPRODUCED),
        ("C01", steps({**GROWTH, 128: 1.7}), DIFFERS),
        ("C02", steps(GROWTH), REPRODUCED),
        ("C02", steps({**GROWTH, 2048: 3.5}), DIFFERS),
        ("C03", steps(GROWTH), REPRODUCED),
        ("C03", steps({**GROWTH, 1024: 1.2}), DIFFERS),
        ("C04", steps(GROWTH), REPRODUCED),
        ("C04", steps(GROWTH, prefill_power=0.5), DIFFERS),
        ("C22", layers(), REPRODUCED),
        ("C22", layers(short=1.9), DIFFERS),
        ("C23", layers(), SHAPE),
        ("C23", layers(long=1.3), DIFFERS),
        ("C24", layers(), REPRODUCED),
        ("C24", layers(distinct=1.3), DIFFERS),
    ],
)
def test_rows_of_a_gpu_decide_the_claims(id, rows, verdict):
    wobble = [rows.assign(repeat=i, value=rows["value"] * (1 + 1e-3 * (rows.index * (5 + i) % 7))) for i in range(3)]
    found = verdict_of(pd.concat(wobble, ignore_index=True), id)
    assert found.verdict == verdict
    assert "llama2-7b" in found.our_value
    assert found.interval


def test_the_scale_of_a_gpu_counts_before_a_laptops_and_behind_the_papers():
    both = [steps({**GROWTH, 128: growth}).assign(scale=name) for name, growth in (("laptop", 5.0), ("gpu", 1.1))]
    assert verdict_of(pd.concat(both), "C01").our_value.startswith("1.10")
    paper = steps({**GROWTH, 128: 1.3}).assign(scale="paper")
    assert verdict_of(pd.concat([*both, paper]), "C01").our_value.startswith("1.30")
