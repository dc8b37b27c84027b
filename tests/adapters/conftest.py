"""Fixtures over the tiny model of `adapter_world`."""

from pathlib import Path

import pytest
from adapter_world import VOCAB, DenseModel, PackedModel, Tenants

from punica.adapters import LoRAModelManager
from punica.config import LoRAConfig


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(tmp_path)


@pytest.fixture
def dense() -> DenseModel:
    return DenseModel().requires_grad_(False)


@pytest.fixture
def make_manager(dense: DenseModel):
    """`make_manager(max_loras=2, ...)`: a manager over a fresh packed model; keywords go to LoRAConfig."""

    def build(max_num_batched_tokens: int = 64, **config: object) -> LoRAModelManager:
        lora_config = LoRAConfig(**{"max_lora_rank": 8, **config})
        return LoRAModelManager(PackedModel(dense), 8, max_num_batched_tokens, VOCAB, lora_config, "cpu")

    return build
