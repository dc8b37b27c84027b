"""Triton kernels of multi-adapter LoRA. Importing this package imports Triton; `punica.ops` does so only on request."""

from punica.ops.triton_ops.configs import clear_config_cache, get_lora_op_configs, load_lora_op_config
from punica.ops.triton_ops.lora_expand import lora_expand
from punica.ops.triton_ops.lora_linear import lora_linear
from punica.ops.triton_ops.lora_shrink import lora_shrink

__all__ = [
    "clear_config_cache",
    "get_lora_op_configs",
    "load_lora_op_config",
    "lora_expand",
    "lora_linear",
    "lora_shrink",
]
