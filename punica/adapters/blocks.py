"""Block-diagonal LoRA factors (PEFT's `use_bdlora`): stored as blocks, loaded as dense matrices with zeros beside them.

So every tensor-parallel rank can own whole blocks, without a collective for LoRA (BD-LoRA): a plain layer on several
ranks keeps the ranks of its own blocks (``own_ranks``). Fully sharded layers hold them as any other adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from punica.checks import check_count, clip
from punica.layers.packing import Blocks
from punica.ops.quant import Fp8Matrix


@dataclass(frozen=True)
class BlockDiagonal:
    """The value of `use_bdlora`: `nblocks` blocks in A of modules that contain one of `a` in their names, B of `b`."""

    nblocks: int
    a: tuple[str, ...]
    b: tuple[str, ...]
    match_strict: bool

    @classmethod
    def from_config(cls, value: Any) -> "BlockDiagonal | None":
        """Read `use_bdlora` of an `adapter_config.json`, or a `peft.BdLoraConfig`; `None` where it is not used.

        TypeError: not a mapping, or a value of another type. ValueError: less than one block.
        """
        if not value:
            return None
        value = value if isinstance(value, Mapping) else getattr(value, "__dict__", value)
        if not isinstance(value, Mapping):
            raise TypeError(f"use_bdlora must be an object with nblocks, got {clip(value)} ({type(value).__name__})")
        check_count("use_bdlora.nblocks", nblocks := value.get("nblocks", 1))
        names = [value.get(f"target_modules_bd_{side}") or [] for side in "ab"]
        for side, listed in zip("ab", names, strict=True):
            if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
                raise TypeError(f"use_bdlora.target_modules_bd_{side} must be a list of str, got {clip(listed)}")
        return cls(nblocks, tuple(names[0]), tuple(names[1]), bool(value.get("match_strict", True)))

    def of_module(self, name: str, rank: int) -> Blocks:
        """Return the blocks of a linear module. ValueError: both factors have some, or neither with `match_strict`; or
        they do not divide the rank.
        """
        in_a, in_b = (any(pattern in name for pattern in patterns) for patterns in (self.a, self.b))
        if (in_a and in_b) or (self.match_strict and not in_a and not in_b):
            which = "both a and b" if in_a else "neither a nor b, which match_strict demands"
            raise ValueError(f"use_bdlora: module {clip(name)} matches {which} of target_modules_bd_a and _b")
        if (in_a or in_b) and rank % self.nblocks:
            raise ValueError(
                f"module {clip(name)} has rank {rank}, which use_bdlora.nblocks = {self.nblocks} does not divide"
            )
        return Blocks(self.nblocks if in_a else 1, self.nblocks if in_b else 1)


def dense(what: str, factor: Any, blocks: int) -> Any:
    """Build the matrix `[rows, blocks * columns]` with the blocks of `factor [rows, columns]` on its diagonal.

    Row `i` belongs to block `i // (rows / blocks)`. ValueError, naming `what`: the rows cannot be divided.
    """
    if blocks == 1 or factor.ndim != 2:  # another number of dimensions is refused with the factor's own shape
        return factor
    rows, columns = factor.shape
    if rows % blocks:
        raise ValueError(f"{what} has {rows} rows, which use_bdlora.nblocks = {blocks} does not divide")
    if isinstance(factor, Fp8Matrix):
        values = dense(what, factor.values.view(torch.uint8), blocks)  # of a zero all bits are zero
        return Fp8Matrix(values.view(factor.values.dtype), factor.scale)
    matrix = factor.new_zeros(blocks, rows // blocks, blocks, columns)
    matrix.diagonal(dim1=0, dim2=2).copy_(factor.view(blocks, rows // blocks, columns).permute(1, 2, 0))
    return matrix.view(rows, blocks * columns)
