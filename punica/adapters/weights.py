"""What an adapter has for one module: a pair (A, B), of its own or in the form that a packed layer takes.

A LoRA adapter adds `delta W = scaling * B A` to a layer, A `[r, in]`, B `[out, r]`. Before it enters a slot the scaling
is multiplied into B once, so that the operators of the serving path need no per-adapter scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from punica.adapters.check import check_pair
from punica.adapters.peft_config import PEFTHelper
from punica.layers.base import LoRAInput
from punica.layers.packing import LoRAFactor
from punica.ops.quant import Fp8Matrix


@dataclass(eq=False)
class LoRALayerWeights:
    """A and B of one module.

    Args:
        module_name: name in the model, e.g. `model.layers.0.self_attn.q_proj`.
        rank: r.
        lora_alpha: the numerator of the scaling.
        lora_a: `[r, in]`, a tensor or FP8 with its scales; `None` in a shell of :meth:`from_config`.
        lora_b: `[out, r]`; likewise.
        scaling: factor of `B A`; default `lora_alpha / rank`.

    Raises:
        ValueError: A and B are not 2-D, or have another rank than `rank`.
    """

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: LoRAFactor
    lora_b: LoRAFactor
    scaling: float = None  # type: ignore[assignment]  # only until it is built

    is_packed = False

    def __post_init__(self) -> None:
        if self.lora_a is not None and self.lora_b is not None:
            check_pair(self.module_name, self.lora_a, self.lora_b, self.rank)
        if self.scaling is None:
            self.scaling = self.lora_alpha / self.rank

    @classmethod
    def from_config(cls, module_name: str, peft_helper: PEFTHelper) -> LoRALayerWeights:
        """A shell without tensors: the module's own rank, alpha, scaling (`rank_pattern`, `alpha_pattern`, rsLoRA)."""
        rank, alpha = peft_helper.rank_of(module_name), peft_helper.alpha_of(module_name)
        return cls(module_name, rank, alpha, None, None, peft_helper.scaling_of(module_name))

    @classmethod
    def create_dummy_lora_weights(
        cls,
        module_name: str,
        input_dim: int,
        output_dim: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LoRALayerWeights:
        """Zeros with `lora_alpha = 1`: costs what an adapter of this rank costs, changes no output."""
        a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, a, b)

    def pair(self) -> tuple[torch.Tensor | Fp8Matrix, torch.Tensor | Fp8Matrix]:
        """`(A, B)`. Raises RuntimeError while they are not set (a shell)."""
        if self.lora_a is None or self.lora_b is None:
            raise RuntimeError(f"module {self.module_name!r}: lora_a and lora_b are not set yet (shell of from_config)")
        return self.lora_a, self.lora_b

    def optimize(self) -> LoRALayerWeights:
        """Multiply B by `scaling` (in float32, rounded once, into a new tensor) and set `scaling = 1`. Of a B in FP8
        the scales are multiplied.

        Idempotent; returns self.
        """
        if self.scaling != 1:
            _, b = self.pair()
            if isinstance(b, Fp8Matrix):
                self.lora_b = b.scaled(self.scaling)
            elif not b.is_meta:  # of which there is no number to multiply, and torch takes long to do so
                wide = torch.promote_types(b.dtype, torch.float32)
                self.lora_b = (b.to(wide) * self.scaling).to(b.dtype)
            self.scaling = 1
        return self

    @property
    def input_dim(self) -> int:
        """`in`, the width of A."""
        return self.pair()[0].shape[1]

    @property
    def output_dim(self) -> int:
        """`out`, the height of B."""
        return self.pair()[1].shape[0]


