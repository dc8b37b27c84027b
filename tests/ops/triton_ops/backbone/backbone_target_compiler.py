"""Compile the backbone's kernels for a GPU that is not there: ``python backbone_target_compiler.py 90 < cases.json``.
See `target_compiler`. Operands lie on the meta device; a case is a layer, a dtype, the splits of its attention, and
whether the cache is FP8.
"""

import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from target_compiler import Compilations, empty

from punica.ops.backbone import HeadNorms
from punica.ops.quant import E4M3
from punica.ops.scales import PER_CHANNEL, PLAIN
from punica.ops.triton_ops.backbone import (
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
from punica.ops.triton_ops.lora_linear import describe_base, fused_schedule, plan_gemm_and_shrink
from punica.ops.weights import Stack

MODULES = ("decode_attention", "prompt_attention", "rotary", "rows", "skinny_gemm")
LAYERS = {
    "llama2-7b": (32, 32, 128, 4096, 11008), "llama2-70b": (64, 8, 128, 8192, 28672), "odd": (6, 2, 80, 100, 300),
    "small": (32, 8, 64, 2048, 8192), "wide": (16, 8, 256, 3072, 24576),
    "slim": (4, 2, 8, 32, 64),
}  # fmt: skip
"""Heads, kv heads, head size, hidden and inner size."""
NORMALISED = ("small", "odd")
TOKENS, BLOCK_SIZE, BLOCKS, WIDTH = 32, 16, 64, 40
RANK, SLOTS, VOCAB = 16, 4, 128_256


def compile_case(case: dict[str, Any], done: Compilations) -> list[dict[str, Any]]:
    """The kernels of a decode step with one layer, and a prompt's attention, in the order of their launches."""
    heads, kv_heads, size, hidden, inner = LAYERS[case["layer"]]
    dtype, i32, before = getattr(torch, case["dtype"]), torch.int32, len(done.records)
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
    for tokens in (1, TOKENS):
        skinny_gemm(x[:tokens], hidden_rows[:tokens], down)
    gemm_and_shrink(hidden_rows, down, x, bool(case.get("fp8")), done.capability)
    argmax(empty(TOKENS, dtype=torch.int64), empty(TOKENS, VOCAB, dtype=dtype), -1)
    return [{"case": case, **record} for record in done.records[before:]]


def gemm_and_shrink(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, fp8: bool, capability: int) -> None:
    """The base product with the shrink of ``RANK`` ranks in its launch, A in FP8 or in the dtype of x."""
    a = empty(SLOTS, RANK, x.shape[1], dtype=E4M3 if fp8 else x.dtype)
    scales, ranks = empty(SLOTS, RANK, dtype=torch.float32), empty(1, SLOTS, dtype=torch.int32)
    form = Stack.of_a((a,), ranks, (scales,) if fp8 else None, PER_CHANNEL if fp8 else PLAIN).form
    base = describe_base((weight,))
    schedule = fused_schedule(x, base, RANK)
    plan = plan_gemm_and_shrink(x, base, y, form, schedule, capability >= 90)
    given = (a if capability >= 89 else a.view(torch.uint8), scales, scales) if fp8 else (a,)
    partials = empty(schedule.split_k, 1, TOKENS, RANK, dtype=torch.float32)
    step = SimpleNamespace(tensors=[empty(TOKENS, dtype=torch.int32)])
    plan.run((x, weight), given, (partials, y), step, ranks, True, 1.0)


def main() -> None:
    capability = int(sys.argv[1])
    done = Compilations(capability)
    for name in MODULES:
        module: Any = import_module(f"punica.ops.triton_ops.backbone.{name}")
        module.check_runnable, module.supports_pdl = lambda device: None, lambda device: capability >= 90
        if capability < 89 and hasattr(module, "as_operand"):  # whose compiler knows no e4m3
            module.as_operand = lambda tensor: tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
    json.dump([record for case in json.load(sys.stdin) for record in compile_case(case, done)], sys.stdout)


if __name__ == "__main__":
    main()
