"""`lora_shrink_fp8`, by its documented path."""

from punica.ops.triton_ops.flat.fp8 import lora_shrink_fp8 as lora_shrink_fp8
