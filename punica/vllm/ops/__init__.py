"""Flat ops: the products of LoRA with the step, the routing and the weights given by their tensors, on Triton kernels.

Each builds the objects of `punica.ops` from its arguments and calls the operators. Nothing in the library calls one but
graph tracers: a traced call of `punica.ops.triton_ops.TritonOps` is a node of the op of that name.
"""

from punica.vllm.ops.dense import lora_expand, lora_expand_fp8, lora_linear, lora_shrink, lora_shrink_fp8
from punica.vllm.ops.experts import fused_moe_lora, fused_moe_lora_expand, fused_moe_lora_fp8, fused_moe_lora_shrink
