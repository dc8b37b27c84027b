"""The mutation table: for each claim a change of rows that turns its verdict; arithmetic alone cannot be turned."""

import pandas as pd
import pytest
from claim_rows import frame, serving, verdict_of

from experiments.claims import CLAIMS, VERDICTS

REPRODUCED, SHAPE, NOISE, DIFFERS, ARITHMETIC, *_ = VERDICTS

# claim, figures and query of the rows to change, and the verdict of each factor
CHANGES = [
    ("C01", "1", "panel == 'decode' and seq_len == 128 and batch_size == 32", {1.5: DIFFERS}),
    ("C02", "1", "panel == 'decode' and seq_len == 2048 and batch_size == 32", {0.65: SHAPE, 1.5: DIFFERS}),
    ("C03", "1", "panel == 'decode' and seq_len == 1536 and batch_size == 32", {0.96: SHAPE, 0.8: DIFFERS}),
    ("C04", "1", "panel == 'prefill' and batch_size > 16", {0.5: DIFFERS}),
    ("C06", "7", "workload == 'Distinct' and batch_size == 64 and unit == 'FLOP/s'", {0.6: SHAPE, 0.4: DIFFERS}),
    ("C07", "7", "workload == 'Identical' and batch_size == 30", {0.5: DIFFERS}),
    ("C07", "7", "workload == 'Identical' and batch_size == 64", {0.5: DIFFERS}),
    ("C08", "7", "workload == 'Skewed' and batch_size == 64", {0.92: SHAPE}),
    ("C08", "7", "workload == 'Distinct' and batch_size == 64", {2.0: DIFFERS}),
    ("C09", "8", "workload == 'Distinct' and batch_size == 64 and system == 'SGMV'", {0.5: SHAPE, 1.5: DIFFERS}),
    ("C10", "8", "workload == 'Skewed' and batch_size == 64 and system == 'SGMV'", {1.25: DIFFERS}),
    ("C11", "8", "workload == 'Identical' and batch_size == 64 and system == 'SGMV'", {1.105: SHAPE, 1.3: DIFFERS}),
    ("C12", "8", "workload == 'Identical' and system == 'SGMV' and batch_size == 5", {1.5: DIFFERS}),
    ("C13", "8", "system == 'Loop'", {0.68: SHAPE, 0.25: DIFFERS}),
    ("C14", "8, README backbone-vs-sgmv", "system == 'Loop'", {0.1: SHAPE}),
    ("C14", "8", "system == 'Loop' and workload == 'Identical' and batch_size == 64", {1.3: DIFFERS}),
    ("C15", "8", "system == 'BMM' and batch_size == 40 and workload == 'Skewed'", {1.2: DIFFERS}),
    ("C16", "8", "system == 'Gather-BMM' and batch_size == 20 and workload == 'Skewed'", {0.8: DIFFERS}),
    ("C16", "8", "system == 'Gather-BMM' and batch_size == 32 and workload == 'Skewed'", {0.8: DIFFERS}),
    ("C17", "8", "system == 'BMM' and workload == 'Identical'", {0.8: DIFFERS}),
    ("C19", "9", "batch_size == 1 and rank == 64 and workload == 'Distinct'", {1.5: DIFFERS}),
    ("C20", "9", "batch_size == 64 and rank == 64 and workload == 'Distinct'", {0.8: SHAPE, 2.0: DIFFERS}),
    ("C21", "9", "batch_size == 64 and rank == 32 and workload == 'Uniform'", {1.3: DIFFERS}),
    ("C22", "10", "batch_size == 32 and seq_len == 512 and workload == 'Distinct'", {1.16: SHAPE, 1.3: DIFFERS}),
    ("C23", "10", "batch_size == 32 and seq_len == 2048 and workload == 'Uniform'", {0.7: DIFFERS}),
    ("C24", "10", "batch_size == 32 and seq_len == 512 and workload == 'Distinct'", {1.05: SHAPE}),
    ("C24", "10", "batch_size == 32 and seq_len == 512 and workload == 'Skewed'", {1.2: DIFFERS}),
    ("C25", "10", "batch_size == 32 and workload == 'Identical'", {2.0: DIFFERS}),
    ("C26", "11", "system == 'punica' and workload == 'Distinct' and model == '7B'", {0.98: SHAPE, 0.6: DIFFERS}),
    ("C27", "11", "system == 'punica' and workload == 'Skewed' and model == '13B'", {0.97: SHAPE, 0.6: DIFFERS}),
    ("C28", "11", "system == 'punica' and workload == 'Distinct' and model == '13B'", {0.88: SHAPE, 0.7: DIFFERS}),
    ("C29", "11", "system == 'punica'", {0.8: SHAPE, 0.5: DIFFERS}),
    ("C30", "11", "system == 'punica'", {0.65: SHAPE, 0.3: DIFFERS}),
    ("C31", "11", "system == 'punica' and model == '7B'", {0.9: SHAPE, 1.5: DIFFERS}),
    ("C32", "11", "system == 'punica' and model == '7B'", {1.2: SHAPE}),
    ("C32", "11", "system == 'hf_peft'", {20.0: DIFFERS}),
    ("C33", "11", "system == 'continuous_batching' and workload == 'Distinct'", {1.5: SHAPE, 3.0: DIFFERS}),
    ("C34", "11", "system == 'continuous_batching' and workload == 'Uniform'", {1.06: SHAPE, 1.2: DIFFERS}),
    ("C36", "11", "metric == 'stream_mean_batch_size'", {0.9: DIFFERS}),
    ("C37", "11", "system == 'static_batching' and workload == 'Identical'", {0.8: REPRODUCED, 1.5: DIFFERS}),
    ("C38", "12", "system == 'punica' and workload == 'Distinct'", {0.96: SHAPE, 0.6: DIFFERS}),
    ("C39", "12", "system == 'punica'", {0.8: SHAPE, 0.5: DIFFERS}),
    ("C40", "12", "system == 'punica' and workload == 'Identical'", {0.8: DIFFERS}),
    ("C41", "11", "metric == 'implied_time_per_step'", {2.0: SHAPE}),
    ("C41", "11", "system == 'punica' and metric == 'throughput'", {0.5: DIFFERS}),
    ("C42", "text 5.2", "panel == 'layer'", {1.2: SHAPE}),
    ("C42", "text 5.2", "panel == 'model' and system == 'punica' and unit == 'ms'", {2.0: SHAPE, 3.0: DIFFERS}),
    ("C43", "text 5.2", "panel == 'overlap' and metric == 'load_time'", {4.0: SHAPE, 8.0: DIFFERS}),
    ("C45", "text 6", "system == 'unfused'", {0.9: SHAPE}),
    ("C45", "text 6", "system == 'fused'", {6.0: DIFFERS}),
    ("C46", "13", "metric == 'share_of_active_cells_batch_ge_31'", {0.9: SHAPE, 0.8: DIFFERS}),
    ("C47", "13", "metric == 'throughput_10s_mean' and t_s >= 2000", {0.8: SHAPE, 0.4: DIFFERS}),
    ("C48", "13", "metric == 'max_active_gpus'", {0.6: SHAPE}),
    ("C48", "13", "metric == 'active_gpus_60s_mean' and t_s >= 2700", {2.0: DIFFERS}),
    ("C49", "13", "metric == 'gpu_batch_size_60s_mean' and t_s in (600, 1200, 1800, 2400)", {0.0: DIFFERS}),
    ("C50", "13", "metric == 'active_gpus_60s_mean'", {0.9: SHAPE, 1.2: DIFFERS}),
    ("C51", "README backbone-vs-sgmv", "workload == 'none' and batch_size == 64", {1.1: SHAPE, 1.3: DIFFERS}),
    ("C52", "README backbone-vs-sgmv", "system == 'SGMV'", {1.5: SHAPE, 2.0: DIFFERS}),
]  # fmt: skip
MACHINE = ("1", "7", "8", "9", "README backbone-vs-sgmv", "text 5.2", "text 6")
"""Figures that tell a machine's speeds."""
ARITHMETIC_ALONE = {"C05", "C18", "C35", "C44"}
SHAPE_AT_MOST = {"C23", "C25", "C47"}


