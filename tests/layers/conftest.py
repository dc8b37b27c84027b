"""A LoRA config, a wrapper on the CPU, and the answer computed row by row in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

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


@pytest.fixture
def lora_term() -> Callable[..., Tensor]:
    """``sum over rows of (x_t A^T) B^T`` in float64; ``adapters[slot]`` is a list of (A, B) or None per slice."""

    def compute(x: Tensor, slots: Sequence[int], adapters: dict, sizes: Sequence[int]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).double()
        result = torch.zeros(len(rows), sum(sizes), dtype=torch.float64)
        for t, slot in enumerate(slots):
            start = 0
            for pair, size in zip(adapters.get(slot, [None] * len(sizes)), sizes, strict=True):
                if pair is not None:
                    a, b = (factor.double() for factor in pair)
                    result[t, start : start + size] = (rows[t] @ a.T) @ b.T
                start += size
        return result.view(*x.shape[:-1], -1)

    return compute


@pytest.fixture
def random_pair() -> Callable[..., tuple[Tensor, Tensor]]:
    """A ``[r, in]`` and B ``[out, r]``, scaled so that the LoRA term has the size of the base output."""

    def build(rank: int, in_size: int, out_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        a = torch.randn(rank, in_size) / in_size**0.5
        b = torch.randn(out_size, rank) / max(rank, 1) ** 0.5
        return a.to(dtype), b.to(dtype)

    return build
