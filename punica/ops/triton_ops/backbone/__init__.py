"""Kernels of the GPU backend between the dense projections of a decoder layer, on the engine's cache layout.

They compute what :mod:`punica.models.llama` and :mod:`punica.engine.attention` do. With PDL (compute capability 9.0)
each waits for its predecessor before it reads or writes what that may touch. All raise ValueError or TypeError for
shapes, layouts, dtypes or devices, and RuntimeError where no Triton kernel can run.
"""

from punica.ops.triton_ops.backbone.decode_attention import Pages, choose_splits, decode_attention
from punica.ops.triton_ops.backbone.prompt_attention import Cached, prompt_attention
from punica.ops.triton_ops.backbone.rotary import rotary_angles, rotate_and_store
from punica.ops.triton_ops.backbone.rows import add_rms_norm, argmax, dequantise, swiglu
from punica.ops.triton_ops.backbone.skinny_gemm import MAX_TOKENS, skinny_gemm
