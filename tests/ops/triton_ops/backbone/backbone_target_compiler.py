"""Compile the backbone's kernels for an absent GPU: ``python backbone_target_compiler.py 90 < cases.json``, see
`target_compiler`. A case is a layer, a dtype, the splits of its attention, and whether cache and a weight are FP8.
"""

from typing import Any

import numpy as np
import torch
from target_compiler import run

from punica.ops.backbone import HeadNorms
from punica.ops.interface import Beside
from punica.ops.quant import E4M3
from punica.ops.scales import PER_CHANNEL, PLAIN
from punica.ops.triton_ops import TritonOps
from punica.ops.triton_ops.backbone import (
    Cached,
    Pages,
    add_rms_norm,
    argmax,
    decode_attention,
    prompt_attention,
    rotary_angles,
    rotate_and_store,
    skinny_gemm,
    swiglu,
)
from punica.ops.weights import LoRAWeights
from tests.ops.helpers import step

LAYERS = {
    "llama2-7b": (32, 32, 128, 4096, 11008), "llama2-70b": (64, 8, 128, 8192, 28672), "odd": (6, 2, 80, 100, 300),
    "small": (32, 8, 64, 2048, 8192), "wide": (16, 8, 256, 3072, 24576),
    "slim": (4, 2, 8, 32, 16),
}  # fmt: skip
"""Heads, kv heads, head size, hidden and inner size."""
NORMALISED = ("small", "odd")
TOKENS, BLOCK_SIZE, BLOCKS, WIDTH = 32, 16, 64, 40
RANK, SLOTS, VOCAB = 16, 4, 128_256


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def compile_case(case: dict[str, Any]) -> None:
    """Launch the kernels of a decode step with one layer, and a prompt's attention."""
    heads, kv_heads, size, hidden, inner = LAYERS[case["layer"]]
    dtype, i32 = getattr(torch, case["dtype"]), torch.int32
    cached = E4M3 if case.get("fp8") else dtype
    x, qkv = empty(TOKENS, hidden, dtype=dtype), empty(TOKENS, heads + 2 * kv_heads, size, dtype=dtype)
    cos, keys = empty(TOKENS, 1, size // 2, dtype=dtype), empty(BLOCKS * BLOCK_SIZE, kv_heads, size, dtype=cached)
    table, lengths = empty(TOKENS, WIDTH, dtype=i32), empty(TOKENS, dtype=i32)
    rotary_angles(cos, cos, empty(TOKENS, dtype=torch.int64), empty(size // 2, dtype=torch.float32), 1.0)
    add_rms_norm(x, x, x, empty(hidden, dtype=dtype), 1e-5)
    weight = empty(size, dtype=dtype)
    norms = HeadNorms(weight, weight, 1e-6) if case["layer"] in NORMALISED else None
    rotate_and_store(qkv, cos, cos, empty(TOKENS, dtype=torch.int64), keys, keys, norms)
    out = empty(TOKENS, heads, size, dtype=dtype)
    pages = Pages(table, lengths, lengths, BLOCK_SIZE)
    decode_attention(out, qkv[:, :heads], keys, keys, pages, case["splits"])
    prompt_attention(out, *qkv.split((heads, kv_heads, kv_heads), dim=1), empty(TOKENS + 1, dtype=i32))
    swiglu(empty(TOKENS, inner, dtype=dtype), empty(TOKENS, 2 * inner, dtype=dtype))
    down, hidden_rows = empty(hidden, inner, dtype=dtype), empty(TOKENS, inner, dtype=dtype)
    product = (down.to(E4M3), None, empty(hidden, dtype=torch.float32)) if case.get("fp8") else (down,)
    for tokens in (1, TOKENS):
        skinny_gemm(x[:tokens], hidden_rows[:tokens], *product)
    linear(hidden_rows, down, x, bool(case.get("fp8")))
    argmax(empty(TOKENS, dtype=torch.int64), empty(TOKENS, VOCAB, dtype=dtype), -1)
    prompts, starts = qkv.split((heads, kv_heads, kv_heads), dim=1), empty(TOKENS + 1, dtype=i32)
    few = 4 if dtype == torch.float16 else None
    prompt_attention(out, *prompts, starts, Cached(keys, keys, table, lengths, BLOCK_SIZE), 4, few)


def linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, fp8: bool) -> None:
    """The base product with the shrink of ``RANK`` ranks in its launch, then expand; A and B in FP8 or as x is."""
    held, f32, (n, k) = E4M3 if fp8 else x.dtype, torch.float32, weight.shape
    scales = ([empty(SLOTS, RANK, dtype=f32)], [empty(SLOTS, n, dtype=f32)]) if fp8 else (None, None)
    a, b = empty(SLOTS, RANK, k, dtype=held), empty(SLOTS, n, RANK, dtype=held)
    ranks, scheme = empty(1, SLOTS, dtype=torch.int32), PER_CHANNEL if fp8 else PLAIN
    rows = step(np.arange(TOKENS) % SLOTS, "cuda", SLOTS, TOKENS)
    weights = LoRAWeights.of((a,), (b,), ranks, scales, (scheme, scheme))
    TritonOps().linear(y, x, weights, rows, beside=Beside(base=(weight,)))


if __name__ == "__main__":
    run(compile_case)
