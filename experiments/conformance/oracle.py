"""Right greedy tokens by PEFT and transformers: adapters merged into the weights in float32, and their 16-bit error."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

BASE = "base"


class Answers(NamedTuple):
    """Greedy tokens `[prompts, count]`; least margin of the best logit over the second, and largest error of a logit in
    bfloat16 with the adapter beside the weights, both `[prompts]`.
    """

    tokens: Tensor
    margin: Tensor
    error: Tensor


class Oracle:
    """The base model and its adapters, by name."""

    def __init__(self, checkpoint: Path, adapters: Mapping[str, Path]) -> None:
        self._adapters = adapters
        full: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._merged = {BASE: full}
        half: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        for name, folder in adapters.items():
            if isinstance(half, PeftModel):
                half.load_adapter(folder, name, autocast_adapter_dtype=False)
            else:
                half = PeftModel.from_pretrained(half, folder, name, autocast_adapter_dtype=False)
        self._half = half.eval()

    def merged(self, name: str) -> Any:
        """Return the float32 model with an adapter in its weights."""
        if name not in self._merged:
            adapter = PeftModel.from_pretrained(copy.deepcopy(self._merged[BASE]), self._adapters[name])
            self._merged[name] = adapter.merge_and_unload()
        return self._merged[name]

    @torch.inference_mode()
    def answers(self, name: str, prompts: Tensor, count: int) -> Answers:
        """Compute `count` tokens after each of `prompts` `[prompts, length]`."""
        tokens, logits = greedy(self.merged(name), prompts, count)
        whole = torch.cat([prompts, tokens], 1)
        best, second = logits.topk(2, -1).values.unbind(-1)
        error = (self._half_logits(name, whole)[:, -count - 1 : -1].float() - logits).abs()
        return Answers(tokens, (best - second).amin(1), error.amax((1, 2)))

    @torch.inference_mode()
    def leaked(self, name: str, other: str, prompts: Tensor, num_prefix: int, count: int) -> Tensor:
        """Compute the tokens over keys and values of the first `num_prefix` tokens that are `other`'s."""
        cache = DynamicCache(config=self._merged[BASE].config)
        self.merged(other)(prompts[:, :num_prefix], past_key_values=cache)
        return greedy(self.merged(name), prompts, count, past_key_values=cache)[0]

    def _half_logits(self, name: str, whole: Tensor) -> Tensor:
        if name == BASE:
            with self._half.disable_adapter():
                return self._half(whole).logits
        self._half.set_adapter(name)
        return self._half(whole).logits


def greedy(model: Any, prompts: Tensor, count: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Return greedy tokens `[prompts, count]` and their logits `[prompts, count, vocabulary]`."""
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **more,
    )  # fmt: skip
    return made.sequences[:, prompts.shape[1] :], torch.stack(made.logits, 1)
