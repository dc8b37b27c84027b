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
# # 9. Training: two adapters in one batch
#
# `TrainableLinear` is a frozen linear layer whose slots train: each row of a batch meets the adapter of its slot, and
# each slot has parameters, and may have an optimizer, of its own. Here two toy adapters learn different tasks on one
# base, on a CPU in seconds. Nothing is timed but in the last cell, whose rows are stored.

# %%
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from IPython.display import display

sys.path.insert(
    0, next(str(f) for f in (Path.cwd(), *Path.cwd().parents, *Path(find_spec("punica").origin).parents)
            if (f / "paper_results").is_dir())
)  # fmt: skip
from experiments.ext_training import EXPERIMENT as TRAINING
from notebooks.stored_rows import SideBySide, as_markdown
from punica.layers import TrainableLinear
from punica.metadata import RowGroups
from punica.wrapper import get_punica_wrapper

torch.manual_seed(0)
ROWS, WIDTH, RANK = 64, 32, 4

# %% [markdown]
# ## 1. One base, two tasks
#
# The base maps x to `W x`. Each task wants `W x` plus a difference of rank 4, its own.

# %%
wrapper = get_punica_wrapper(2 * ROWS, 2, "cpu", max_loras=2)
model = TrainableLinear(torch.nn.Linear(WIDTH, WIDTH), wrapper, max_loras=2, max_rank=8)
optimizers = {slot: torch.optim.Adam(model.add_adapter(slot, RANK, scaling=2.0), 0.02) for slot in (0, 1)}
differences = [torch.randn(WIDTH, RANK) @ torch.randn(RANK, WIDTH) / WIDTH for _ in range(2)]


def batch(slots):
    """Begin a step whose rows have these slots; return x and what the tasks want."""
    rows = RowGroups.of_rows(np.array(slots))
    wrapper.begin_step(rows, rows, vocab_size=1)
    x = torch.randn(len(slots), WIDTH)
    added = torch.stack([differences[slot] @ row for slot, row in zip(slots, x, strict=True)])
    return x, model.base_layer(x) + added


def losses(slots, x, wanted):
    """The mean square error of each slot in the batch."""
    errors, of_rows = (model(x) - wanted).square().mean(1), torch.tensor(slots)
    return {slot: errors[of_rows == slot].mean() for slot in sorted(set(slots))}


# %% [markdown]
# ## 2. Both losses fall, in one batch
#
# The rows of the two tasks alternate. One forward and one backward serve both: a single base product each way.

# %%
MIXED, history = [0, 1] * ROWS, []
for _ in range(100):
    found = losses(MIXED, *batch(MIXED))
    sum(found.values()).backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    history.append([found[slot].item() for slot in (0, 1)])
lines = [
    {"step": step, **{f"error of adapter {slot}": f"{history[step - 1][slot]:.2g}" for slot in (0, 1)}}
    for step in (1, 10, 25, 50, 100)
]
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 3. An adapter without rows stays as it is
#
# Its parameters get no gradient, not even zeros, so Adam's momentum does not move them. The first goes on learning.

# %%
before = [parameter.clone() for parameter in (model.lora_a["1"], model.lora_b["1"])]
only = [0] * ROWS
found = losses(only, *batch(only))
found[0].backward()
for optimizer in optimizers.values():
    optimizer.step()
same = [torch.equal(old, new) for old, new in zip(before, (model.lora_a["1"], model.lora_b["1"]), strict=True)]
print(f"gradient of adapter 1: {model.lora_a['1'].grad}; A and B unchanged: {same}")

# %% [markdown]
# ## 4. Where a mixed batch gains
#
# Forward and backward by tokens of each adapter: one adapter after the other reads the base weights for each of them.

# %%
display(*SideBySide(Path(sys.path[0])).figure(TRAINING))
