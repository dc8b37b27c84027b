"""`PunicaWrapperCPU`: the wrapper on plain torch, on any device; products as in `punica.ops.torch_ops`."""

from __future__ import annotations

from typing import Any

import torch

from punica.config import LoRAConfig
from punica.metadata import LoRABatch
from punica.ops import torch_ops
from punica.ops.checks import STEP, check_low_rank, describe_weights, described_parts
from punica.wrapper.base import PunicaWrapperBase, Slices, Weights


class PunicaWrapperCPU(PunicaWrapperBase):
    """Products by segment: the layout of the step is planned once and used by every layer.

    Prefill and decode take the same path, so they give equal results. Products are accumulated in float32 and rounded
    once into y's dtype; rows without adapter are never computed.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        *,
        max_loras: int | None = None,
        lora_config: LoRAConfig | None = None,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras=max_loras, lora_config=lora_config)
        self._shrink = torch_ops.shrink  # type: ignore[method-assign]
        self._expand = torch_ops.expand  # type: ignore[method-assign]

    def _check_buffer(self, buffer: Slices, x: torch.Tensor, lora_b_stacked: Weights) -> None:
        form = describe_weights(STEP.b, lora_b_stacked, -1)
        if isinstance(buffer, torch.Tensor):
            check_low_rank("buffer", buffer, form, x.shape[:-1].numel(), (torch.float32,))
        else:
            described_parts("buffer", buffer, lora_b_stacked, -1, None)

    def _linear(  # type: ignore[override]
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a: Weights,
        lora_b: Weights,
        batch: LoRABatch,
        scale: float,
        *,
        buffer: Slices | None = None,
        **options: Any,
    ) -> None:
        if buffer is None:
            torch_ops.linear(y, x, lora_a, lora_b, batch, scale, **options)
            return
        low_rank = torch.empty(len(buffer), x.shape[0], lora_b[0].shape[-1], dtype=torch.float32, device=x.device)
        torch_ops.linear(y, x, lora_a, lora_b, batch, scale, buffer=low_rank, **options)
        for part, result in zip(buffer, low_rank, strict=True):
            part.copy_(result)
