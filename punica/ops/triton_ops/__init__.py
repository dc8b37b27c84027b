"""Triton kernels of multi-adapter LoRA. Importing this package imports Triton; `punica.ops` does so only on request.

`TritonOps` takes a step (`punica.metadata.LoRABatch`) and weights as objects. The flat ops, which take the tensors of
both (`punica.vllm.ops`), are imported at the first use of one. The kernels of the layers that adapters share are in
:mod:`punica.ops.triton_ops.backbone`.
"""

from typing import Any

from punica.lazy import lazily, offer_module
from punica.ops.triton_ops.configs import Options, clear_config_cache, load_lora_op_config
from punica.ops.triton_ops.moe_align import moe_lora_align_block_size
from punica.ops.triton_ops.quantize_rows import quantize_rows, quantized_rows
from punica.ops.triton_ops.step_ops import TritonOps

_HOMES = {
    "punica.vllm.ops": (
        "lora_shrink", "lora_expand", "lora_linear", "lora_shrink_fp8", "lora_expand_fp8", "fused_moe_lora",
        "fused_moe_lora_fp8", "fused_moe_lora_shrink", "fused_moe_lora_expand",
    ),
    "punica.vllm.ops.experts": ("_run_fused_moe_lora_one_shot", "_run_fused_moe_lora_small_batch"),
    "punica.vllm.ops.tuned": ("get_lora_op_configs",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, _HOMES)


# documented paths of ops: `punica.ops.triton_ops.lora_shrink.lora_shrink` and so on
for _name in ("lora_shrink", "lora_expand", "lora_linear", "lora_shrink_fp8", "lora_expand_fp8", "fused_moe_lora",
              "fused_moe_lora_fp8"):  # fmt: skip
    offer_module(f"{__name__}.{_name}", __getattr__)
    globals().pop(_name, None)  # kernels' module, bound by its import
