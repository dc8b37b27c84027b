"""Weights, KV cache and reference model that the systems of Figure 11 share. Device memory of Llama-2 7B and 13B:
weights 13.5 and 26.0 GB, keys and values 43 and 68 GB, 32 adapters 2.6 and 4.0 GB for PEFT and for each engine.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from experiments.benches.model_steps import fill_with_noise
from experiments.systems.hugging_face import PeftBackend
from experiments.systems.stream import Job
from experiments.systems.weights import Weights
from punica.adapters import LoRAModel
from punica.engine.attention import KVCache


class World(Weights):
    """Weights, and Hugging Face's model around them, made when first read."""

    @cached_property
    def peft(self) -> PeftBackend:
        """Hugging Face model with its PEFT adapters: two of the systems, and the reference of the check."""
        return PeftBackend(self, self.kv_cache)

    @cached_property
    def kv_cache(self) -> KVCache:
        """KV cache of all systems, full of noise; a quarter larger than our engine needs, as Hugging Face pads."""
        config = self.limits.engine_config(lora=False)
        kept = KVCache(self._backbone, config.total_blocks * 5 // 4, config.block_size)
        fill_with_noise(kept)
        return kept

    @cached_property
    def registered(self) -> dict[tuple[bool, int], LoRAModel]:
        """(fully sharded, weight set) -> adapter as the first engine registered it; on a GPU in page-locked memory."""
        return {}

    def reference(self, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` (float32, host) of Hugging Face's model for a job alone, by one invocation."""
        with self.peft.adapter(job.adapter_id if lora else None):
            return self.peft.prefill(job.prompt, tokens)
