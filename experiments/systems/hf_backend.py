"""Hugging Face Transformers and PEFT, as a server of static batches would use them.

The model is `transformers.LlamaForCausalLM` with SDPA attention, adapters are PEFT's own `lora.Linear`, the cache is
`DynamicCache`. The decoding loop is written out instead of `generate()`: it calls the same forward with the same cache,
skips stopping criteria, logits processors and per-step input preparation, and computes logits of the last position
only, so it is the faster of the two. Batches are padded on the left to their longest prompt, and a mask is passed only
when there is padding, because SDPA without a mask is faster. Everything runs in `inference_mode`, in the dtype and with
the threads of the other systems.

One PEFT adapter per place in the batch is created at the start; `load` overwrites its weights between batches. That and
all model building is never timed: the paper does not charge baselines for switching models.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.systems.weights import Weights

PADDING = 0  # any token id: padded positions are masked


@dataclass(frozen=True)
class Generated:
    """New tokens `[batch][longest]`, and the seconds until the first one and from there to the last."""

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float


class PeftBackend:
    """The backbone of `weights` with one PEFT adapter per place in the batch."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        with torch.device(weights.device):
            model = AutoModelForCausalLM.from_config(weights.config, dtype=weights.dtype, attn_implementation="sdpa")
        model.load_state_dict(weights.exported(), assign=True)
        config = LoraConfig(
            r=weights.rank,
            lora_alpha=weights.alpha,  # type: ignore[arg-type]  # a float works as well
            target_modules=weights.target_modules,
            task_type="CAUSAL_LM",
        )
        self.names = [f"place{index}" for index in range(weights.limits.max_batch_size)]
        with warnings.catch_warnings():
            # PEFT reads an attribute that Transformers is renaming; it concerns training only
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            self.model: Any = PeftModel(model, config, self.names[0])
            for name in self.names[1:]:
                self.model.add_adapter(name, config)
        self.model.to(weights.device, weights.dtype).eval()
        self._held: dict[str, int] = {}

    def load(self, name: str, adapter_id: int) -> None:
        """Give the PEFT adapter `name` the weights of `adapter_id`."""
        if self._held.get(name) != self.weights.adapter_set(adapter_id):
            set_peft_model_state_dict(self.model, self.weights.adapter_tensors(adapter_id), adapter_name=name)
            self._held[name] = self.weights.adapter_set(adapter_id)

    @contextmanager
    def adapter(self, adapter_id: int | None) -> Iterator[None]:
        """The whole batch uses `adapter_id`, or the plain backbone (None)."""
        if adapter_id is None:
            with self.model.disable_adapter():
                yield
        else:
            self.load(self.names[0], adapter_id)
            yield

    def places(self, adapter_ids: Sequence[int]) -> list[str]:
        """Load the distinct `adapter_ids`; the PEFT adapter of each row."""
        place = {adapter_id: name for name, adapter_id in zip(self.names, dict.fromkeys(adapter_ids), strict=False)}
        for adapter_id, name in place.items():
            self.load(name, adapter_id)
        return [place[adapter_id] for adapter_id in adapter_ids]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None) -> Generated:
        """Greedy continuation of all `prompts` by `new_tokens`.

        `rows`: PEFT adapter of each row (a mixed batch); None: the active one for all.
        """
        start = time.perf_counter()
        named = {} if rows is None else {"adapter_names": rows}
        width = max(len(prompt) for prompt in prompts)
        padded = [[PADDING] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        ids = torch.tensor(padded, device=self.weights.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
        column = torch.arange(width + new_tokens, device=ids.device)
        mask = (column >= (width - lengths)[:, None]).long()
        has_padding = bool((lengths < width).any())
        positions = (column - (width - lengths)[:, None]).clamp_(min=0)
        cache = DynamicCache(config=self.model.config)
        columns: list[torch.Tensor] = []
        prefill_s = 0.0
        for step in range(new_tokens):
            seen = width + step
            output = self.model(
                input_ids=ids,
                attention_mask=mask[:, :seen] if has_padding else None,
                position_ids=positions[:, seen - ids.shape[1] : seen],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **named,
            )
            ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            columns.append(ids)
            if step == 0:
                ids.tolist()  # waits for the device
                prefill_s = time.perf_counter() - start
        tokens = torch.cat(columns, dim=1).tolist()
        return Generated(tokens, prefill_s, time.perf_counter() - start - prefill_s)
