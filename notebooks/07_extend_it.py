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
# # 7. Extend it: a workload, a system, a rule, a kernel
#
# Popularities, serving systems, scheduling rules and backends of operators are entries of registries. An entry is
# found by everything else: command lines, figures, claims, reports, layers. Here each is added in a few lines and run
# at once, on a CPU, with a model of two small layers. Nothing is timed: all numbers are the same on every machine.
#
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/07_extend_it.py`

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: section 4 runs its kernel on the CPU

import pandas as pd
import torch
import triton
import triton.language as tl
from IPython.display import Markdown, display

from experiments.cluster.costs import chosen_cost, model_bytes
from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.facts.systems import FIG11, SYSTEMS, System, name_of, names_in
from experiments.harness.schema import DType, ModelConf
from experiments.simulator import simulate
from experiments.systems.check import check_tokens
from experiments.systems.serving import World, built
from experiments.systems.stream import paper_stream, timeline_of
from experiments.systems.weights import Limits
from experiments.workload import WORKLOADS, popularity
from notebooks.stored_rows import ROOT, as_markdown
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet
from punica.metadata import LoRAMapping
from punica.ops.reference import bgmv_expand_slice, bgmv_shrink
from punica.ops.torch_ops import TorchOps
from punica.scheduling import ADMISSION_RULES, AdmissionRule
from punica.wrapper import BACKENDS, PunicaWrapperCPU, get_punica_wrapper

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip
BATCH, REQUESTS, MAX_LEN = 4, 10, 96

# %% [markdown]
# ## 1. A workload
#
# A popularity is a rule: the number of requests in, the sizes of the groups that name one adapter out. This one gives
# half of the requests to one adapter, and an adapter of its own to each of the others.

# %%
@WORKLOADS.register("HalfHot")
def half_hot(n: int) -> list[int]:
    """One group of half the rows, and a group of 1 for each other row."""
    return [max(1, n // 2), *[1] * (n - max(1, n // 2))]


lines = [
    {"popularity": name, "groups of 8 requests": popularity(name).group_sizes(8),
     "adapters of 1000": popularity(name).number_of_adapters(1000)}
    for name in WORKLOADS.names()
]  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# The paper's stream takes it by name: lengths and prompts stay those of every other popularity.

# %%
jobs = paper_stream("HalfHot", REQUESTS, MAX_LEN, TINY.vocab_size)
display(as_markdown(pd.DataFrame([
    {"request": i, "adapter": job.adapter_id, "prompt": len(job.prompt), "new tokens": job.new_tokens}
    for i, job in enumerate(jobs)
])))  # fmt: skip

# %% [markdown]
# A popularity that stays belongs in `experiments/workload/popularity.py`; then it is an override like any other:
# `make figure FIG=fig08 ARGS="workload=zipf"`.
#
# ## 2. A serving system
#
# A system is an admission rule and an entry. The rule says which waiting request may join the next step; the engine
# keeps its blocks, slots and tokens right whatever the rule says.

# %%
@ADMISSION_RULES.register("newest_first")
class NewestFirst(AdmissionRule):
    """The request that arrived last joins next, one per step."""

    def candidate(self, waiting, is_resident):
        return waiting[-1]

    def allows(self, candidate, running, admitted):
        return not admitted


SYSTEMS.register("newest_first")(System("newest_first", admission="newest_first", figures=(FIG11,)))
display(Markdown(f"Figure 11 now runs: {'; '.join(map(name_of, names_in(FIG11)))}."))

# %% [markdown]
# Before a system is timed its tokens are compared with Hugging Face's: every request computed alone, with its own
# adapter. Then the order of joining, from the replay that windows of the stream are drawn by.

# %%
world = World(TINY, "cpu", Limits(max_batch_size=BATCH, max_len=MAX_LEN), rank=8)
lines = []
for name in ("punica", "newest_first"):
    agreement = check_tokens(built(name, world), jobs)
    replay = timeline_of(jobs, SYSTEMS.get(name).admission, BATCH)
    lines.append({"system": name, "tokens as Hugging Face's": f"{agreement.tokens:.0%}", "steps": replay.steps,
                  "first to join": ", ".join(map(str, replay.order[:BATCH]))})  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 3. A scheduling rule
#
# A cluster places each request by a rule. Punica fills the GPU that is fullest. This one fills the GPU with the most
# free pages that is not idle, and wakes an idle one only when no other has room. It runs on the paper's hour of
# requests, in a simulation: a virtual clock, steps that take what the cost model says.

# %%
@SCHEDULING_RULES.register("most_room_awake")
class MostRoomAwake(LargestWorkingSet):
    """The GPU with the most free pages among those that have a request; else the idle one with the highest UUID."""

    def choose(self, request, gpus):
        return max(gpus, key=lambda gpu: (bool(gpu.members), gpu.free_pages, gpu.uuid))


SECONDS, MODEL = 90, "llama2-7b"
cost = chosen_cost("a100", MODEL, ROOT / "paper_results", ROOT / "results")
lines = []
for rule in ("punica", "least_loaded", "most_room_awake"):
    asked = paper_hour(ROOT / "paper_results", SECONDS)
    result = simulate(asked, paper_cluster(rule, model_bytes(MODEL)), cost)
    busy = (result.batch > 0).sum(axis=0)  # of [GPUs, seconds]
    lines.append({"rule": rule, "requests": len(asked.arrivals), "tokens": int(result.tokens.sum()),
                  "GPU seconds with a token": int(busy.sum()), "most GPUs at once": int(busy.max())})  # fmt: skip
display(Markdown(f"Simulated, the first {SECONDS} s of the hour; steps: {result.cost_model}."))
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# `conf/figure/ext_placement.yaml` names the rules that it compares.
#
# ## 4. A kernel
#
# LoRA adds $s\,(x_t A_l^\top) B_l^\top$ to row $t$, whose adapter is in slot $l$. The first product, the *shrink*, sums
# over the hidden size; the second, the *expand*, needs that whole sum for each of its columns. Punica therefore
# launches two kernels. A row of few ranks does so little work per byte that launches and memory decide its time.
#
# So why not one launch? Let each program own one row and one block of output columns, and compute the row's shrink for
# itself. That saves a launch and the trip of the intermediate through memory. The price is A, which is read again for
# every block of columns. It can be counted before anything is written, here for the widest projection of Llama-2 7B:

# %%
hidden, width, rank, element = 4096, 11008, 16, 2  # the last in bytes
two = rank * (hidden + width) * element + 2 * rank * 4  # the intermediate, float32, is written and read
lines = [{"form": "shrink, then expand", "launches": 2, "bytes read and written for a row's adapter": f"{two:,}"}]
for block in (64, 512, 4096):
    one = rank * (hidden * triton.cdiv(width, block) + width) * element
    lines.append({"form": f"one launch, blocks of {block} columns", "launches": 1,
                  "bytes read and written for a row's adapter": f"{one:,}"})  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# Caches may serve part of the repeated reads, and few wide blocks leave most of a GPU idle: the count says what to
# measure, not what is faster. First the kernel has to be right. Triton's interpreter runs it on the CPU, one statement
# after the other; on a GPU the same source is compiled.

# %%
@triton.jit
def one_launch_kernel(
    y_ptr, x_ptr, a_ptr, b_ptr, slots_ptr, K, N, stride_y, scale,
    R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add `scale * (x[t] @ A[slot]^T) @ B[slot]^T` to a block of columns of row t.

    x [T, K], A [L, R, K], B [L, N, R]; R is a power of two. Rows in slot -1 have no adapter and stay as they are.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        ranks, columns = tl.arange(0, R), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        low = tl.zeros([R], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + (slot * R + ranks)[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            low += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
        inside = columns < N
        b = tl.load(b_ptr + (slot * N + columns)[:, None] * R + ranks[None, :], mask=inside[:, None], other=0.0)
        y_ptrs = y_ptr + row * stride_y + columns
        y = tl.load(y_ptrs, mask=inside, other=0.0) + scale * tl.sum(b.to(tl.float32) * low[None, :], axis=1)
        tl.store(y_ptrs, y, mask=inside)

# %% [markdown]
# Layers call a *wrapper*, and a wrapper hands the step to the operations of its backend (`punica.ops.interface.Ops`).
# A backend that replaces one operation is a subclass and an entry of `BACKENDS`. A layer may hold several products side
# by side, as q, k and v: its slices.

# %%
class OneLaunchOps(TorchOps):
    """The CPU's operations, but `linear` is one launch per slice."""

    def linear(self, y, x, weights, batch, scale=1.0, *args, **kwargs):
        slots = torch.tensor(batch.rows.slots).repeat_interleave(torch.tensor(batch.rows.lengths))
        first = 0
        for a, b in zip(weights.a.tensors, weights.b.tensors, strict=True):
            (rank, hidden), width = a.shape[-2:], b.shape[-2]
            grid = (len(slots), triton.cdiv(width, 32))
            operands = (y[:, first:], x.contiguous(), a, b, slots, hidden, width, y.stride(0), scale)
            one_launch_kernel[grid](*operands, R=rank, BLOCK_K=64, BLOCK_N=32)
            first += width


@BACKENDS.register("one_launch")
class OneLaunchWrapper(PunicaWrapperCPU):
    _ops = OneLaunchOps()

# %% [markdown]
# `punica.ops.reference` defines what is right; it is written to be read, and rounds once. The comparison covers sizes
# that no block divides, rows without an adapter, and the popularity of section 1. A comparison must also be able to
# fail, so the last column runs the same kernel on weights whose slots are off by one.

# %%
ROWS, SLOTS, HIDDEN, WIDTHS, RANK, SCALE = 9, 9, 100, (70, 33), 8, 0.5
torch.manual_seed(0)
x = torch.randn(ROWS, HIDDEN)
a = tuple(torch.randn(SLOTS, 1, RANK, HIDDEN) for _ in WIDTHS)
b = tuple(torch.randn(SLOTS, 1, width, RANK) for width in WIDTHS)


def added(backend, ids, shift=0):
    """Return what a backend adds for rows of these adapters, with slots off by `shift`; adapter 0 is none."""
    wrapper = get_punica_wrapper(ROWS, ROWS, "cpu", max_loras=SLOTS, backend=backend)
    wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, SLOTS + 1)), SLOTS, 100)
    y = torch.zeros(ROWS, sum(WIDTHS))
    wrapper.add_lora_linear(y, x, tuple(one.roll(shift, 0) for one in a), b, SCALE, WIDTHS)
    return y


def expected(ids):
    """Return the same by the definition."""
    y, slots, first = torch.zeros(ROWS, sum(WIDTHS)), torch.tensor(ids) - 1, 0
    for one_a, one_b, width in zip(a, b, WIDTHS, strict=True):
        low = torch.zeros(ROWS, RANK)
        bgmv_shrink(x, one_a, low, slots, SCALE)
        bgmv_expand_slice(low, one_b, y, slots, first, width, add_inputs=True)
        first += width
    return y


def agrees(y, ids):
    return "yes" if torch.allclose(y, expected(ids), rtol=1e-4, atol=1e-4) else "no"


lines = []
for name in ("Distinct", "HalfHot", "Identical"):
    ids = (*(popularity(name).requests(ROWS - 1) + 1).tolist(), 0)
    lines.append({"popularity": name, "adapters of the rows": ", ".join(map(str, ids)),
                  "cpu": agrees(added("cpu", ids), ids), "one_launch": agrees(added("one_launch", ids), ids),
                  "one_launch, slots off by one": agrees(added("one_launch", ids, shift=1), ids)})  # fmt: skip
display(Markdown("Agrees with the reference:"))
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# Now it may be timed. A kernel that stays is a file in `punica/ops/triton_ops/`, with a test in the interpreter and one
# on a GPU. An entry of `OPERATORS` in `experiments/benches/operators.py`, whose name is added to the `systems` of
# `conf/figure/fig08_lora_operator.yaml`, has it timed beside the others, after its result was compared.
# [Extending](../docs/extending.md#an-operator) lists the files in order.
