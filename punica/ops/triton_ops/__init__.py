"""Triton kernels of multi-adapter LoRA. Importing this package imports Triton; `punica.ops` does so only on request.

``shrink``, ``expand`` and ``linear`` take a step (`punica.metadata.LoRABatch`), ``lora_shrink``, ``lora_expand`` and
``lora_linear`` the tensors of its metadata; those that end in ``_fp8`` are for weights in FP8. The kernels
of the layers that adapters share are in :mod:`punica.ops.triton_ops.backbone`.
"""

from punica.ops.triton_ops.configs import clear_config_cache, get_lora_op_configs, load_lora_op_config
from punica.ops.triton_ops.fused_moe_lora import fused_moe_lora
from punica.ops.triton_ops.fused_moe_lora_fp8 import fused_moe_lora_fp8
from punica.ops.triton_ops.fused_moe_parts import (
    fused_moe_lora_expand,
    fused_moe_lora_expand_fp8,
    fused_moe_lora_shrink,
    fused_moe_lora_shrink_fp8,
)
from punica.ops.triton_ops.lora_expand import expand, lora_expand
from punica.ops.triton_ops.lora_expand_fp8 import expand_fp8, lora_expand_fp8
from punica.ops.triton_ops.lora_linear import linear, lora_linear
from punica.ops.triton_ops.lora_linear_fp8 import linear_fp8, lora_linear_fp8
from punica.ops.triton_ops.lora_shrink import lora_shrink, shrink
from punica.ops.triton_ops.lora_shrink_fp8 import lora_shrink_fp8, shrink_fp8
from punica.ops.triton_ops.moe_align import moe_lora_align_block_size
from punica.ops.triton_ops.op import Options
from punica.ops.triton_ops.quantize_rows import quantize_rows, quantized_rows
from punica.ops.triton_ops.tensor_batch import verify_indices
