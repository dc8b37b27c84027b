"""`lora_expand_fp8`, by its documented path."""

from punica.ops.triton_ops.flat.fp8 import lora_expand_fp8 as lora_expand_fp8
