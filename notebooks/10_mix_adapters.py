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
# # 10. Mixtures: two adapters over a sentence
#
# A request may give several adapters with weights, and a batch of rows a gate for each token: `sum_i w_i s_i B_i A_i x`
# for every row, in two launches per projection. Here both run on a CPU, with random weights. Nothing is timed but in
# the last cell, whose rows are stored.

# %%
import numpy as np
import pandas as pd
import torch
from IPython.display import display

from experiments.ext_mixtures import EXPERIMENT as MIXTURES
from experiments.harness.schema import DType, ModelConf
from experiments.systems.weights import Limits, Weights
from notebooks.stored_rows import ROOT, SideBySide, as_markdown
from punica.adapters import LoRAModel, LoRARequest, PEFTHelper
from punica.engine import Engine
from punica.metadata import MixedRows
from punica.ops.weights import LoRAWeights
from punica.wrapper import get_punica_wrapper

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip
SENTENCE = "select every star that the night still has"
WEIGHTS = Weights(TINY, "cpu", Limits(max_batch_size=4, max_len=96, block_size=16), rank=8)
SQL, POET, MERGED = (LoRARequest(name, i, "in memory") for i, name in enumerate(("sql", "poet", "merged"), start=1))

# %% [markdown]
# ## 1. A request with two adapters
#
# PEFT's `add_weighted_adapter` with `combination_type="cat"` merges both into one adapter of twice the rank. The
# mixture has its tokens, but needs no merge: any weights, in one batch with each adapter alone.

# %%
config = WEIGHTS.limits.engine_config(lora=True)
engine = Engine(WEIGHTS.backbone(), config.lora_config(16, max_loras=3), config)
parts, merged, mixed = [WEIGHTS.adapter_tensors(i) for i in (1, 2)], {}, {SQL: 0.7, POET: 0.3}
for name in parts[0]:
    is_a = "lora_A" in name
    factors = [part[name] * (1 if is_a else weight) for part, weight in zip(parts, mixed.values(), strict=True)]
    merged[name] = torch.cat(factors, dim=0 if is_a else 1)
for adapter, tensors, rank in ((SQL, parts[0], 8), (POET, parts[1], 8), (MERGED, merged, 16)):
    about = {"r": rank, "lora_alpha": 8.0 * rank, "target_modules": WEIGHTS.target_modules}
    engine.manager.add_adapter(LoRAModel.from_lora_tensors(adapter.lora_int_id, tensors, PEFTHelper.from_dict(about)))
asked = {"sql": SQL, "poet": POET, "0.7 sql + 0.3 poet": mixed, "merged by PEFT's rule": MERGED}
found = engine.generate([list(SENTENCE.encode())] * len(asked), list(asked.values()), 10)
lines = [{"adapter": name, "tokens": str(one.token_ids)} for name, one in zip(asked, found, strict=True)]
display(as_markdown(pd.DataFrame(lines)))
print("the mixture has the tokens of the merged adapter:", found[2].token_ids == found[3].token_ids)

# %% [markdown]
# ## 2. A gate for each token
#
# A router, here a random one, gives every word its own weights. `MixedRows.of_gates` splits them into rows of one
# adapter and mixtures; one projection applies both kinds. A loop over words and adapters gives the same.

# %%
torch.manual_seed(0)
words, width, rank = SENTENCE.split(), 32, 4
x = torch.randn(len(words), width)
gates = torch.softmax(2 * x @ torch.randn(width, 2) / width**0.5, dim=1)
gates[gates > 0.95] = 1
gates[(gates == 1).flip(1)] = 0  # a word of one adapter alone
a, b = torch.randn(2, rank, width) / width**0.5, torch.randn(2, width, rank)
wrapper = get_punica_wrapper(len(words), len(words), "cpu", max_loras=2)
plain, rows = MixedRows.of_gates(gates)
wrapper.begin_step(plain, plain, vocab_size=1)
wrapper.begin_mixtures(rows, rows)
y = torch.zeros(len(words), width)
wrapper.add_linear(y, x, LoRAWeights.of([a], [b]))
terms = torch.stack([x @ a[i].T @ b[i].T for i in (0, 1)], dim=1) * gates[..., None]
print("equals the loop:", torch.allclose(y, terms.sum(1), atol=1e-5))

# %% [markdown]
# The gate over the sentence. The share is what the first adapter's term is of both, which differs from its weight.

# %%
norms, bar = terms.norm(dim=2), np.round(gates[:, 0].numpy() * 10).astype(int)
lines = [
    {"word": word, "sql": f"{gate[0]:.2f}", "poet": f"{gate[1]:.2f}", "gate": "s" * n + "p" * (10 - n),
     "row": "one adapter" if slot >= 0 else "mixture", "sql's share": f"{norm[0] / norm.sum():.2f}"}
    for word, gate, n, slot, norm in zip(words, gates, bar, plain.row_slots, norms, strict=True)
]  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 3. What more adapters cost
#
# The added time of a projection by the adapters of a row, against as many calls and PEFT's layer.

# %%
display(*SideBySide(ROOT).figure(MIXTURES))
