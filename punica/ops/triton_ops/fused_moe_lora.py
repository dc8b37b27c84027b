"""`fused_moe_lora` and its two products, by their documented path."""

from punica.ops.triton_ops.flat.moe import _run_fused_moe_lora_one_shot as _run_fused_moe_lora_one_shot
from punica.ops.triton_ops.flat.moe import _run_fused_moe_lora_small_batch as _run_fused_moe_lora_small_batch
from punica.ops.triton_ops.flat.moe import fused_moe_lora as fused_moe_lora
from punica.ops.triton_ops.flat.moe_parts import fused_moe_lora_expand as fused_moe_lora_expand
from punica.ops.triton_ops.flat.moe_parts import fused_moe_lora_shrink as fused_moe_lora_shrink
