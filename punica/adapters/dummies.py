"""Zero adapters, for warm-up and graph capture: the cost of a real adapter of that rank, and no effect on outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from punica.adapters.merging import dummy_weights
from punica.adapters.weights import LoRAModel
from punica.checks import check_count
from punica.config import LoRAConfig
from punica.layers import SlottedLayer


class DummyAdapters:
    """Makes zero adapters for one wrapped model.

    Args:
        modules: `{name: LoRA layer}`.
        embedding_modules: last name components of those of them that are embeddings or heads.
        lora_config: limits the rank.
        dtype: of the tensors.
    """

    def __init__(
        self,
        modules: Mapping[str, SlottedLayer],
        embedding_modules: Collection[str],
        lora_config: LoRAConfig,
        dtype: torch.dtype,
    ) -> None:
        self._modules = modules
        self._embedding_modules = embedding_modules
        self._lora_config = lora_config
        self._dtype = dtype
        self._by_rank: dict[int, LoRAModel] | None = None  # while caching

    def create(self, adapter_id: int, rank: int, embedding_modules: Collection[str] | None = None) -> LoRAModel:
        """A zero adapter; see :meth:`punica.adapters.LoRAModelManager.create_dummy_lora`."""
        rank = self._checked_rank(rank)
        left_out = self._left_out(embedding_modules)
        loras = {
            name: dummy_weights(name, layer, rank, self._dtype)
            for name, layer in self._modules.items()
            if name.rpartition(".")[2] not in left_out
        }
        return LoRAModel(adapter_id, rank, loras)

    def get(self, adapter_id: int, rank: int) -> LoRAModel:
        """As :meth:`create` over all modules; inside :meth:`caching` adapters of one rank share their tensors."""
        if self._by_rank is None:
            return self.create(adapter_id, rank)
        if rank not in self._by_rank:
            self._by_rank[rank] = self.create(adapter_id, rank)
        return self._by_rank[rank].clone(adapter_id)

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Inside, one zero adapter is built per rank. Nested uses share the outermost cache."""
        outer = self._by_rank
        self._by_rank = {} if outer is None else outer
        try:
            yield
        finally:
            self._by_rank = outer

    def _checked_rank(self, rank: int) -> int:
        limit = self._lora_config.max_lora_rank
        if not 1 <= check_count("rank", rank) <= limit:
            raise ValueError(f"rank must be in [1, max_lora_rank={limit}], got {rank}")
        if not self._lora_config.fully_sharded_loras:
            return rank
        tp_size = max(layer.tp_size for layer in self._modules.values())
        return -(-rank // tp_size) * tp_size

    def _left_out(self, embedding_modules: Collection[str] | None) -> set[str]:
        """Embedding modules that a call does not ask for."""
        if embedding_modules is None:
            return set()
        if unknown := sorted(set(embedding_modules) - set(self._embedding_modules)):
            raise ValueError(
                f"embedding_modules {unknown} are none of the model's, which are {sorted(self._embedding_modules)}"
            )
        return set(self._embedding_modules) - set(embedding_modules)
