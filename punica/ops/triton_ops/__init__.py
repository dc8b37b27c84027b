"""Triton kernels of multi-adapter LoRA. Importing this package imports Triton; `punica.ops` does so only on request.

`TritonOps` takes a step (`punica.metadata.LoRABatch`) and weights as objects; ``lora_shrink``, ``lora_expand``,
``lora_linear`` and their ``_fp8`` forms take the tensors of both (`punica.ops.triton_ops.flat`). The kernels of the
layers that adapters share are in :mod:`punica.ops.triton_ops.backbone`.
"""

import sys

from punica.ops.triton_ops.configs import Options, clear_config_cache, get_lora_op_configs, load_lora_op_config
from punica.ops.triton_ops.flat.dense import lora_expand, lora_linear, lora_shrink
from punica.ops.triton_ops.flat.tensor_batch import verify_indices
from punica.ops.triton_ops.fused_moe_lora import fused_moe_lora, fused_moe_lora_expand, fused_moe_lora_shrink
from punica.ops.triton_ops.fused_moe_lora_fp8 import (
    fused_moe_lora_expand_fp8,
    fused_moe_lora_fp8,
    fused_moe_lora_shrink_fp8,
)
from punica.ops.triton_ops.lora_expand_fp8 import lora_expand_fp8
from punica.ops.triton_ops.lora_shrink_fp8 import lora_shrink_fp8
from punica.ops.triton_ops.moe_align import moe_lora_align_block_size
from punica.ops.triton_ops.quantize_rows import quantize_rows, quantized_rows
from punica.ops.triton_ops.step_ops import TritonOps

# their documented paths: `punica.ops.triton_ops.lora_shrink.lora_shrink` and so on, beside the kernels
for _op in (lora_shrink, lora_expand, lora_linear):
    setattr(sys.modules[f"{__name__}.{_op.__name__}"], _op.__name__, _op)