def with_mean_batch(rows):
    """``rows`` and the mean batch of a full stream, which the paper has as a replay only."""
    served = rows[(rows["figure"] == "11") & (rows["model"] == "7B") & (rows["system"] == "punica")]
    stream = {"stream_mean_batch_size": 31.1, "stream_requests": 1024, "stream_steps": 31416}
    return pd.concat([rows, *(served.assign(metric=name, value=n) for name, n in stream.items())], ignore_index=True)


SINGLE = [(*change, *pair) for *change, words in CHANGES for pair in words.items()]
LAST = {change[0]: change for change in SINGLE}.values()
"""A change of each claim, for every run of the tests; the others are slow tests."""


@pytest.mark.parametrize(
    ("id", "figures", "query", "factor", "verdict"),
    [
        pytest.param(*change, id=f"{change[0]}-x{change[3]}", marks=() if change in LAST else pytest.mark.slow)
        for change in SINGLE
    ],
)
def test_changed_rows_change_the_verdict(paper_rows, id, figures, query, factor, verdict):
    changed, own = with_mean_batch(paper_rows), figures.split(", ")
    if id not in ("C25", "C50"):  # which need two figures
        changed = changed[changed["figure"].isin({*own, *MACHINE})]
    assert verdict_of(changed, id).verdict == (SHAPE if id in SHAPE_AT_MOST else REPRODUCED)
    hit = changed[changed["figure"].isin(own)].query(query).index
    assert len(hit) > 0
    changed.loc[hit, "value"] *= factor
    judged = verdict_of(changed, id)
    assert judged.verdict == verdict
    assert bool(judged.why) == (verdict == DIFFERS)


