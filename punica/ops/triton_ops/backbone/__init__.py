"""The GPU backend's kernels for what lies between the dense projections of a decoder layer: attention over the paged KV
cache for decode rows (``decode_attention``).

They compute what :mod:`punica.models.llama` and :mod:`punica.engine.attention` do, on the engine's cache layout.
"""

from punica.ops.triton_ops.backbone.decode_attention import choose_splits, decode_attention
