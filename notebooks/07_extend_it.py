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
# # 7. Extend it: a workload, a system, a rule
#
# Popularities, serving systems and scheduling rules are entries of registries. An entry is found by everything else:
# command lines, figures, claims, reports. Here each is added in a few lines and run at once, on a CPU, with a model of
# two small layers. Nothing is timed, so all numbers are the same on every machine.
#
# `make setup && .venv/bin/jupytext --to ipynb --execute notebooks/07_extend_it.py`

# %%
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

sys.path.insert(
    0, next(str(f) for f in (Path.cwd(), *Path.cwd().parents, *Path(find_spec("punica").origin).parents)
            if (f / "paper_results").is_dir())
)  # fmt: skip
from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.cluster.recorded import chosen_cost
from experiments.cluster.step_costs import model_bytes
from experiments.facts.systems import FIG11, SYSTEMS, System, name_of, names_in
from experiments.harness.schema import DType, ModelConf
from experiments.systems.check import check_tokens
from experiments.systems.serving import built
from experiments.systems.stream import paper_stream, timeline_of
from experiments.systems.weights import Limits
from experiments.systems.world import World
from notebooks.stored_rows import as_markdown
from punica.cluster import simulate
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet
from punica.scheduling import ADMISSION_RULES, AdmissionRule
from punica.workload import WORKLOADS, popularity

ROOT = Path(sys.path[0])
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
# A popularity that stays belongs into `punica/workload/popularity.py`; then it is an override like any other, as in
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
# `conf/figure/ext_placement.yaml` names the rules that its figure compares. CONTRIBUTING.md lists the files of an
# extension that stays.
