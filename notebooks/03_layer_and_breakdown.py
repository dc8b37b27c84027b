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
# # 3. A layer, a step, and where its time goes
#
# Between the operator (notebook 1) and a server is the step: one invocation of the model for all requests of a batch.
# This notebook asks what a step costs without LoRA (Figure 1), what a layer costs with it (Figure 10), and then takes
# whole steps of the engine apart: how much of their time is the backbone's products, attention, LoRA, or the host's
# work. A CPU and a GPU are shown side by side, where both have rows.
#
# This notebook reads stored rows and measures nothing. After an edit run it again:
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/03_layer_and_breakdown.py`

# %%
import pandas as pd
from IPython.display import display

from experiments.ext_breakdown import EXPERIMENT as BREAKDOWN
from experiments.fig01_batching import EXPERIMENT as FIG1
from experiments.fig10_layer import EXPERIMENT as FIG10
from experiments.harness.schema import model_conf
from notebooks.stored_rows import ROOT, SideBySide, as_markdown

MACHINES = SideBySide(ROOT)

# %% [markdown]
# ## 1. What batching costs without LoRA (Figure 1)
#
# A decode step reads all weights, whatever the batch: 32 rows cost hardly more than one, until the keys and values of
# their contexts weigh as much as the weights. By arithmetic, in 16 bits:

# %%
lines = []
for name in ("llama2-7b", "llama2-13b"):
    model = model_conf(name)
    weights = model.dtype.bytes * (model.backbone_parameters() - model.vocab_size * model.hidden_size)
    for context in (128, 512, 2048):
        cached = 32 * context * model.dtype.bytes * model.kv_elements()
        lines.append({"model": name, "context": context, "weights (GB)": weights / 1e9,
                      "keys and values of 32 requests (GB)": cached / 1e9,
                      "batch 32 / batch 1, by bytes": (weights + cached) / (weights + cached / 32)})  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %%
display(*MACHINES.figure(FIG1))

# %% [markdown]
# A CPU has less arithmetic for its bandwidth, so its decode steps grow with the batch: where the paper's GPU waits for
# weights, a CPU already computes.
#
# ## 2. A layer with LoRA (Figure 10)
#
# The claim is that popularity hardly matters: Distinct, with an adapter for every row, is close to Identical. On a GPU
# the gap is at least the bytes of the adapters.

# %%
display(*MACHINES.figure(FIG10))

# %%
def distinct_over_identical(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Latency of a layer under Distinct over that under Identical, at the largest batch."""
    tables = []
    for whose, frame in (("measured", rows), ("paper, A100", paper)):
        chosen = frame[frame["metric"] == "layer_latency"]
        if "statistic" in chosen:
            chosen = chosen[chosen["statistic"].isin(["median", "value"])]
        chosen = chosen[chosen["batch_size"] == chosen["batch_size"].max()]
        cells = chosen.pivot_table(index=["model", "seq_len"], columns="workload", values="value", sort=False)
        tables.append((cells["Distinct"] / cells["Identical"]).rename("Distinct / Identical").reset_index())
        tables[-1].insert(0, "whose", whose)
    return pd.concat(tables, ignore_index=True)


display(*MACHINES.table(FIG10, distinct_over_identical))

# %% [markdown]
# ## 3. Where the time of a step goes
#
# Whole steps of the engine, from scheduling to tokens: decodes, a prompt alone, and the paper's mixed step, a prompt
# that joins 31 decodes. Each runs without adapters, with one for all requests, and with one for every request. On a GPU
# a profiler sees the kernels, and every instant counts once: LoRA's shrink runs beside the base product and is counted
# only where it runs alone. On a CPU the parts are scheduling, metadata and the rest.

# %%
display(*MACHINES.figure(BREAKDOWN))

# %% [markdown]
# The step against its floor, the time in which its bytes could move (weights, keys and values, adapters) at the
# bandwidth of a plain copy on that machine. Prompts are limited by arithmetic, so for them the floor says little.

# %%
def values(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per step and case, one column per metric."""
    chosen = rows[rows["statistic"].isin(["median", "value"])]
    keys = ["model", "panel", "batch_size", "seq_len", "workload"]
    cells = chosen.pivot_table(index=keys, columns="metric", values="value", sort=False).reset_index()
    return cells.rename(columns={"panel": "step", "seq_len": "len", "workload": "adapters"}).replace({"": "none"})


def over_the_floor(rows: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """Decode steps over the time of their bytes."""
    cells = values(rows)
    cells = cells[cells["step"] == "decode"]
    found = cells[["model", "batch_size", "len", "adapters"]].copy()
    found["step (ms)"], found["floor (ms)"] = cells["step_latency"], cells["floor"]
    found["step / floor"] = cells["step_latency"] / cells["floor"]
    found["copy (GB/s)"] = cells["copy_bandwidth"]
    return found


display(*MACHINES.table(BREAKDOWN, over_the_floor))

# %% [markdown]
# ## 4. What LoRA adds to a token
#
# In a decode step every request gets one token, so every user waits longer for the next token by what LoRA adds to the
# step. Divided by all tokens of the step, it is that much less.

# %%
def price(rows: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """What adapters add to each kind of step."""
    cells = values(rows)
    cells = cells[cells["adapters"] != "none"]
    found = cells[["model", "step", "batch_size", "len", "adapters"]].copy()
    found["added to the step (ms)"] = cells["added_latency"]
    found["per token of the step (µs)"] = cells["added_per_token"]
    found["step / without adapters"] = cells["step_latency"] / (cells["step_latency"] - cells["added_latency"])
    return found


display(*MACHINES.table(BREAKDOWN, price))

# %% [markdown]
# What the host does for a step: choosing requests and laying out rows; the tables of the step (metadata); and on a GPU
# launching it, and then, ahead of the device, the tables of the next step. What happens ahead costs the step nothing.

# %%
def of_the_host(rows: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of the host, per step."""
    cells = values(rows)
    phases = [name for name in ("host_schedule", "host_metadata", "host_launch", "host_ahead") if name in cells]
    found = cells[["model", "step", "batch_size", "len", "adapters", *phases]].copy()
    before = [name for name in phases if name != "host_ahead"]
    found["before the device works (% of the step)"] = 100 * cells[before].sum(axis=1) / cells["step_latency"]
    return found.rename(columns={name: f"{name.removeprefix('host_')} (ms)" for name in phases})


display(*MACHINES.table(BREAKDOWN, of_the_host))

# %% [markdown]
# ## 5. Verdicts on the paper's claims

# %%
display(*MACHINES.verdicts(["1", "10"]))
