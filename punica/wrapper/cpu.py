"""`PunicaWrapperCPU`: the wrapper on plain torch, on any device; products as in `punica.ops.torch_ops`."""

from typing import Any

import torch

from punica.config import LoRAConfig
from punica.metadata import HostIndices
from punica.ops import torch_ops
from punica.wrapper.base import PunicaWrapperBase
from punica.wrapper.operands import Weights


class PunicaWrapperCPU(PunicaWrapperBase):
    """Products by segment: the layout of the step is planned once in `update_metadata` and used by every layer.

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
        self._token_plan = self._sampled_plan = torch_ops.plan_segments(torch.empty(0, dtype=torch.int64))

    def _prepare_backend(self, host: HostIndices) -> None:
        self._token_plan = torch_ops.plan_segments(torch.from_numpy(host.token_slots))
        same = host.sampler_slots is host.token_slots
        self._sampled_plan = self._token_plan if same else torch_ops.plan_segments(torch.from_numpy(host.sampler_slots))

    def _rows_and_plan(self, sampled: bool) -> tuple[int, torch_ops.SegmentPlan]:
        """Rows of the mapping, and their plan; rows past them are padding and stay untouched."""
        lengths = self._current().lengths
        return (lengths[1], self._sampled_plan) if sampled else (lengths[0], self._token_plan)

    def _shrink(
        self, y: torch.Tensor, x: torch.Tensor, weights: Weights, scale: float, *, sampled: bool, **options: Any
    ) -> None:
        rows, plan = self._rows_and_plan(sampled)
        torch_ops.shrink(x[:rows], weights, y[:, :rows], plan, scale, **options)

    def _expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: Weights,
        offset_start: int,
        add_inputs: bool,
        *,
        sampled: bool,
        **options: Any,
    ) -> None:
        rows, plan = self._rows_and_plan(sampled)
        torch_ops.expand(x[:, :rows], weights, y[:rows], plan, offset_start, add_inputs, **options)
