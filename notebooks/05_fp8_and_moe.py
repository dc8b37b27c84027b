# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Adapters in FP8, and adapters on experts
#
# Two things that the paper of 2023 does not have and that are served today. Both change how many bytes an adapter costs
# and who shares them, which is what decides how fast many adapters are served at once. So the bytes come first, by
# arithmetic; then what was measured. The paper has no such figure: its popularity sweep (Identical, Uniform, Skewed,
# Distinct) is carried over to FP8 and to experts here.
#
# This notebook reads stored rows and measures nothing. After an edit run it again:
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/05_fp8_and_moe.py`

# %%
import pandas as pd
from IPython.display import Markdown, display

from experiments.ext_expert_tables import LAYERS
from experiments.ext_fp8 import EXPERIMENT as FP8
from experiments.ext_moe import EXPERIMENT as MOE
from experiments.harness.counted import counted, frame_of, merged
from experiments.measure.records import read_rows
from experiments.plots.frames import centre
from notebooks.stored_rows import ROOT, SideBySide, as_markdown

# %% [markdown]
# ## 1. Bytes of an adapter in FP8
#
# An adapter of rank $r$ on a projection $h_1 \to h_2$ is $r (h_1 + h_2)$ numbers. In 16 bits they take 2 bytes each; in
# FP8 one, and a scale of 4 bytes for every row of A ($r$ of them) and every column of the output ($h_2$). At rank 16
# the scales of B are a fourth of what is left of B; at rank 64 they hardly matter.

# %%
rows = []
for rank in (8, 16, 32, 64):
    for name, (h1, h2) in {"4096 -> 4096": (4096, 4096), "4096 -> 11008": (4096, 11008)}.items():
        wide, narrow = 2 * rank * (h1 + h2), rank * (h1 + h2) + 4 * (rank + h2)
        rows.append({"projection": name, "rank": rank, "16 bits (KB)": wide / 1e3, "FP8 (KB)": narrow / 1e3,
                     "FP8 / 16 bits": narrow / wide})  # fmt: skip
display(as_markdown(pd.DataFrame(rows)))

# %% [markdown]
# A batch also reads $x$ and reads and writes $y$, which FP8 does not touch. So where 64 rows share one adapter FP8 can
# gain almost nothing, and where each row has its own it can come close to the table above.
#
# ## 2. Measured: FP8 beside 16 bits
#
# A decode operator 4096 to 11008 (on a CPU an eighth as wide) in microseconds, `SGMV`: 16 bits. `FP8 e4m3` and `e5m2`:
# weights in FP8, activations as they are; `w8a8`: activations quantised as well, which is offered because files and
# other systems have it. It is not fast here: one row per adapter has no use for FP8 products, and quantising costs
# kernels.

# %%
def latencies(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Median latencies, a column for each format, and those of e4m3 over those of 16 bits."""
    chosen = centre(rows[rows["metric"] == "latency"])
    cells = chosen.pivot_table(index=["panel", "batch_size"], columns="system", values="value", sort=False)
    cells["FP8 e4m3 / SGMV"] = cells["FP8 e4m3"] / cells["SGMV"]
    return cells.reset_index()


machines = SideBySide(ROOT)
display(*machines.table(FP8, latencies))

# %% [markdown]
# On the H200 FP8 gains where each of 64 rows has its own adapter (last column), at rank 64 more than at rank 16. One
# adapter for 64 rows is slower in FP8, though the bytes are no more: upcasting its weights costs instructions. A single
# row is as fast either way. On a CPU FP8 is slower everywhere and saves memory only.

# %% [markdown]
# What rounding does: the error of an operator relative to the unrounded adapter, and of a model's logits, with the
# share of greedy tokens that change (a model with random weights: a trained one is more certain of its tokens, and in
# 32 layers, of the H200, errors add up that two layers, of the CPU, do not have).

# %%
def errors(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Relative errors and changed tokens by system; whatever else the rows hold is left out."""
    chosen = rows[rows["metric"].isin(["error", "logit_error", "changed_greedy_tokens"])]
    cells = chosen.pivot_table(index="system", columns="metric", values="value", sort=False)
    return cells.reset_index()


display(*machines.table(FP8, errors))
display(*machines.figure(FP8))

# %% [markdown]
# ## 3. Bytes of adapters on experts
#
# A mixture of experts has an adapter's matrices once for every expert, so that an adapter is large; but a token uses
# only its top-k experts, so that a step reads little of it. What counts is how many different pairs (adapter, expert)
# the rows of a batch meet. With tokens routed at random, $P$ pairs of token and expert fall on $G$ pairs of adapter and
# expert, of which $G (1 - e^{-P/G})$ are met.

# %%
rows = []
for model, (hidden, inner, experts, top_k) in LAYERS.items():
    per_pair = 2 * 16 * 3 * (hidden + inner)  # w1, w3 and w2 at rank 16, 16 bits
    for tokens in (1, 8, 32, 128):
        for adapters in (1, 4):
            possible = adapters * experts
            met = possible * (1 - (1 - 1 / possible) ** (tokens * top_k))
            rows.append({"model": model, "rows": tokens, "adapters": adapters, "pairs met": met,
                         "rows of each": tokens * top_k / met, "MB read": met * per_pair / 1e6,
                         "adapter (MB a layer)": experts * per_pair / 1e6})  # fmt: skip
display(as_markdown(pd.DataFrame(rows)))

# %% [markdown]
# Even with one adapter the rows of a decode step are spread over the experts: with 128 experts, 32 rows of one adapter
# meet most pairs, with few rows each. To the operator, Identical looks like Distinct. The popularity that decides how
# fast dense layers are counts for less with many experts and few rows than with few experts or many rows.
#
# ## 4. Measured: experts
#
# On the H200, rank 16, bfloat16, microseconds, beside the fastest public kernel of each row (`delta`: like it,
# outputs are overwritten). `alignment`: grouping the rows by adapter and expert, once a layer (-: every row by itself,
# nothing is launched).

# %%
path = ROOT / "results" / "h200" / "ext_expert_tables.csv"
experts = merged(counted(frame_of(read_rows(path))))
experts = experts.pivot_table(index="panel", columns="system", values="value", sort=False).reset_index()
experts["sum, delta"] = experts["w13, delta"] + experts["w2, delta"]
display(as_markdown(experts[["panel", "alignment", "w13", "w2", "sum, delta"]]))
display(Markdown("Ratios to the public kernels: [operator tables](../results/h200/operator_tables.md)."))

# %% [markdown]
# A layer and a step of the engine of either kind (on a CPU an eighth as wide): what the adapters add, by
# popularity. Layers are timed by the best clock of the machine, steps of the engine by the host's.
# FP8 adapters have a backbone of their own, measured in the same run.

# %%
display(*machines.figure(MOE))

# %%
def engine_steps(rows: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """A step of the engine with adapters on experts, over one without, by format of the adapters (the panels)."""
    steps = rows[(rows["metric"] == "step_latency") & (rows["statistic"] == "median")]
    keys = ["panel", "batch_size", "workload"]
    cells = steps.pivot_table(index=keys, columns="system", values="value", sort=False)
    found = cells.reindex(columns=["engine", "backbone engine"]).add_suffix(" (ms)")
    found["with / without"] = found.iloc[:, 0] / found.iloc[:, 1]
    return found.reset_index()


display(*machines.table(MOE, engine_steps))
