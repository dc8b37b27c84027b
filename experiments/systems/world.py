"""What the systems of Figure 11 are built on, and what their tokens are checked with.

Device memory, beside the weights (13.5 GB of Llama-2 7B, 26.0 GB of 13B): one pool of keys and values for all systems
(43 and 68 GB at 32 requests of 2,048 tokens), 32 adapters of rank 16 (2.6 and 4.0 GB) that PEFT computes with, and as
much again in the slots of each of the three engines with LoRA; graphs and activations are a few GB more.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from experiments.systems.hf_backend import PeftBackend, noise
from experiments.systems.stream import Job
from experiments.systems.weights import Weights
from punica.adapters import LoRAModel
from punica.engine.kv_cache import KVCache


class World(Weights):
    """Weights and, once asked for, Hugging Face's model around them. Built once; systems are cheap to build on it."""

    @cached_property
    def peft(self) -> PeftBackend:
        """The Hugging Face model with its PEFT adapters: two of the systems, and the reference of the check."""
        return PeftBackend(self, self.kv_cache)

    @cached_property
    def kv_cache(self) -> KVCache:
        """Of all systems, which take turns; noise at first, so that a window of a stream can begin anywhere.

        A quarter larger than our engine's: Hugging Face pads a batch to its longest prompt.
        """
        config = self.limits.engine_config(lora=False)
        cache = KVCache(self._backbone, config.total_blocks * 5 // 4, config.block_size)
        for rows in (*cache.keys, *cache.values):
            rows.view(-1).copy_(noise(rows.numel(), self.dtype, self.device))
        return cache

    @cached_property
    def registered(self) -> dict[tuple[bool, int], LoRAModel]:
        """By (fully sharded or not, weight set) the adapter as the first such engine registered it, for all of them: on
        a GPU that is a copy of this rank's part in page-locked memory.
        """
        return {}

    def reference(self, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` (float32, on the host) of Hugging Face's model for a job alone, with its
        adapter or without, that goes on with `tokens`: one invocation over prompt and tokens, whatever their length.
        """
        with self.peft.adapter(job.adapter_id if lora else None):
            return self.peft.prefill(job.prompt, tokens)
