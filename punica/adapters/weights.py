"""`ModuleWeights`: the low-rank pairs (A, B) of one module, one pair per slice that the model computes at once.

LoRA adds `delta W = scaling * B A` to a layer, A `[r, in]`, B `[out, r]`. The scaling is multiplied into B before an
adapter enters a slot, so that the kernels need no per-adapter scale. :class:`LoRALayerWeights` and
:class:`PackedLoRALayerWeights` are public constructors of the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from punica.adapters.check import check_pair
from punica.adapters.peft_config import PEFTHelper
from punica.layers.base import LoRAInput
from punica.layers.packing import Blocks, LoRAFactor, Slices
from punica.ops.quant import Fp8Matrix

Factor = torch.Tensor | Fp8Matrix


@dataclass(eq=False)
class ModuleWeights:
    """A and B of one module of an adapter, or of one layer of the model.

    Args:
        module_name: name in the model, e.g. `model.layers.0.self_attn.q_proj`.
        rank: the largest rank of any slice.
        slices: A and B of every slice, tensors or FP8 with scales; of experts with a leading dimension, `[E, r, in]`
            and `[E, out, r]`; `(None, None)` where the adapter has none.
        scaling: factor of `B A` that is not in B yet.
        lora_alpha: numerator of the scaling in the adapter's config.
        blocks: of every slice the blocks of A and B; default: no slice is block-diagonal.
    """

    module_name: str
    rank: int
    slices: Slices
    scaling: float = 1
    lora_alpha: float = 1
    blocks: Sequence[Blocks] = ()

    @property
    def is_packed(self) -> bool:
        """True for a module of several slices."""
        return len(self.slices) > 1

    @property
    def lora_a(self) -> LoRAInput:
        """A; of a packed module a list with one entry per slice."""
        return [a for a, _ in self.slices] if self.is_packed else self.slices[0][0]

    @lora_a.setter
    def lora_a(self, given: LoRAInput) -> None:
        values = cast(Sequence[LoRAFactor], given if self.is_packed else [given])
        self.slices = [(a, b) for a, (_, b) in zip(values, self.slices, strict=True)]
        self.blocks = ()  # the new matrix may be dense

    @property
    def lora_b(self) -> LoRAInput:
        """B; of a packed module a list with one entry per slice."""
        return [b for _, b in self.slices] if self.is_packed else self.slices[0][1]

    @lora_b.setter
    def lora_b(self, given: LoRAInput) -> None:
        values = cast(Sequence[LoRAFactor], given if self.is_packed else [given])
        self.slices = [(a, b) for b, (a, _) in zip(values, self.slices, strict=True)]
        self.blocks = ()

    def pair(self) -> tuple[LoRAInput, LoRAInput]:
        """Return `(lora_a, lora_b)` as a layer's `set_lora` takes them."""
        return self.lora_a, self.lora_b

    def scaled(self) -> Slices:
        """Return the slices with the scaling in B: in float32, rounded once, into new tensors; of FP8 the scales.

        Raises RuntimeError for a shell of :meth:`LoRALayerWeights.from_config`, which has no tensors yet.
        """
        if not self.is_packed and self.slices[0][0] is None:
            raise RuntimeError(f"module {self.module_name!r}: lora_a and lora_b are not set yet (shell of from_config)")
        return self.slices if self.scaling == 1 else [(a, _times(b, self.scaling)) for a, b in self.slices]

    def optimize(self) -> ModuleWeights:
        """Multiply B by the scaling, in place of it: see :meth:`scaled`. Idempotent; returns self."""
        self.slices, self.scaling = self.scaled(), 1
        return self

    @property
    def input_dim(self) -> int:
        """`in`, the width of A."""
        return cast(Factor, self.slices[0][0]).shape[-1]

    @property
    def output_dim(self) -> int:
        """`out`, the height of B."""
        return cast(Factor, self.slices[0][1]).shape[-2]


def _times(b: LoRAFactor, scaling: float) -> LoRAFactor:
    if isinstance(b, Fp8Matrix):
        return b.scaled(scaling)
    if b is None or b.is_meta:  # torch takes long to multiply meta tensors
        return b
    return b * scaling  # torch computes products of half precision in float32


