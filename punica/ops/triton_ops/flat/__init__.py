"""The flat front of the dense ops, for callers who hold index tensors and weights: vLLM's signatures.

Each function builds a step (`TensorBatch`) and weights (`punica.ops.weights`) from its arguments and calls `TritonOps`.
Nothing inside the library calls it, but graph tracers: a traced call of `TritonOps` is a node of the op of that name.
"""

from punica.ops.triton_ops.flat.dense import lora_expand, lora_linear, lora_shrink
from punica.ops.triton_ops.flat.fp8 import lora_expand_fp8, lora_shrink_fp8
from punica.ops.triton_ops.flat.tensor_batch import TensorBatch, verify_indices
