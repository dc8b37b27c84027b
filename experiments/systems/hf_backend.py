"""Hugging Face Transformers and PEFT, as a server of static batches would use them.

The model is `transformers.LlamaForCausalLM` with SDPA attention, adapters are PEFT's own `lora.Linear`; loop and cache
are those of `hf_decoding`. Where the libraries leave a choice, it is the one that the other systems have, so that what
is compared is batching and the adapters' operator: dtype, threads, `inference_mode`, the matrix product of all linear
layers, a cache that is not copied.

One PEFT adapter per place in the batch is created at the start; `load` overwrites its weights between batches. That and
all model building is never timed: the paper does not charge baselines for switching models.
"""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from experiments.systems.hf_decoding import Decoding
from experiments.systems.weights import Weights
from punica.parallel.matmul import linear


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
        same_product(self.model)
        self._held: dict[str, int] = {}
        self._noise: dict[tuple[int, str], torch.Tensor] = {}

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

    def decoding(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None, done: int = 0
    ) -> Decoding:
        """A batch ready to decode. `rows`: PEFT adapter of each row (a mixed batch); None: the active one for all."""
        named = {} if rows is None else {"adapter_names": rows}
        return Decoding(self.model, prompts, new_tokens, self._room, self.weights.device, named, done)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None) -> Generated:
        """Greedy continuation of all `prompts` by `new_tokens`."""
        start = time.perf_counter()
        decoding = self.decoding(prompts, new_tokens, rows)
        columns = [decoding.step()]
        prefill_s = time.perf_counter() - start
        columns += [decoding.step() for _ in range(new_tokens - 1)]
        tokens = [list(row) for row in zip(*columns, strict=True)]
        return Generated(tokens, prefill_s, time.perf_counter() - start - prefill_s)

    def forced(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], rows: list[str] | None = None
    ) -> torch.Tensor:
        """Logits `[batch, positions, vocabulary]` (float32, on the host) when the rows go on with `tokens`, all of one
        length, whatever the model would choose.
        """
        forced = torch.tensor(tokens, device=self.weights.device)
        decoding, found = self.decoding(prompts, forced.shape[1], rows), []
        for column in forced.unbind(1):
            found.append(decoding.logits().float().cpu())
            decoding.take(column)
        return torch.stack(found, dim=1)

    def _room(self, layer: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for a batch, in memory that all batches use and that held noise at first."""
        config, weights = self.model.config, self.weights
        shape = (batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        size = math.prod(shape)
        for kind in ("keys", "values"):
            if (layer, kind) not in self._noise or self._noise[layer, kind].numel() < size:
                self._noise.pop((layer, kind), None)
                self._noise[layer, kind] = noise(size, weights.dtype, weights.device)
        keys, values = (self._noise[layer, kind][:size].view(shape) for kind in ("keys", "values"))
        return keys, values


class SameProduct(nn.Linear):
    """Transformers' and PEFT's linear layer on the product that our engine's layers use (`punica.parallel.matmul`),
    so that a comparison of systems is none of matrix products.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [..., in]` to `[..., out]`."""
        return linear(x, self.weight, self.bias)


def same_product(model: nn.Module) -> None:
    """Make every plain linear layer of `model` a `SameProduct`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SameProduct


def noise(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """`size` numbers like those of keys and values: one random block, again and again."""
    block = torch.randn(1 << 14).to(dtype).to(device)
    return block.repeat(-(-size // block.numel()))[:size]
