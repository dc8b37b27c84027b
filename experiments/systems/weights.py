"""Weights of all systems of Figure 11, once: a random backbone, a set of adapters (at most `max_batch_size` different
ones, D10, or `sets`; others are copies), the limits of a batch.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from experiments.benches.model_steps import llama_config, random_llama
from experiments.harness.schema import ModelConf
from punica.adapters import LoRAModel, PEFTHelper, random_adapter_tensors
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.engine import EngineConfig
from punica.models import LlamaForCausalLM


@dataclass(frozen=True)
class Limits:
    """Limits of a batch: requests, tokens per request, and our engine's KV blocks (None: as many as can be needed)."""

    max_batch_size: int
    max_len: int
    block_size: int = 16
    num_blocks: int | None = None

    def engine_config(self, lora: bool, index_rule: str = "per_request") -> EngineConfig:
        """Build the engine's configuration; without LoRA adapters steer admission only."""
        # all requests at full length, and a block each to grow into, so that no request waits for blocks
        enough = self.max_batch_size * (-(-self.max_len // self.block_size) + 1) + 1
        return EngineConfig(
            max_batch_size=self.max_batch_size,
            block_size=self.block_size,
            max_model_len=self.max_len,
            num_blocks=self.num_blocks or enough,
            adapter_index_rule=index_rule,
            ignore_adapters=not lora,
        )


class Weights:
    """Backbone and adapters of one model on one device; `sets`: different adapters, None: as many as a batch holds."""

    def __init__(
        self, model: ModelConf, device: str, limits: Limits, rank: int, alpha: float = 16.0, seed: int = 0,
        sets: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.device, self.limits = model, device, limits
        self.rank, self.alpha, self.seed = rank, alpha, seed
        self.sets = sets or limits.max_batch_size
        self.vocab_size = model.vocab_size
        self.target_modules = list(LLAMA_LORA_MODULES)
        self._backbone = random_llama(model, device)
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self._backbone.lm_head.weight.dtype

    @property
    def config(self) -> LlamaConfig:
        return llama_config(self.model)

    def backbone(self) -> LlamaForCausalLM:
        """Build the backbone with new modules, which an engine with LoRA replaces, around the shared weights."""
        shared = {id(tensor): tensor for tensor in (*self._backbone.parameters(), *self._backbone.buffers())}
        return copy.deepcopy(self._backbone, shared)

    def exported(self) -> dict[str, torch.Tensor]:
        return exported(self._backbone)

    def adapter_set(self, adapter_id: int) -> int:
        return (adapter_id - 1) % self.sets

    def adapter_tensors(self, adapter_id: int) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors under PEFT names, on the device, which keeps as many as a batch can use."""
        index = self.adapter_set(adapter_id)
        if index in self._adapters:
            return self._adapters[index]
        seed = self.seed + index
        drawn = random_adapter_tensors(self.config, self.rank, seed, dtype=self.dtype, device=self.device)
        if index < self.limits.max_batch_size:
            self._adapters[index] = drawn
        return drawn

    def adapter(self, adapter_id: int, **fields: Any) -> LoRAModel:
        config = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.target_modules, **fields}
        return LoRAModel.from_lora_tensors(adapter_id, self.adapter_tensors(adapter_id), PEFTHelper.from_dict(config))


def exported(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    state, used = dict[str, torch.Tensor](), dict[int, int]()
    for entry in model.checkpoint_entries():
        start = used.get(id(entry.parameter), 0)
        state[entry.name] = entry.parameter.data.narrow(0, start, entry.shape[0])
        used[id(entry.parameter)] = start + entry.shape[0]
    return state
