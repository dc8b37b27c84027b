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
# # 0. What was claimed, what holds where
#
# The paper ([arXiv 2310.18547](https://arxiv.org/abs/2310.18547)) says that one GPU can serve many LoRA adapters at the
# throughput of one. Its claims are quantities with a place in the paper. This notebook shows **which claims there
# are**, **what became of each on every recorded machine**, **how a verdict is made**, and **where a number comes
# from**.
#
# It reads the committed verdicts and rows and measures nothing. After an edit run it again:
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/00_overview.py`

# %%
import pandas as pd
from IPython.display import Markdown, display

from experiments.claims.bounds import described, read_bounds
from experiments.claims.judge import VERDICTS
from experiments.facts.paper import read_claims
from experiments.measure.records import read_rows
from experiments.report.expected import read_expected
from experiments.report.machines import recorded_folders
from notebooks.stored_rows import ROOT, as_markdown

PAPER = ROOT / "paper_results"
FOLDERS = {folder.name: folder for folder in recorded_folders(ROOT / "results")}
JUDGED = {name: pd.read_csv(folder / "claims.csv", keep_default_na=False) for name, folder in FOLDERS.items()}

# %% [markdown]
# ## 1. What was claimed
#
# A claim is a sentence of the paper made into a quantity. Most are ratios, since absolute times belong to the paper's
# A100. By figure or section:

# %%
claims = pd.DataFrame([vars(claim) for claim in read_claims(PAPER)])
by_figure = claims.groupby("figure", sort=False)["id"].agg(claims="size", which=", ".join).reset_index()
display(as_markdown(by_figure))

# %% [markdown]
# ## 2. What holds where
#
# A column per recorded machine, a line per verdict. On a CPU a smaller model plays the paper's 7B, and what the paper
# says about a GPU's launches or bandwidth need not hold there. A claim that differs is a result: `docs/results-*.md`
# says why.

# %%
counts = {name: table["verdict"].value_counts() for name, table in JUDGED.items()}
lines = [
    {"verdict": verdict, **{name: int(found.get(verdict, 0)) for name, found in counts.items()}}
    for verdict in VERDICTS
    if any(verdict in found for found in counts.values())
]
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# Claim by claim:

# %%
first = next(iter(JUDGED.values()))
display(as_markdown(first[["id", "statement", "paper_value"]].assign(**{n: t["verdict"] for n, t in JUDGED.items()})))

# %% [markdown]
# The headline figure:
#
# ![Figure 11 on an H200 beside the paper](../figures/h200/fig11_textgen.png)

# %% [markdown]
# ## 3. How to read a verdict
#
# Every claim has two tests, both as data in `paper_results/claim_bounds.csv`: the **relation** that the paper states,
# and the **shape** that should survive a change of hardware. Both hold: *reproduced*. The shape alone: *shape holds*.
# The shape fails: *differs*, with the mechanism as far as it is known. A bound
# inside the span of the repeats: *within noise*. What is replayed or computed *holds by arithmetic*.
#
# One claim on every machine, with the range that another run should give (`make check` holds yours against it):

# %%
CHOSEN = "C01"
bounds = read_bounds(PAPER)[CHOSEN]
statement = claims.set_index("id").loc[CHOSEN]
display(Markdown(f"**{CHOSEN}** {statement['statement']}. The paper: {statement['expected_value']}."))
display(Markdown("; ".join(f"{test}: `{described(found)}`" for test, found in bounds.items())))
lines = []
for name, table in JUDGED.items():
    one = table.set_index("id", drop=False).loc[CHOSEN]
    (expected,) = read_expected(FOLDERS[name])[0].query("claim == @CHOSEN").itertuples()
    spread = f"{expected.low:.3g} to {expected.high:.3g}"
    lines.append({"machine": name, "quantity": one["quantities"], "span of repeats": one["interval"] or "-",
                  "expected": spread, "verdict": one["verdict"]})  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 4. Where a number comes from
#
# A number is a row of a CSV file. It names the settings (`config_hash`), the code that decides it (`source_hash`), the
# commit, the machine and the versions. Rows of older source are judged too, and counted in every report. One row of
# Figure 1 on each machine:

# %%
SHOWN = ("system", "model", "batch_size", "seq_len", "metric", "value", "unit", "statistic", "timer", "scale", "repeat",
         "config_hash", "source_hash", "commit", "date", "device", "python", "torch", "triton")  # fmt: skip
rows = {name: read_rows(folder / "fig01_batching.csv")[0] for name, folder in FOLDERS.items()}
lines = [{"column": key, **{name: getattr(row, key) for name, row in rows.items()}} for key in SHOWN]
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 5. Where the paper disagrees with itself
#
# Text, figures and released code disagree in places. What this repository does about each:

# %%
display(as_markdown(pd.read_csv(PAPER / "disagreement_answers.csv", usecols=["disagreement", "answer"])))

# %% [markdown]
# Next: [1. SGMV, and why batching many adapters pays](01_sgmv_and_batching.ipynb), or
# [7. Extend it](07_extend_it.ipynb) with a workload, a system and a rule of your own.
