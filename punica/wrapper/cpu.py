"""`PunicaWrapperCPU`: the wrapper on plain torch, on any device; products as in `TorchOps`."""

import torch

from punica.metadata import LoRABatch
from punica.ops import moe_torch
from punica.ops.expect import FLOAT32, expect
from punica.ops.interface import check_parts
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import LoRAWeights
from punica.wrapper.base import PunicaWrapperBase
from punica.wrapper.contract.linear import Slices


class PunicaWrapperCPU(PunicaWrapperBase):
    """Products by segment: the layout of the step is planned once and used by every layer.

    Prefill and decode take the same path, so they give equal results. Products are accumulated in float32 and rounded
    once into y's dtype; rows without adapter are never computed.
    """

    _ops = TorchOps()
    _experts = moe_torch.TorchExpertOps()

    def _linear(
        self, buffer: Slices | None, y: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, batch: LoRABatch,
        scale: float, add_inputs: bool, x_scale: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """The buffer is filled by a shrink of its own."""
        b = weights.b.form.stored
        if isinstance(buffer, torch.Tensor):
            sizes = b.sizes("lora_b_stacked") | {"T": x.shape[0], "of T *": "x"}
            expect("buffer", buffer, "n T r", dtype=FLOAT32, device=b.device, sizes=sizes)
        elif buffer is not None:
            check_parts("buffer", buffer, b)
        if batch.no_lora:
            return
        self.ops.linear(y, x, weights, batch, scale, add_inputs, x_scale)
        if buffer is None:
            return
        if weights.a.form.scheme.use_fp8_w8a8 and x_scale is None:
            x, x_scale = self.ops.quantize(x, weights.a.form.scheme.group_k)
        low_rank = torch.empty(len(buffer), x.shape[0], b.rank, dtype=torch.float32, device=x.device)
        self.ops.shrink(low_rank, x, weights.a, batch, scale, False, x_scale)
        for part, result in zip(buffer, low_rank, strict=True):
            part.copy_(result)