@dataclass(eq=False)
class StackedLoRALayerWeights(LoRALayerWeights):
    """A and B of all experts of a layer in one pair, as PEFT's `target_parameters` stores them.

    A is `[E*r, in]`, expert after expert; B `[out, r*E]`, where column `j*E + e` is rank j of expert e.
    """

    def __post_init__(self) -> None:
        if self.lora_a is not None and self.lora_b is not None:
            check_pair(self.module_name, self.lora_a, self.lora_b, self.lora_a.shape[0])
            if self.lora_a.shape[0] % self.rank:
                raise ValueError(
                    f"module {self.module_name!r}: {self.lora_a.shape[0]} rows of A are no multiple of the rank "
                    f"{self.rank}, which the adapter's config says every expert has"
                )
        if self.scaling is None:
            self.scaling = self.lora_alpha / self.rank

    @property
    def num_experts(self) -> int:
        """E, by the rank that the adapter's config gives them."""
        return self.pair()[0].shape[0] // self.rank

    def by_expert(self) -> tuple[torch.Tensor | Fp8Matrix, torch.Tensor | Fp8Matrix]:
        """`A [E, r, in]` and `B [E, out, r]`, scaled. Of FP8 the values stay; all experts share B's scales."""
        (a, b), experts = self.optimize().pair(), self.num_experts

        def of_a(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(experts, self.rank, -1)

        def of_b(columns: torch.Tensor) -> torch.Tensor:
            return columns.view(-1, self.rank, experts).permute(2, 0, 1)

        if isinstance(a, Fp8Matrix):
            a = Fp8Matrix(of_a(a.values), a.scale.view(experts, self.rank))
        else:
            a = of_a(a)
        if isinstance(b, Fp8Matrix):
            return a, Fp8Matrix(of_b(b.values), b.scale.expand(experts, -1))
        return a, of_b(b)


@dataclass(eq=False)
class PackedLoRALayerWeights:
    """The slices of a module that the model computes as one (q, k, v or gate, up).

    Args:
        module_name: name in the model, e.g. `model.layers.0.self_attn.qkv_proj`.
        rank: the largest rank among the slices; ranks may differ.
        lora_a, lora_b: one `[r_i, in]` / `[out_i, r_i]` or `None` (not adapted) per slice; scaling is in B.
    """

    module_name: str
    rank: int
    lora_a: list[LoRAFactor]
    lora_b: list[LoRAFactor]

    is_packed = True

    def pair(self) -> tuple[LoRAInput, LoRAInput]:
        """`(A, B)`, each a list with one entry per slice."""
        return self.lora_a, self.lora_b

    @classmethod
    def pack(cls, members: Sequence[LoRALayerWeights | None], module_name: str | None = None) -> PackedLoRALayerWeights:
        """Put the slices of one module together; members are optimised (scaling goes into their B).

        Args:
            members: one entry per slice, `None` where the adapter has none.
            module_name: name of the packed module; default the first member's.

        Raises:
            ValueError: every entry is `None`.
        """
        present = [member for member in members if member is not None]
        if not present:
            raise ValueError(f"pack needs at least one member, got {len(members)} times None")
        pairs = [None if member is None else member.optimize().pair() for member in members]
        return cls(
            module_name=module_name or present[0].module_name,
            rank=max(member.rank for member in present),
            lora_a=[None if pair is None else pair[0] for pair in pairs],
            lora_b=[None if pair is None else pair[1] for pair in pairs],
        )

    @classmethod
    def pack_moe(
        cls, members: Sequence[LoRALayerWeights | None], module_name: str, is_non_gated_moe: bool = False
    ) -> PackedLoRALayerWeights:
        """Stack the experts of one layer: lists of three, w1, w2, w3, `A [E, r, in]` and `B [E, out, r]`; of FP8
        matrices (all of one format) the values stay.

        Args:
            members: (w1, w2, w3) of every expert, one after the other, `None` where the adapter has none: zeros, or
                `None` for a projection that no expert has. Ranks are padded with zeros to a projection's largest.
            module_name: name of the layer.
            is_non_gated_moe: there is no gate: w3 is w1.

        Raises:
            ValueError: not a multiple of three members, or all of them `None`.
        """
        if len(members) % 3:
            raise ValueError(f"pack_moe needs three members (w1, w2, w3) for every expert, got {len(members)}")
        present = [member for member in members if member is not None]
        if not present:
            raise ValueError(f"pack_moe needs at least one member, got {len(members)} times None")
        pairs = [_stack_experts(members[projection::3]) for projection in range(3)]
        if is_non_gated_moe:
            pairs[2] = pairs[0]
        return cls(module_name, max(member.rank for member in present), [a for a, _ in pairs], [b for _, b in pairs])


def _stack_experts(members: Sequence[LoRALayerWeights | None]) -> tuple[LoRAFactor, LoRAFactor]:
    """One projection of all experts, padded to its largest rank."""
    pairs = [None if member is None else member.optimize().pair() for member in members]
    present = [pair for pair in pairs if pair is not None]
    if not present:
        return None, None
    width, height = present[0][0].shape[1], present[0][1].shape[0]
    for expert, pair in enumerate(pairs):
        if pair is not None and (pair[0].shape[1], pair[1].shape[0]) != (width, height):
            raise ValueError(
                f"expert {expert}: A has {pair[0].shape[1]} columns and B {pair[1].shape[0]} rows, other experts have "
                f"{width} and {height}"
            )
    rank = max(a.shape[0] for a, _ in present)
    a = _stack([None if pair is None else pair[0] for pair in pairs], rank, width)
    return a, _stack([None if pair is None else pair[1] for pair in pairs], height, rank)


def _stack(matrices: Sequence[torch.Tensor | Fp8Matrix | None], rows: int, cols: int) -> torch.Tensor | Fp8Matrix:
    """Each in the top-left corner of its `[rows, cols]`, zeros around it and where there is none."""
    present = [matrix for matrix in matrices if matrix is not None]
    if all(isinstance(matrix, Fp8Matrix) for matrix in present) and len({matrix.dtype for matrix in present}) == 1:
        fp8 = [matrix if isinstance(matrix, Fp8Matrix) else None for matrix in matrices]
        values = _stack([None if one is None else one.values for one in fp8], rows, cols)
        scales = _stack([None if one is None else one.scale[:, None] for one in fp8], rows, 1)
        return Fp8Matrix(cast(torch.Tensor, values), cast(torch.Tensor, scales)[..., 0])
    real = [None if matrix is None else _real(matrix) for matrix in matrices]
    first = next(matrix for matrix in real if matrix is not None)
    stacked = torch.zeros(len(real), rows, cols, dtype=first.dtype, device=first.device)
    for own, matrix in zip(stacked, real, strict=True):
        if matrix is not None:
            own[: matrix.shape[0], : matrix.shape[1]] = matrix
    return stacked


def _real(matrix: torch.Tensor | Fp8Matrix) -> torch.Tensor:
    return matrix.real() if isinstance(matrix, Fp8Matrix) else matrix