def test_every_claim_but_arithmetic_can_be_turned_to_differ():
    assert {id for id, *_, verdict in SINGLE if verdict == DIFFERS} == set(CLAIMS) - ARITHMETIC_ALONE


@pytest.mark.parametrize("id", sorted(ARITHMETIC_ALONE))
def test_no_rows_turn_arithmetic(paper_rows, id):
    assert verdict_of(paper_rows.assign(value=paper_rows["value"] * 3), id).verdict == ARITHMETIC


TIE = {
    "punica": (1000, 1000, 1000, 1000), "continuous_batching": (76, 78, 87, 1000),
    "static_batching": (70, 75, 80, 640), "hf_peft": (20, 20, 20, 80),
}  # fmt: skip


def test_a_tie_is_not_more():
    """ "Slightly faster" and "in this order" are not met by the same number; 1.0 is allowed by the shape tests."""
    faster, slowest = {**TIE, "continuous_batching": (76, 78, 87, 1010)}, {**TIE, "static_batching": (70, 75, 80, 80)}
    for id in ("C31", "C32"):
        found = [verdict_of(frame(serving(**systems)), id).verdict for systems in (TIE, faster)]
        assert found == [SHAPE, REPRODUCED]
    assert verdict_of(frame(serving(**slowest)), "C32").verdict == DIFFERS


def test_an_equal_growth_at_both_lengths_is_not_a_reduced_effect(paper_rows):
    """C23 at exactly 0 percentage points."""
    changed = paper_rows[paper_rows["figure"].isin(["10"])].copy()
    short = changed[changed["seq_len"] == 512]
    same = pd.concat([short, short.assign(seq_len=2048, panel="")], ignore_index=True)
    assert verdict_of(same, "C23").verdict == DIFFERS
    longer = same["value"].where((same["seq_len"] == 512) | (same["batch_size"] == 1), same["value"] * 1.01)
    assert verdict_of(same.assign(value=longer), "C23").verdict == SHAPE
