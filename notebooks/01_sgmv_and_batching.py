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
# # 1. SGMV, and why batching many adapters pays
#
# One backbone serves many LoRA adapters. Each row of a batch may use a different adapter, yet the batch should run as
# one. This notebook shows **what** the operator for that, SGMV (*segmented gather matrix-vector multiplication*),
# computes; **why** batching pays, by counting bytes; and **how fast** it is, in Figures 7, 8 and 9 of the paper
# ([arXiv 2310.18547](https://arxiv.org/abs/2310.18547)) drawn from stored rows beside the paper's curves.
#
# Nothing is measured here. The source is the `.py` file of the same name; after an edit, or with new rows, run it again
# (less than a minute on two cores):
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/01_sgmv_and_batching.py`

# %%
import pandas as pd
import torch
from IPython.display import Markdown, display

from experiments.facts.paper import read_figure
from experiments.fig07_sgmv_roofline import EXPERIMENT as FIG7
from experiments.fig08_lora_operator import EXPERIMENT as FIG8
from experiments.fig09_lora_ranks import EXPERIMENT as FIG9
from experiments.measure.roofline import sgmv_intensity, sgmv_io_bytes
from experiments.workload.popularity import PAPER_WORKLOADS, popularity
from notebooks.stored_rows import (
    ROOT,
    StoredRows,
    as_markdown,
    contest,
    growth,
    how_to_measure,
    of_the_roof,
    relative_to,
)
from punica.metadata import LoRABatch, LoRAMapping, compute_meta
from punica.ops import reference, torch_ops
from punica.ops.weights import Stack
from punica.wrapper import PunicaWrapperCPU

HARDWARE = "cpu"  # whose rows chapters 3 and 4 read: the name of a folder in results/ or outputs/

# %% [markdown]
# ## 1. What SGMV computes
#
# A LoRA adapter adds a product of two thin matrices to a projection of the backbone,
#
# $$ y = x W + x A B, \qquad A \in \mathbb{R}^{h_1 \times r}, \quad B \in \mathbb{R}^{r \times h_2}, \quad
#    r \ll h_1, h_2 . $$
#
# In a batch, row $t$ has its own adapter $l_t$. The backbone's part $x W$ is the same for all rows, one large matrix
# product; what is left is, for every row,
#
# $$ y_t \mathrel{+}= x_t \, A_{l_t} B_{l_t} . $$
#
# It takes two launches of SGMV: **shrink**, $v_t = x_t A_{l_t}$ from $h_1$ to $r$ numbers, and **expand**,
# $y_t \mathrel{+}= v_t B_{l_t}$ from $r$ to $h_2$. All adapters are in one stack of *slots*; a row without adapter has
# slot $-1$. As in adapter files, the stacks hold the transposes: `a` is $[L, r, h_1]$ and `b` is $[L, h_2, r]$.
#
# ### An example to follow by hand
# Two adapters with $h_1 = 3$, $r = 2$, $h_2 = 2$. The first takes $v = (x_1,\ x_2 + x_3)$ and adds
# $(v_1,\ v_1 + v_2)$; the second takes $v = (x_3,\ x_1 - x_3)$ and adds $(2 v_1,\ v_2)$. The backbone has left 100
# everywhere in $y$. For the first row, $x = (1, 2, 3)$: $v = (1, 5)$, so $y = (100 + 1,\ 100 + 1 + 5)$.

# %%
a = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[0, 0, 1], [1, 0, -1]]]).float()  # [slots, r, h1]
b = torch.tensor([[[1, 0], [1, 1]], [[2, 0], [0, 1]]]).float()  # [slots, h2, r]
x = torch.tensor([[1, 2, 3], [4, 0, 1], [1, 1, 1], [2, 0, 5], [1, 0, 0], [0, 3, 2]]).float()
slots = torch.tensor([0, 0, -1, 1, 1, 1])
backbone = torch.full((6, 2), 100.0)

# %% [markdown]
# **By a loop**, as the equation reads:

# %%
v, y = torch.zeros(6, 2), backbone.clone()
for row, slot in enumerate(slots.tolist()):
    if slot >= 0:
        v[row] = a[slot] @ x[row]
        y[row] += b[slot] @ v[row]


def whole(values: torch.Tensor) -> str:
    return ", ".join(f"{value:g}" for value in values)


lines = [
    {"row": t, "slot": int(slots[t]), "x": whole(x[t]), "v = x A": whole(v[t]), "y = 100 + v B": whole(y[t])}
    for t in range(6)
]
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# **By the reference operators.** `bgmv_*` take a slot per row. `sgmv_*` take *segments*, runs of neighbouring rows with
# one slot: where each starts, how long it is and which slot it uses. Segments may be ragged: here they have 2, 1 and 3
# rows.

# %%
by_row, shrunk = backbone.clone(), torch.empty(6, 2)
reference.bgmv_shrink(x, a, shrunk, slots)
reference.bgmv_expand(shrunk, b, by_row, slots)

segments = compute_meta(slots)
starts, lengths, segment_slots, count, longest, rows, _ = segments
by_segment = backbone.clone()
reference.sgmv_shrink(x, a, shrunk, starts, lengths, segment_slots, count, longest, rows, 1.0)
reference.sgmv_expand(shrunk, b, by_segment, starts, lengths, segment_slots, count, longest, rows, add_inputs=True)
print(f"segments start at rows {starts.tolist()}, have {lengths.tolist()} rows and use slots {segment_slots.tolist()}")

# %% [markdown]
# **By the wrapper that every layer of the model calls.** It knows adapters by the *ids* that users give them (0 is
# none) and looks up the slots once per step, for all layers. On a CPU it runs `punica.ops.torch_ops`. Here adapter 7
# is in slot 0 and adapter 4 in slot 1.

# %%
wrapper = PunicaWrapperCPU(max_num_batched_tokens=6, max_batches=6, device="cpu", max_loras=2)
ids = [7, 7, 0, 4, 4, 4]
wrapper.update_metadata(LoRAMapping(ids, ids), lora_index_to_id=[7, 4], max_loras=2, vocab_size=1)
by_wrapper = backbone.clone()
wrapper.add_lora_linear(by_wrapper, x, (a,), (b,), 1.0, (2,))
ways = {"reference, by row": by_row, "reference, by segment": by_segment, "wrapper on torch_ops": by_wrapper}
for way, result in ways.items():
    print(f"{way:22} equals the loop: {torch.equal(result, y)}")

# %% [markdown]
# ### Rows without an adapter
# Slot $-1$ is not an adapter of zeros: shrink leaves 0 for the row, and expand does not touch the row at all, neither
# reads nor writes it. A step in which no row has an adapter costs nothing but the check.

# %%
untouched = torch.full((6, 2), float("nan"))
reference.bgmv_expand(shrunk, b, untouched, slots, add_inputs=False)
print("rows that expand did not write:", untouched.isnan().all(dim=1).nonzero().flatten().tolist())
print("what shrink left for them:     ", shrunk[slots == -1].tolist())

# %% [markdown]
# ### Any order of rows
# Rows of one adapter need not be neighbours; long segments only make the work cheaper, so an engine groups its rows by
# adapter. On the host, once per step, a `LoRABatch` finds the *runs* (equal segments of neighbouring slots, one
# batched matrix product each), and sorts the rows when that saves enough of them. The result belongs to the row, not
# to the place where it stands:

# %%
order = torch.tensor([3, 0, 2, 4, 1, 5])
shuffled = backbone.clone()
step = LoRABatch.of_slots(slots[order])
v = torch.zeros(1, 6, 2)
ops = torch_ops.TorchOps()
ops.shrink(v, x[order], Stack.of_a((a,)), step)
ops.expand(shuffled, v, Stack.of_b((b,)), step)
print("slots", slots[order].tolist(), "-> runs of (slot, first row, segments, rows in each):")
plan = step.plan
print([tuple(run)[:4] for run in plan.runs], "of", "sorted rows" if plan.rows is not None else "the rows as they lie")
print("equal to the loop, row by row:", torch.equal(shuffled, y[order]))

# %% [markdown]
# ## 2. Why batching pays: bytes, not arithmetic
#
# One launch over $s$ rows that use $n$ distinct adapters, from $h_i$ to $h_o$ numbers of $e$ bytes (section 7.1 of the
# paper):
#
# $$ \text{FLOP} = 2\, s\, h_i h_o, \qquad
#    \text{bytes} = e \left( s\,(h_i + h_o) + n\, h_i h_o \right), \qquad
#    I = \frac{\text{FLOP}}{\text{bytes}} . $$
#
# The *arithmetic intensity* $I$ decides what limits a machine of bandwidth $\beta$ and arithmetic rate $\pi$: it
# reaches at most $\min(\pi, I \beta)$. The paper's four popularity patterns differ in $n$ only:
#
# | pattern | groups of rows | $n$ |
# |---|---|---|
# | Distinct | every row has its own adapter | $s$ |
# | Uniform | equally popular adapters | $\lceil \sqrt{s}\, \rceil$ |
# | Skewed | group sizes $\lfloor 1.5^k \rfloor$: few popular adapters, a long tail | grows like $\log s$ |
# | Identical | one adapter | $1$ |
#
# With Distinct, $n = s$ cancels, and $I = \frac{2}{e} \frac{h_i h_o}{h_i + h_o + h_i h_o}$ does not depend on the
# batch. With Identical it climbs with $s$ towards $\frac{2}{e} \frac{h_i h_o}{h_i + h_o}$. From the formula, for expand
# with $h_i = r = 16$, $h_o = 4096$ and two-byte numbers:

# %%
BATCHES = (1, 8, 32, 64)
H_IN, H_OUT = 16, 4096
adapters = {name: popularity(name).number_of_adapters for name in PAPER_WORKLOADS}
groups = [popularity(name).group_sizes(64) for name in PAPER_WORKLOADS]
table = pd.DataFrame({"pattern": PAPER_WORKLOADS, "n, s=64": [len(sizes) for sizes in groups]})
table["rows per adapter, s=64"] = [", ".join(map(str, g[:9])) + ", ..." * (len(g) > 9) for g in groups]
for s in BATCHES:
    table[f"FLOP/byte, s={s}"] = [sgmv_intensity(s, n(s), H_IN, H_OUT) for n in adapters.values()]
display(as_markdown(table))
print(f"limit of Identical: {H_IN * H_OUT / (H_IN + H_OUT):.1f} FLOP/byte")

# %%
paper = read_figure(ROOT / "paper_results", "7")
paper = paper[paper["metric"] == "arithmetic_intensity"]
points = zip(paper["batch_size"].astype(int), paper["workload"], strict=True)
ours = [sgmv_intensity(s, adapters[name](s), H_IN, H_OUT) for s, name in points]
print(f"largest difference from the intensities in paper_results: {max(abs(paper['value'] - ours)):.1e} FLOP/byte")

# %% [markdown]
# So with distinct adapters a larger batch does not raise the intensity of the *add-on*. What it raises is that of the
# **backbone**, whose weight all rows share whatever their adapters: each of its bytes, read once, then serves $s$ rows.
# That is the gain that a system gives up when it batches only rows of one adapter. The add-on must merely stay small
# beside it: for a projection from 4096 to 11008 with rank 16, in MiB that move through memory,

# %%
H1, R, H2 = 4096, 16, 11008
MIB = 2**20


def add_on(rows: int, n: int) -> float:
    return (sgmv_io_bytes(rows, n, H1, R) + sgmv_io_bytes(rows, n, R, H2)) / MIB


table = pd.DataFrame({"s": BATCHES})
table["backbone, FLOP/byte"] = [sgmv_intensity(s, 1, H1, H2) for s in BATCHES]
table["backbone, MiB"] = [sgmv_io_bytes(s, 1, H1, H2) / MIB for s in BATCHES]
for name, n in adapters.items():
    table[f"SGMV {name}, MiB"] = [add_on(s, n(s)) for s in BATCHES]
display(as_markdown(table))

# %% [markdown]
# *Gather-BMM*, the usual way to write the operator in PyTorch, copies the weights of each row side by side and
# multiplies the copies: $2\, s\, h_i h_o$ numbers more than SGMV in each of its two launches, even where all rows share
# one adapter.

# %%
table = pd.DataFrame({"pattern": PAPER_WORKLOADS, "SGMV, MiB at s=64": [add_on(64, n(64)) for n in adapters.values()]})
table["Gather-BMM, MiB"] = table.iloc[:, 1] + 2 * 2 * 64 * R * (H1 + H2) / MIB
table["times as many"] = table.iloc[:, 2] / table.iloc[:, 1]
display(as_markdown(table))

# %% [markdown]
# ## 3. Figures 7, 8 and 9 from stored rows
#
# Measured values are solid and coloured, the paper's dashed and grey. Its machine was an A100, so times differ by what
# the machines differ; the lower panels divide every curve by its own first point, and shapes can be compared. Recorded
# rows (`results/`) are read where there are any, else those that `make reproduce` left on this machine (`outputs/`);
# the line below each figure says which, and where they were measured. `make figures` draws the same pictures.
#
# ### Figure 7: one launch on the roofline
# The paper's claim: with distinct adapters the intensity stays where it is and the FLOP/s rise through parallelism
# alone, straight up; with one adapter both climb; the other two patterns are in between.

# %%
stored = StoredRows(ROOT, HARDWARE)
display(*stored.figure(FIG7))

# %% [markdown]
# The numbers behind it. A growth as large as that of the batch means that the large batch takes no more time than the
# small one; a growth of 1 means that it gains nothing.

# %%
display(stored.table(FIG7, growth("achieved_flops", "workload")))

# %% [markdown]
# And how much of the roof above it the largest batch reaches. A small part means that neither bytes nor arithmetic
# limit the launch, but what it costs to start one and to fill the machine. More than 1 means that the data came from
# the caches and not from memory, whose bandwidth draws the roof.

# %%
display(stored.table(FIG7, of_the_roof))

# %% [markdown]
# ### Figure 8: ways to compute the operator
# *Loop* runs one adapter after the other, *Gather* copies the weights of every row, *BMM* multiplies copies made
# beforehand, *Gather-BMM* does both, and `grouped_mm` is torch's own grouped product, which the paper did not have.
# The claim: SGMV beats Loop and Gather-BMM everywhere, and grows little where rows share adapters.

# %%
display(*stored.figure(FIG8))

# %% [markdown]
# How SGMV grows with the batch:

# %%
display(stored.table(FIG8, growth("latency", "workload")))

# %% [markdown]
# What the other ways cost, in SGMVs (above 1, SGMV is faster): over all batch sizes and patterns, then at the largest
# batch. BMM alone cannot serve, since its weights must be gathered first; it is shown as in the paper.

# %%
display(stored.table(FIG8, contest("SGMV")), stored.table(FIG8, relative_to("SGMV")))

# %% [markdown]
# ### Figure 9: ranks
# The claim: one row costs the same at every rank; with distinct adapters the cost at batch 64 rises with the rank;
# where rows share adapters it stays flat over the batch.

# %%
display(*stored.figure(FIG9))

# %%
display(stored.table(FIG9, growth("latency", "rank", "workload")))

# %% [markdown]
# ## 4. The claims of Figures 7 to 9, judged
#
# Each claim has bounds (`paper_results/claim_bounds.csv`) on numbers that a function computes from the rows above:
# *reproduced* when the paper's own relation and tolerance hold, *shape holds* when only the test for other hardware
# does, *differs* when neither does. `make report` writes the table for every claim of the paper.

# %%
FIGURES = [experiment.figure for experiment in (FIG7, FIG8, FIG9)]
display(stored.verdicts(FIGURES))

# %%
h200 = StoredRows(ROOT, "h200")
chapter = [experiment for experiment in (FIG7, FIG8, FIG9) if h200.has(experiment)]
if chapter:
    display(Markdown("## 5. On an H200\nThe same figures and claims, on a GPU, beside the paper's A100."))
    display(*(part for experiment in chapter for part in h200.figure(experiment)), h200.verdicts(FIGURES))
else:
    display(Markdown(f"*A chapter on an H200 appears here with its rows: {how_to_measure(h200, FIG7, FIG8, FIG9)}*"))
