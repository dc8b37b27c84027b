"""A LoRA config, and a wrapper on the CPU."""

from collections.abc import Callable, Sequence

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperCPU

SLOTS = 4


@pytest.fixture
def lora_config() -> Callable[..., LoRAConfig]:
    """Builds a config with resolved dtype; ranks up to 8 unless told."""

    def build(max_lora_rank: int = 8, lora_dtype: torch.dtype = torch.float32, **options) -> LoRAConfig:
        return LoRAConfig(max_lora_rank=max_lora_rank, max_loras=SLOTS, lora_dtype=lora_dtype, **options)

    return build


@pytest.fixture
def wrapper_for() -> Callable[..., PunicaWrapperCPU]:
    """A wrapper whose rows use the given slots (-1: no adapter)."""

    def build(slots: Sequence[int], is_prefill: bool = False) -> PunicaWrapperCPU:
        wrapper = PunicaWrapperCPU(max(len(slots), 1), max(len(slots), 1), "cpu", max_loras=SLOTS)
        ids = [slot + 1 for slot in slots]
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill), list(range(1, SLOTS + 1)), SLOTS, 32)
        return wrapper

    return build
