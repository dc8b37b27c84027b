"""Fused LoRA of experts of `punica`: Triton kernels on a GPU, products of torch elsewhere."""

import torch
from torch import Tensor

from punica.ops.experts import ExpertLoRAWeights, Switches
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU


def run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    out, enabled = y.clone(), torch.ones(len(a) + 1, dtype=torch.int32, device=x.device)
    lora = ExpertLoRAWeights((a,), (b,), enabled, switches=Switches(mul_routed_weight=True))
    kind = PunicaWrapperGPU if x.is_cuda else PunicaWrapperCPU
    wrapper = kind(len(x), len(x), x.device, max_loras=len(a))
    wrapper.add_lora_experts(out, x.flatten(0, 1), lora, wrapper.assign_pairs(experts, weights, None, lora, slots))
    return out
