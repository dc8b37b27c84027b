"""`fused_moe_lora_fp8` and its two products, by their documented path."""

from punica.ops.triton_ops.flat.moe import fused_moe_lora_fp8 as fused_moe_lora_fp8
from punica.ops.triton_ops.flat.moe_parts import fused_moe_lora_expand_fp8 as fused_moe_lora_expand_fp8
from punica.ops.triton_ops.flat.moe_parts import fused_moe_lora_shrink_fp8 as fused_moe_lora_shrink_fp8
