"""What the systems of Figure 11 are built on, and what their tokens are checked with."""

from functools import cached_property

from experiments.systems.hf_backend import PeftBackend, noise
from experiments.systems.stream import Job
from experiments.systems.weights import Weights
from punica.engine.kv_cache import KVCache


class World(Weights):
    """Weights and, once asked for, Hugging Face's model around them. Built once; systems are cheap to build on it."""

    @cached_property
    def peft(self) -> PeftBackend:
        """The Hugging Face model with its PEFT adapters: two of the systems, and the reference of the check."""
        return PeftBackend(self)

    @cached_property
    def kv_cache(self) -> KVCache:
        """Of all engines, which take turns; noise at first, so that a window of a stream can begin anywhere."""
        config = self.limits.engine_config(lora=False)
        cache = KVCache(self.backbone(), config.total_blocks, config.block_size)
        for rows in (*cache.keys, *cache.values):
            rows.view(-1).copy_(noise(rows.numel(), self.dtype, self.device))
        return cache

    @cached_property
    def references(self) -> dict[tuple[Job, bool], list[int]]:
        """Tokens that Hugging Face generates for a job alone, with and without LoRA; `systems.check` fills it."""
        return {}
