"""Kernels of the GPU backend between the dense projections of a decoder layer: attention of decode rows
over the paged KV cache (``decode_attention``), the norm behind a residual connection (``add_rms_norm``), RoPE with the
cache write (``rotate_and_store``), and the activation of the MLP (``swiglu``). And, once per step, for the angles of
RoPE (``rotary_angles``) and the most probable tokens (``argmax``).

They compute what :mod:`punica.models.llama` and :mod:`punica.engine.attention` do, on the engine's cache layout. With
PDL (compute capability 9.0) each waits for its predecessor before it reads or writes what that may touch.
"""

from punica.ops.triton_ops.backbone.angles import rotary_angles
from punica.ops.triton_ops.backbone.argmax import argmax
from punica.ops.triton_ops.backbone.decode_attention import Pages, choose_splits, decode_attention
from punica.ops.triton_ops.backbone.norm import add_rms_norm
from punica.ops.triton_ops.backbone.prompt_attention import prompt_attention
from punica.ops.triton_ops.backbone.rotary import rotate_and_store
from punica.ops.triton_ops.backbone.skinny_gemm import MAX_TOKENS, skinny_gemm
from punica.ops.triton_ops.backbone.swiglu import swiglu
