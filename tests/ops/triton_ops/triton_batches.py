"""A random batch with its result in float64: what every kernel test starts from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from punica.metadata import LoRAKernelMeta
from punica.ops.triton_ops import TritonOps, lora_expand, lora_linear, lora_shrink
from punica.ops.triton_ops.schedules import Schedule
from tests.ops.helpers import TOLERANCE, StepCalls, assert_close, assert_shrunk, products

__all__ = ["TOLERANCE", "assert_shrunk"]  # of kernel tests, too
KERNELS = StepCalls(TritonOps)
shrink, expand, linear = KERNELS.shrink, KERNELS.expand, KERNELS.linear
SHRINKS = {"rows": Schedule(0, 8, 128), "tiles": Schedule(16, 32, 64, num_stages=3)}
EXPANDS = {
    "rows": Schedule(0, 64, 16),
    "tiles": Schedule(16, 64, 64, num_stages=3),
    "walk": Schedule(32, 32, 64, num_stages=2, tiles_n=3),
    "deep": Schedule(16, 64, 16, num_stages=2, tiles_n=2),
}


@dataclass
class Batch:
    """Weights, inputs and metadata for `slots`; ``ranks[i][l]`` limits adapter l of slice i (None: the whole width)."""

    slots: Sequence[int]
    k: int
    widths: Sequence[int]
    rank: int
    slot_count: int
    dtype: torch.dtype
    device: str
    ranks: Sequence[Sequence[int]] | None = None
    scaling: float = 0.5
    x: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape) * scale).to(self.dtype).to(self.device)

        self.tokens = len(self.slots)
        self.x = normal(self.tokens, self.k)
        self.a = tuple(normal(self.slot_count, 1, self.rank, self.k, scale=self.k**-0.5) for _ in self.widths)
        self.b = tuple(normal(self.slot_count, 1, n, self.rank, scale=self.rank**-0.5) for n in self.widths)
        self.y = normal(self.tokens, sum(self.widths))
        self.lora_ranks = None
        if self.ranks is not None:
            self.lora_ranks = torch.tensor(self.ranks, dtype=torch.int32, device=self.device)
        self.meta = LoRAKernelMeta.make(self.slot_count, max(1, self.tokens), self.device)
        self.meta.prepare_tensors(torch.tensor(self.slots, dtype=torch.int64))
        *self.args, count = self.meta.meta_args(self.tokens, True)
        self.count = {"num_active_loras": count}
        self.has_adapter = (torch.tensor(self.slots, dtype=torch.int64) >= 0)[:, None]

    def poison(self, ranks: bool = False) -> None:
        """Fill slots that no row uses with NaN, or (``ranks``) lanes beyond the adapters' own."""
        for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            for slot in range(self.slot_count):
                live = self.ranks_of(i)[slot] if ranks else self.rank if slot in self.slots else 0
                a[slot, :, live:] = b[slot, ..., live:] = float("nan")

    def shrink(self, out: torch.Tensor, x: Any = None, a: Any = None, **options: Any) -> torch.Tensor:
        x, a = self.x if x is None else x, self.a if a is None else a
        lora_shrink(x, a, out, *self.args, self.scaling, **(self.count | options))
        return out

    def expand(self, h: torch.Tensor, y: torch.Tensor, b: Any = None, **options: Any) -> torch.Tensor:
        lora_expand(h, self.b if b is None else b, y, *self.args, **(self.count | options))
        return y

    def linear(self, y: Any = None, x: Any = None, a: Any = None, **options: Any) -> torch.Tensor:
        """A copy of y with the delta, unless it is given."""
        y, x, a = self.y.clone() if y is None else y, self.x if x is None else x, self.a if a is None else a
        lora_linear(y, x, a, self.b, *self.args, self.scaling, **(self.count | options))
        return y

    def check(self, y: torch.Tensor, add: bool = True) -> None:
        """y is the result of a linear."""
        before = self.y.cpu().double()
        delta = self.expanded(self.shrunk()) + (before if add else 0)
        assert_close(y, torch.where(self.has_adapter, delta, before), self.dtype)

    def ranks_of(self, i: int) -> Sequence[int]:
        return [self.rank] * self.slot_count if self.ranks is None else self.ranks[i]

    def shrunk(self) -> torch.Tensor:
        """scaling * x A^T, [n, T, r] float64, 0 without adapter and beyond the rank."""
        parts = [products(self.x, a, self.slots, self.scaling, self.ranks_of(i)) for i, a in enumerate(self.a)]
        return torch.stack(parts)

    def expanded(self, h: torch.Tensor) -> torch.Tensor:
        """h B^T of all slices side by side, [T, sum N] float64."""
        parts = [products(h[i], b, self.slots, 1.0, self.ranks_of(i), of_b=True) for i, b in enumerate(self.b)]
        return torch.cat(parts, 1)


def random_slots(tokens: int, slot_count: int, seed: int = 0) -> list[int]:
    """Slots in [-1, slot_count), at least one row with an adapter."""
    slots = torch.randint(-1, slot_count, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return slots if max(slots, default=0) >= 0 else [0, *slots[1:]]
