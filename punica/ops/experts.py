"""Operands of LoRA on experts: a layer's weights, a step's assignment of pairs, and both as one call of an op.

T tokens, k experts per token, pair ``i = t * k + j``, L slots, E experts on this rank, n slices of N columns. R is the
rank of this rank's A and R' that of B (the full rank where a collective gathers).

Scales of FP8 weights are as in `punica.ops.fp8_checks`, with one dimension more for the experts:

    per tensor  A and B [L, E]       per channel  A [L, E, R], B [L, E, N] (a 1 may follow)
    block-wise  A [L, E, ceil(R/group_n), ceil(K/group_k)], B [L, E, ceil(N/group_n), ceil(R/group_k)]

Activations x are real (weight-only), or FP8 with scales of their own (w8a8): one element, one per row, or block-wise
one per row and group of ``group_k`` columns. Block sizes may be any, and a block may cross those of a kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from punica.ops.checks import FLOATS
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import validate_scales

NAIVE_SHARE = 8
"""Naive assignment (one block per pair) where pairs x this are at most experts x slots. On a GPU only for
batch-invariant and tuned calls, else `punica.ops.triton_ops.moe_rules.most_naive`.
"""


class Fp8Experts(NamedTuple):
    """Scales of both products. ``x_scale``: of an x in FP8; ``h_scale``: of the intermediate where that is
    rounded to the format of B, ``[T*k]`` rows shared by all slices (None: it is not).
    """

    a_scale: Sequence[Tensor]
    b_scale: Sequence[Tensor]
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    shrink: Scheme = Scheme()
    expand: Scheme = Scheme()

    def contiguous(self) -> "Fp8Experts":
        """Make the scales contiguous, as kernels read them."""
        a, b = (tuple([one.contiguous() for one in each]) for each in (self.a_scale, self.b_scale))
        return self._replace(a_scale=a, b_scale=b, x_scale=None if self.x_scale is None else self.x_scale.contiguous())

    def validate(self) -> None:
        """For debugging: ValueError unless all scales are finite and >= 0. Waits for the device."""
        validate_scales(self.a_scale, "lora_a_scale")
        validate_scales(self.b_scale, "lora_b_scale")
        if self.x_scale is not None:
            validate_scales(self.x_scale, "a_scale")


class Switches(NamedTuple):
    """Scalar options of `fused_moe_lora`."""

    mul_routed_weight: bool = False
    fully_sharded: bool = False
    offset: int = 0
    add_inputs: bool = True


@dataclass(frozen=True, eq=False)
class ExpertLoRAWeights:
    """LoRA weights of one product of a layer of experts, in all slots; references, made once by the layer.

    ``lora_a``, ``lora_b``: n x ``[L, E, R, K]`` and n x ``[L, E, N, R']``. ``enabled``: int32 ``[L+1]``, slots with
    weights here. ``lora_ranks``: true ranks, int32 ``[n, L]`` (None: all of R). ``fp8``: scales of weights in FP8.
    ``site``: "w13" or "w2" of the tuned files; None: these are not looked up.
    """

    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    enabled: Tensor
    lora_ranks: Tensor | None = None
    fp8: Fp8Experts | None = None
    switches: Switches = field(default_factory=Switches)
    site: str | None = None

    @property
    def slots(self) -> int:
        """L."""
        return self.lora_a[0].shape[0]

    @property
    def experts(self) -> int:
        """E."""
        return self.lora_a[0].shape[1]

    def prefers_naive(self, pairs: int) -> bool:
        """Tell whether an expert of an adapter rarely has two of so few pairs."""
        return pairs * NAIVE_SHARE <= self.experts * self.slots


class Assignment(NamedTuple):
    """Pairs of a step by slot and expert, for both products of a layer. ``mapping``: slot of every token, ``[T]``.

    ``ids``, ``experts``, ``counts``: of `moe_lora_align_block_size`, viewed ``[L, P]``, ``[L, B]`` and ``[L]``; naive:
    None, the expert of every pair ``[T*k]``, None. Rows of slots outside the step's own list may be undefined.
    """

    topk_weights: Tensor
    ids: Tensor | None
    experts: Tensor
    counts: Tensor | None
    mapping: Tensor


class Experts(NamedTuple):
    """Operands of one fused MoE LoRA call, as `fused_moe_lora` takes them.

    ``sorted_ids``, ``expert_ids``, ``counts``, ``mapping``: as in `Assignment`. ``lora_ids``: slots in use, at most
    ``[L+1]``, -1: none (None: all). ``lora_ranks``: true rank of every slice and slot, int32 ``[n, L]``, not divided
    over a group; A and B are not read beyond (None: they are). ``fp8``: scales of weights in FP8.
    """

    output: Tensor
    x: Tensor
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    topk_weights: Tensor
    sorted_ids: Tensor | None
    expert_ids: Tensor
    counts: Tensor | None
    mapping: Tensor
    enabled: Tensor
    lora_ids: Tensor | None
    lora_ranks: Tensor | None = None
    fp8: Fp8Experts | None = None

    @property
    def wide(self) -> torch.dtype:
        """Compute dtype of the products."""
        return self.x.dtype if self.fp8 is None or self.x.dtype in FLOATS else self.output.dtype


class ExpertForm(NamedTuple):
    """Sizes of a checked call. ``factor``: pairs per row of x; ``block_m``: of the alignment (1: naive)."""

    tokens: int
    top_k: int
    slices: int
    slots: int
    experts: int
    rank: int
    full_rank: int
    hidden: int
    width: int
    factor: int
    block_m: int

    @property
    def pairs(self) -> int:
        """T * k."""
        return self.tokens * self.top_k


Numbers = tuple[int, ...]


class ExpertOps(Protocol):
    """A backend's operations on experts: `TorchExpertOps` of `moe_torch.py`, `TritonExpertOps` of `moe_ops.py`.

    ``smallest_block``: fewest rows of a block of an alignment.
    """

    smallest_block: int

    def align(
        self, topk_ids: Tensor, mapping: Tensor, sizes: tuple[int, int, int, int, int], enabled: Tensor,
        expert_map: Tensor | None, lora_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """New flat outputs of `moe_lora_align_block_size`; ``sizes``: its five numbers. ``lora_ids``: slots to align,
        those of others are undefined (None: all).
        """

    def use_naive_assignment(self, pairs: int, active: int, weights: ExpertLoRAWeights) -> bool:
        """Tell whether pairs are not aligned, for both products of a layer."""

    def block_size(self, tokens: int, top_k: int, active: int, weights: ExpertLoRAWeights) -> int:
        """Rows of a block of the alignment."""

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        """Add one product. ``configs``: the seven numbers each of shrink and expand; None: the backend chooses.
        ``active``: adapters in use. ``site``: "w13" or "w2" of the tuned files; None: these are not looked up.
        """
