"""`PunicaWrapperCPU`: the wrapper on plain torch, on any device; products as in `punica.ops.torch_ops`."""

from typing import Any

import torch

from punica.config import LoRAConfig
from punica.metadata import LoRABatch
from punica.ops import fp8_ops, moe_torch, torch_ops
from punica.ops.checks import FLOATS, STEP, check_low_rank, describe_weights, described_parts
from punica.ops.quant import FP8_DTYPES
from punica.wrapper.base import PunicaWrapperBase, Slices, Weights
from punica.wrapper.experts import ExpertMethods


class PunicaWrapperCPU(ExpertMethods, PunicaWrapperBase):
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
        self._linear = torch_ops.linear  # type: ignore[method-assign]
        self._shrink_fp8 = fp8_ops.shrink_fp8  # type: ignore[method-assign]
        self._expand_fp8 = fp8_ops.expand_fp8  # type: ignore[method-assign]
        self._linear_fp8 = fp8_ops.linear_fp8  # type: ignore[method-assign]
        self._experts = moe_torch.ExpertCalls()

    def _linear_through(  # type: ignore[override]
        self, buffer: Slices, y: torch.Tensor, x: torch.Tensor, lora_a: Weights, lora_b: Weights, batch: LoRABatch,
        scale: float, **options: Any,
    ) -> None:  # fmt: skip
        fp8 = "shrink" in options
        allowed = FP8_DTYPES if fp8 else FLOATS
        form = describe_weights(STEP.b, lora_b, -1, allowed)
        if isinstance(buffer, torch.Tensor):
            check_low_rank("buffer", buffer, form, x.shape[0], (torch.float32,))
        else:
            described_parts("buffer", buffer, lora_b, -1, None, allowed)
        if batch.no_lora:
            return
        low_rank = torch.empty(len(buffer), x.shape[0], form.rank, dtype=torch.float32, device=x.device)
        linear = self._linear_fp8 if fp8 else self._linear
        linear(y, x, lora_a, lora_b, batch, scale, buffer=low_rank, **options)
        for part, result in zip(buffer, low_rank, strict=True):
            part.copy_(result)
