"""Compile the MoE kernels for an absent GPU, as `target_compiler` the dense ones."""

from typing import Any

import torch
from target_compiler import run

from punica.ops.experts import Experts, Fp8Experts, Switches
from punica.ops.scales import Scheme
from punica.ops.triton_ops.moe_align import PairGroups, align_all
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How

LAYERS = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768), "odd": (10, 3, 1000, 100)}
"""Experts, experts per token, hidden and inner size."""
SLOTS = 4


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def compile_case(case: dict[str, Any]) -> None:
    """Launch alignment, the LoRA of one product, and the product itself."""
    (experts, top_k, hidden, inner), height = LAYERS[case["layer"]], case["height"]
    tokens, rank, dtype, down = case["tokens"], case["rank"], getattr(torch, case["dtype"]), case["down"]
    slices, (k, n) = (1, (inner, hidden)) if down else (2, (hidden, inner))
    pairs, i32 = tokens * top_k, torch.int32
    blocks = -(-(pairs + experts * (height - 1)) // height)
    ids, mapping = empty(tokens, top_k, dtype=torch.int64), empty(tokens, dtype=i32)
    enabled = empty(SLOTS + 1, dtype=i32)
    x = empty(pairs if down else tokens, k, dtype=dtype)
    aligned: tuple = (None, empty(pairs, dtype=torch.int64), None)
    if not case["naive"]:
        flat = align_all(ids, mapping, (experts, height, SLOTS, blocks * height, blocks), enabled, None)
        aligned = (flat[0].view(SLOTS, -1), flat[1].view(SLOTS, -1), flat[2])
    held = getattr(torch, case["fp8"]) if case["fp8"] else dtype
    a = [empty(SLOTS, experts, rank, k, dtype=held)] * slices
    b = [empty(SLOTS, experts, n, rank, dtype=held)] * slices
    ranks = empty(slices, SLOTS, dtype=i32) if case["ranks"] else None
    y, weights = empty(tokens, top_k, slices * n, dtype=dtype), empty(tokens, top_k, dtype=torch.float32)
    fp8 = _scales(case, x.shape[0], (experts, slices, rank, k, n)) if case["fp8"] else None
    if case["w8a8"]:
        x = empty(*x.shape, dtype=torch.float8_e4m3fn)
    listed = None if case["naive"] else empty(min(SLOTS + 1, tokens), dtype=i32)  # as the wrapper lists them
    given = Experts(y, x, a, b, weights, *aligned, mapping, enabled, listed, ranks, fp8)
    fused(given, rank, top_k, Switches(down), How(early=down))
    if down:
        PairGroups(ids, experts).multiply(x, empty(experts, n, k, dtype=dtype), 1)


def _scales(case: dict[str, Any], rows: int, sizes: tuple[int, ...]) -> Fp8Experts:
    """Per channel, or in blocks of ``case["block"]``."""
    experts, slices, rank, k, n = sizes
    block, f32 = case["block"], torch.float32
    scheme = Scheme(block, block, case["w8a8"], not block)
    x_scale = empty(rows, -(-k // block) if block else 1, dtype=f32) if case["w8a8"] else None
    a, b = ([empty(SLOTS, experts, *scheme.shape(*shape), dtype=f32)] * slices for shape in ((rank, k), (n, rank)))
    return Fp8Experts(a, b, x_scale, None, scheme, scheme)


if __name__ == "__main__":
    run(compile_case)
