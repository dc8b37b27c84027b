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
# # 8. Prefixes: one context for many adapters, and prompts in pieces
#
# A LoRA adapter changes keys and values of every token, so requests of different adapters share none. An *activated*
# adapter (PEFT's `alora_invocation_tokens`) changes nothing before its invocation. What the base model has read then
# serves all of them, from one copy. The same kernel, in which new rows attend to cached ones, lets a long prompt join
# in pieces. Here both run on a CPU, with a model of two small layers. Nothing is timed but in the last cell, whose rows
# are stored.

# %%
from dataclasses import replace

import pandas as pd
from IPython.display import display

from experiments.ext_prefix_cache import EXPERIMENT as PREFIX
from experiments.harness.schema import DType, ModelConf
from experiments.systems.weights import Limits, Weights
from notebooks.stored_rows import ROOT, SideBySide, as_markdown
from punica.adapters import LoRAModel, LoRARequest, PEFTHelper, activation_start
from punica.engine import Engine, Request

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip
WEIGHTS = Weights(TINY, "cpu", Limits(max_batch_size=4, max_len=160, block_size=16), rank=8)
INVOCATION, CONTEXT = (7, 8), tuple(range(16, 112))  # 96 tokens: six blocks


def engine(admission="fcfs", **switches):
    """An engine with three adapters that are active from `INVOCATION` on."""
    config = replace(WEIGHTS.limits.engine_config(lora=True), **switches)
    made = Engine(WEIGHTS.backbone(), config.lora_config(8, max_loras=3), config, admission)
    for number in (1, 2, 3):
        about = {"r": 8, "lora_alpha": 64.0, "target_modules": WEIGHTS.target_modules}
        about["alora_invocation_tokens"] = list(INVOCATION)
        made.manager.add_adapter(
            LoRAModel.from_lora_tensors(number, WEIGHTS.adapter_tensors(number), PEFTHelper.from_dict(about))
        )
    return made


def adapter(number):
    """The reference to one of them; 0: the base."""
    return LoRARequest(f"adapter-{number}", number, "in memory") if number else None

# %% [markdown]
# ## 1. Where an adapter begins
#
# It is active from the start of the last occurrence of its invocation. A prompt without one is the base model's.

# %%
prompts = {
    "context": CONTEXT,
    "context, invocation": (*CONTEXT, *INVOCATION),
    "twice": (*CONTEXT, *INVOCATION, 20, *INVOCATION, 21),
}
lines = [
    {"prompt": name, "tokens": len(prompt), "active from": activation_start(prompt, INVOCATION)}
    for name, prompt in prompts.items()
]
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 2. One context, three adapters
#
# The base reads the context. Then each adapter continues it. With the prefix cache only the rows behind the context
# are computed; the tokens are those of an engine without a cache.

# %%
TURNS = {0: CONTEXT} | {number: (*CONTEXT, *INVOCATION, 120 + number) for number in (1, 2, 3)}
lines, tokens = [], {}
for cached in (False, True):
    one = engine(prefix_cache=cached)
    for number, prompt in TURNS.items():
        state = one.add_request(Request(f"turn-{number}", prompt, 6, adapter(number)))
        rows = 0
        while one.has_unfinished():
            rows += one.step().statistics.num_prefill_tokens
        tokens[cached, number] = state.output_token_ids
        same = tokens[cached, number] == tokens[False, number]
        lines.append({"prefix cache": cached, "adapter": number or "none", "prompt": len(prompt),
                      "rows computed": rows, "tokens as without": same})  # fmt: skip
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# All at once they share the context's blocks: six blocks, counted once.

# %%
lines = []
for cached in (False, True):
    one = engine(prefix_cache=cached)
    one.generate([list(CONTEXT)], None, 1)
    for number in (1, 2, 3):
        one.add_request(Request(f"turn-{number}", TURNS[number], 6, adapter(number)))
    most = 0
    while one.has_unfinished():
        one.step()
        most = max(most, one.blocks.num_blocks - one.blocks.num_free)
    lines.append({"prefix cache": cached, "most blocks in use": most})
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 3. A prompt in pieces
#
# Under the paper's rule a prompt is one step, for which all decoding requests wait. Under `"chunked"` a step takes a
# limited number of prompt rows.

# %%
lines, found = [], {}
for admission, chunk in (("fcfs", None), ("chunked", 32)):
    one = engine(admission, prefill_chunk=chunk)
    first = one.add_request(Request("decodes", CONTEXT[:8], 12))
    one.step()
    second = one.add_request(Request("joins", CONTEXT, 4))
    steps = []
    while one.has_unfinished():
        steps.append(one.step().statistics.num_prefill_tokens)
    found[admission] = first.output_token_ids, second.output_token_ids
    rows = ", ".join(str(rows) for rows in steps if rows)
    same = found[admission] == found["fcfs"]
    lines.append({"admission": admission, "rows of prompts, by step": rows, "tokens as fcfs": same})
display(as_markdown(pd.DataFrame(lines)))

# %% [markdown]
# ## 4. What it saves
#
# First tokens, whole pipelines and blocks by context, number of adapters and way to serve them.

# %%
display(*SideBySide(ROOT).figure(PREFIX))
