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
# # 2. Adapters on demand
#
# A server has thousands of adapters on disk, some in host memory, and as many on the device as there are *slots*. This
# notebook follows one adapter: from the folder that [PEFT](https://github.com/huggingface/peft) wrote, through the
# checks, into a slot, out again; then across tensor-parallel ranks; and last, from stored rows, how long the way from
# host memory to the device takes and whether decoding notices (section 5.2 of the paper).
#
# Chapters 1 to 3 compute on the CPU, in seconds; chapter 4 reads rows and measures nothing. After an edit run it again:
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/02_adapters_on_demand.py`

# %%
from pathlib import Path
from tempfile import mkdtemp

import pandas as pd
import torch
from IPython.display import display
from transformers import LlamaConfig

from experiments.sec52_adapter_loading import EXPERIMENT as LOADING
from notebooks.stored_rows import ROOT, StoredRows, as_markdown
from punica.adapters import LoRAModelManager, LoRARequest, write_random_adapter
from punica.config import LoRAConfig
from punica.layers import ColumnParallelLinearWithShardedLoRA, RowParallelLinearWithShardedLoRA
from punica.models import LlamaForCausalLM
from punica.parallel import ColumnParallelLinear, RowParallelLinear

# %% [markdown]
# ## 1. From a folder to a slot
#
# Three tenants with adapters of different rank and different target modules. `write_random_adapter` stands in for
# training; a folder saved by PEFT looks the same (`adapter_config.json`, `adapter_model.safetensors`).

# %%
shape = LlamaConfig(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)
model = LlamaForCausalLM(shape)
model.init_random_weights(seed=0)
home = Path(mkdtemp())
wanted = {1: (8, ["q_proj", "v_proj"]), 2: (16, ["q_proj", "k_proj", "v_proj", "o_proj"]), 3: (4, ["down_proj"])}
requests = {}
for number, (rank, targets) in wanted.items():
    folder = write_random_adapter(home / f"tenant-{number}", shape, rank, seed=number, target_modules=targets)
    requests[number] = LoRARequest(f"tenant-{number}", number, str(folder))

# %% [markdown]
# The manager replaces the model's layers in place: `q_proj`, `k_proj` and `v_proj` of the adapters meet in the layer
# that the model computes at once. Two slots on the device, three places in host memory.

# %%
config = LoRAConfig(max_lora_rank=16, max_loras=2, max_cpu_loras=3)
manager = LoRAModelManager(
    model, max_num_seqs=8, max_num_batched_tokens=64, vocab_size=256, lora_config=config, device="cpu"
)
layers = {name: type(layer).__name__ for name, layer in manager.modules.items() if "layers.1" not in name}
display(as_markdown(pd.DataFrame(list(layers.items()), columns=["module", "LoRA layer"])))

# %% [markdown]
# `add_adapter` loads, checks and activates. The third adapter needs a slot, which the least recently used adapter gives
# up. That one stays registered, so it comes back without touching the disk. A pinned adapter is never evicted.

# %%
history = []


def note(what: str) -> None:
    history.append(
        {
            "after": what,
            "slots": str(manager.lora_index_to_id),
            "registered, oldest first": str(list(manager.list_adapters())),
            "pinned": str(sorted(manager.pinned_adapters)),
        }
    )


for number in (1, 2):
    manager.add_adapter(requests[number])
    note(f"add_adapter({number})")
manager.pin_adapter(1)
note("pin_adapter(1)")
manager.add_adapter(requests[3])
note("add_adapter(3)")
manager.activate_adapter(2)
note("activate_adapter(2)")
manager.unpin_adapter(1)
manager.remove_adapter(1)
note("unpin_adapter(1), remove_adapter(1)")
display(as_markdown(pd.DataFrame(history)))

# %% [markdown]
# What memory it takes: a slot is as wide as the widest adapter, on every layer, whether used or not; an adapter in host
# memory takes what its own matrices take.

# %%
memory = [{"what": "one slot on the device", "bytes": manager.slot_bytes}]
memory += [
    {"what": f"adapter {i}, rank {manager.get_adapter(i).rank}, in host memory", "bytes": manager.adapter_bytes(i)}
    for i in manager.list_adapters()
]
display(as_markdown(pd.DataFrame(memory)))

# %% [markdown]
# ## 2. What cannot be served is refused, and changes nothing
#
# An adapter comes from a stranger. Everything is checked before anything is evicted: here an adapter whose rank is too
# large meets full slots.

# %%
before = (list(manager.lora_index_to_id), list(manager.list_adapters()))
folder = write_random_adapter(home / "too-wide", shape, rank=32, seed=9)
try:
    manager.add_adapter(LoRARequest("too-wide", 9, str(folder)))
except ValueError as error:
    print(str(error).replace(str(home), "..."))
print("unchanged:", (list(manager.lora_index_to_id), list(manager.list_adapters())) == before)

# %% [markdown]
# ## 3. Over several ranks
#
# Tensor parallelism cuts the base layers. A plain LoRA layer cuts one factor along and keeps the other whole; a *fully
# sharded* one (`fully_sharded_loras=True`, after S-LoRA) cuts both, and exchanges the small intermediate between shrink
# and expand. Shapes of one slot, on rank 0 of 4:

# %%
sharded = LoRAConfig(max_lora_rank=16, max_loras=2, fully_sharded_loras=True, lora_dtype="float32")
sharded.verify_with_model_config(None)
rows = []
for base, lora in (
    (ColumnParallelLinear(64, 256, tp_rank=0, tp_size=4), ColumnParallelLinearWithShardedLoRA),
    (RowParallelLinear(256, 64, tp_rank=0, tp_size=4), RowParallelLinearWithShardedLoRA),
):
    layer = lora(base)
    layer.create_lora_weights(2, sharded)
    a, b = layer.lora_a_stacked[0], layer.lora_b_stacked[0]
    rows.append(
        {
            "base layer (out x in)": f"{type(base).__name__} {base.output_size} x {base.input_size}",
            "its weight here": str(tuple(base.weight.shape)),
            "A here, of (16, in)": str(tuple(a.shape[2:])),
            "B here, of (out, 16)": str(tuple(b.shape[2:])),
            "collective": "all-gather of h" if "Column" in lora.__name__ else "all-reduce of h",
        }
    )
display(as_markdown(pd.DataFrame(rows)))

# %% [markdown]
# The same numbers without processes: the four ranks of a column layer, their shrinks joined by hand, against the whole.

# %%
torch.manual_seed(0)
x, a, b = torch.randn(3, 64), torch.randn(5, 64), torch.randn(256, 5)  # rank 5 in slots of 16: rank 0 and 1 hold A
parts = [a[4 * p : 4 * (p + 1)] for p in range(4)]
h = torch.cat([x @ part.T for part in parts], dim=1)
y = torch.cat([h @ b[64 * p : 64 * (p + 1)].T for p in range(4)], dim=1)
print("rows of A on each rank:", [len(part) for part in parts])
print("equals x A^T B^T:", torch.allclose(y, x @ a.T @ b.T, atol=1e-4))

# %% [markdown]
# On real processes this is `torchrun --nproc-per-node 4 serve.py` with `init_tensor_parallel()` in the program, see
# docs/distributed.md; the tests run every class on 2 and 4 ranks and compare with one.
#
# ## 4. How long it takes, and whether decoding notices
#
# The paper (section 5.2): one layer loads in about 50 µs, one model in 2 ms, behind a decode step of 30 ms. The
# arithmetic disagrees with the link it names (disagreement D03): 80 MB at the 25 GB/s of PCIe Gen4 x16 take 3.2 ms. In
# the figure, `link` is one plain copy of as many bytes, the roofline.

# %%
def loading(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Rank 16: load time of a layer and of the model, and what a load does to the decode step beside it."""
    chosen = rows[(rows["statistic"] == "median") & (rows["rank"] == 16)]
    cells = chosen.pivot_table(index="system", columns=["panel", "metric"], values="value", sort=False)
    table = pd.DataFrame(
        {
            "layer (us)": cells["layer", "load_time"],
            "model (ms)": cells["model", "load_time"],
            "bandwidth (GB/s)": cells["model", "bandwidth"],
            "of the link": cells["model", "bandwidth"] / cells["model", "bandwidth"]["link"],
            "host kept busy (ms)": cells["model", "host_time"],
            "step alone (ms)": cells["overlap", "step_latency_alone"],
            "step beside a load (ms)": cells["overlap", "step_latency"],
        }
    )
    return table.reset_index()


def chapter(hardware: str) -> None:
    """The figure, the table and the verdicts of one hardware."""
    stored = StoredRows(ROOT, hardware)
    display(*stored.figure(LOADING))
    display(stored.table(LOADING, loading))
    display(stored.verdicts(["text 5.2"]))


chapter("h200")

# %% [markdown]
# On the H200 a model's adapter moves at more than three quarters of the link's speed (`of the link`), because it moves
# as one: packed when it is registered, read through the link by one kernel on a stream of its own. Decoding notices: a
# step beside a load takes longer (C43). Layer by layer, as `set_lora` does it, the same bytes take several times as
# long, and they delay the decode step for all of that time. One layer alone takes longer than the paper's 50 µs: at
# rank 16 most of it is the host's work for one load.
#
# On a CPU there is no device to load onto: a load is a copy within the memory, by the cores that also compute.

# %%
chapter("cpu")
