"""Kernels of the GPU backend between the dense projections of a decoder layer: attention of decode rows
over the paged KV cache (``decode_attention``), the norm behind a residual connection (``add_rms_norm``), RoPE with the
cache write (``rotate_and_store``), and the activation of the MLP (``swiglu``). And, once per step, for the angles of
RoPE (``rotary_angles``) and the most probable tokens (``argmax``).

They compute what :mod:`punica.models.llama` and :mod:`punica.engine.attention` do, on the engine's cache layout. With
PDL (compute capability 9.0) each waits for its predecessor before it reads or writes what that may touch. All raise
ValueError or TypeError for shapes, layouts, dtypes or devices, and RuntimeError where no Triton kernel can run.
"""

from punica.ops.triton_ops.backbone.decode_attention import Pages, choose_splits, decode_attention
from punica.ops.triton_ops.backbone.prompt_attention import Cached, prompt_attention
from punica.ops.triton_ops.backbone.rotary import rotary_angles, rotate_and_store
from punica.ops.triton_ops.backbone.rows import add_rms_norm, argmax, swiglu
from punica.ops.triton_ops.backbone.skinny_gemm import MAX_TOKENS, skinny_gemm