class LoRALayerWeights(ModuleWeights):
    """Weights of one slice, from A and B.

    Args:
        module_name, rank, lora_alpha: as in :class:`ModuleWeights`.
        lora_a: `[r, in]`; `None` in a shell of :meth:`from_config`.
        lora_b: `[out, r]`; likewise.
        scaling: default `lora_alpha / rank`.

    Raises:
        ValueError: A and B are not 2-D, or have another rank than `rank`.
    """

    def __init__(
        self,
        module_name: str,
        rank: int,
        lora_alpha: float,
        lora_a: LoRAFactor,
        lora_b: LoRAFactor,
        scaling: float | None = None,
    ) -> None:
        if lora_a is not None and lora_b is not None:
            check_pair(module_name, lora_a, lora_b, rank)
        scaling = lora_alpha / rank if scaling is None else scaling
        super().__init__(module_name, rank, [(lora_a, lora_b)], scaling, lora_alpha)

    @classmethod
    def from_config(cls, module_name: str, peft_helper: PEFTHelper) -> LoRALayerWeights:
        """Build a shell without tensors, with the module's own rank, alpha and scaling."""
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
        """Build zeros with `lora_alpha = 1`: the cost of an adapter of this rank, no change of outputs."""
        a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, a, b)


class PackedLoRALayerWeights(ModuleWeights):
    """Weights of several slices (q, k, v or gate, up), from a list of A and one of B.

    Args:
        module_name: name in the model, e.g. `model.layers.0.self_attn.qkv_proj`.
        rank: the largest rank of any slice; ranks may differ.
        lora_a, lora_b: one `[r_i, in]` / `[out_i, r_i]` or `None` (not adapted) per slice; scaling is in B.
    """

    is_packed = True  # type: ignore[assignment]  # also with one slice

    def __init__(
        self, module_name: str, rank: int, lora_a: Sequence[LoRAFactor], lora_b: Sequence[LoRAFactor]
    ) -> None:
        super().__init__(module_name, rank, list(zip(lora_a, lora_b, strict=True)))

    @classmethod
    def pack(cls, members: Sequence[ModuleWeights | None], module_name: str | None = None) -> PackedLoRALayerWeights:
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
        slices = [(None, None) if member is None else member.optimize().slices[0] for member in members]
        rank = max(member.rank for member in present)
        return cls(module_name or present[0].module_name, rank, *zip(*slices, strict=True))

    @classmethod
    def pack_moe(
        cls, members: Sequence[ModuleWeights | None], module_name: str, is_non_gated_moe: bool = False
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
        pairs = [(None, None) if member is None else member.optimize().slices[0] for member in members]
        slices = [stack_experts(pairs[projection::3]) for projection in range(3)]
        if is_non_gated_moe:
            slices[2] = slices[0]
        return cls(module_name, max(member.rank for member in present), *zip(*slices, strict=True))


def stack_experts(pairs: Slices) -> tuple[LoRAFactor, LoRAFactor]:
    """Stack one projection of all experts, `A [E, r, in]` and `B [E, out, r]`, padded to its largest rank.

    ValueError: experts of different sizes.
    """
    sizes: tuple[int, int] | None = None
    for expert, (a, b) in enumerate(pairs):
        if a is not None and b is not None:
            sizes = sizes or (a.shape[1], b.shape[0])
            if (a.shape[1], b.shape[0]) != sizes:
                raise ValueError(
                    f"expert {expert}: A has {a.shape[1]} columns and B {b.shape[0]} rows, other experts have "
                    f"{sizes[0]} and {sizes[1]}"
                )
    if sizes is None:
        return None, None
    rank, (width, height) = max(a.shape[0] for a, _ in pairs if a is not None), sizes
    return _stack([a for a, _ in pairs], rank, width), _stack([b for _, b in pairs], height, rank)


def _stack(matrices: Sequence[LoRAFactor], rows: int, cols: int) -> Factor:
    """Place each matrix in the top-left corner of its `[rows, cols]`, with zeros around it and for `None`."""
    present = [matrix for matrix in matrices if matrix is not None]
    if all(isinstance(matrix, Fp8Matrix) for matrix in present) and len({matrix.dtype for matrix in present}) == 1:
        fp8 = [matrix if isinstance(matrix, Fp8Matrix) else None for matrix in matrices]
        values = _stack([None if one is None else one.values for one in fp8], rows, cols)
        scales = _stack([None if one is None else one.scale[:, None] for one in fp8], rows, 1)
        return Fp8Matrix(cast(torch.Tensor, values), cast(torch.Tensor, scales)[..., 0])
    real = [matrix.real() if isinstance(matrix, Fp8Matrix) else matrix for matrix in matrices]
    first = next(matrix for matrix in real if matrix is not None)
    stacked = torch.zeros(len(real), rows, cols, dtype=first.dtype, device=first.device)
    for own, matrix in zip(stacked, real, strict=True):
        if matrix is not None:
            own[: matrix.shape[0], : matrix.shape[1]] = matrix
    return stacked
