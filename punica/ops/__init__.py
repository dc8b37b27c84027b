"""Operators: pure functions on tensors, without state or metadata of their own.

:mod:`~punica.ops.reference` says what each operator means, :mod:`~punica.ops.torch_ops` and
:mod:`~punica.ops.moe_torch` compute it fast on a CPU, ``punica.ops.triton_ops`` holds the GPU kernels. These are
imported on first use of ``lora_shrink``, ``lora_expand``, ``lora_linear``, their ``_fp8`` kin, the ``fused_moe_lora``
family or ``moe_lora_align_block_size``, so the CPU path needs no Triton. The six ``sgmv_*`` / ``bgmv_*`` names exist
twice with one meaning; this package exports the fast ones. FP8 weights: :mod:`~punica.ops.quant` makes them,
:mod:`~punica.ops.scales` says what their scales mean. Operands are checked by :mod:`~punica.ops.expect`.
"""

from typing import Any

from punica.lazy import lazily
from punica.ops.torch_ops import (
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)

_TRITON_OPS = (
    "lora_expand", "lora_expand_fp8", "lora_linear", "lora_shrink", "lora_shrink_fp8",
    "fused_moe_lora", "fused_moe_lora_fp8", "fused_moe_lora_shrink", "fused_moe_lora_expand",
    "moe_lora_align_block_size",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, {"punica.ops.triton_ops": _TRITON_OPS})
