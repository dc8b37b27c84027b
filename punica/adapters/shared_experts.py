"""Experts stored projection by projection, with factors that all experts share.

The layout of SGLang, Megatron-Bridge and vLLM (`experts_shared_outer_loras`, `enable_moe_shared_loras`): under
`...experts.w1` (or `gate_proj`, `gate_up_proj`, ...) A is `[E, r, in]` and B `[E, out, r]`. Instead of `E` the leading
dimension is 1 where all experts share a factor: A of gate and up, B of down ("shared outer"), or both.
"""

from torch import Tensor

from punica.ops.quant import Fp8Matrix

W1, W2, W3, W13 = range(-2, -6, -1)
"""Part numbers of whole projections; those of single matrices start at 0."""
PROJECTIONS = {
    "w1": W1, "gate_proj": W1, "w2": W2, "down_proj": W2, "w3": W3, "up_proj": W3, "w13": W13, "gate_up_proj": W13,
}  # fmt: skip
"""Last name components of whole projections."""


def is_projection_name(module: str) -> bool:
    """Tell if a module is one projection of all experts of a layer: `...experts.w1`."""
    owner, _, last = module.rpartition(".")
    return last in PROJECTIONS and owner.rpartition(".")[2] == "experts"


def check_projection(module: str, a: Tensor | Fp8Matrix, b: Tensor | Fp8Matrix, rank: int) -> None:
    """Check A `[E or 1, rank, in]` and B `[E or 1, out, rank]`. ValueError naming the module and both values."""
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    if a.ndim != 3 or b.ndim != 3 or len({a.shape[0], b.shape[0]} - {1}) > 1:
        raise ValueError(
            f"module {module!r}: A and B of all experts must be [E, r, in] and [E, out, r], with 1 for E where they "
            f"share a factor; got {shapes}"
        )
    if (a.shape[1], b.shape[2]) != (rank, rank):
        raise ValueError(f"module {module!r}: A and B have shapes {shapes}, the adapter's config says rank {rank}")
