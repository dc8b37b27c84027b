"""A random mixture-of-experts call with its result in float64: what every fused MoE LoRA test starts from."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from punica.ops.moe_checks import Experts, Switches

TOLERANCE = {torch.float16: (4e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2), torch.float32: (1e-4, 1e-4)}


@dataclass(frozen=True)
class Case:
    tokens: int = 9
    top_k: int = 2
    experts: int = 4
    slots: int = 3
    rank: int = 8
    hidden: int = 48
    width: int = 40
    slices: int = 1
    dtype: torch.dtype = torch.float32
    down: bool = False  # the second product: a row of x per pair, weighted
    add_inputs: bool = True
    offset: int = 0
    naive: bool = False
    block: int = 16
    disabled: tuple[int, ...] = ()
    mapping: tuple[int, ...] | None = None
    seed: int = 0

    def but(self, **changes: Any) -> "Case":
        return replace(self, **changes)


class World:
    """Operands of a case. Weights that no pair may read, and lanes beyond them, are NaN."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        pairs = case.tokens * case.top_k
        self.mapping = self._slots()
        scores = torch.rand(case.tokens, case.experts, generator=self.generator)
        self.topk_ids = scores.topk(min(case.top_k, case.experts), dim=1).indices
        self.weights = torch.rand(case.tokens, case.top_k, generator=self.generator)
        self.enabled = torch.ones(case.slots + 1, dtype=torch.int32)
        self.enabled[[*case.disabled, case.slots]] = 0
        self.x = self.normal(pairs if case.down else case.tokens, case.hidden)
        columns = case.offset + case.slices * case.width + 3
        self.y = self.normal(case.tokens, case.top_k, columns)
        lead = (case.slots, case.experts)
        self.a = [self.normal(*lead, case.rank, case.hidden, scale=case.hidden**-0.5) for _ in range(case.slices)]
        self.b = [self.normal(*lead, case.width, case.rank, scale=case.rank**-0.5) for _ in range(case.slices)]
        self.expected = self._expected()
        self._poison()
        for name in ("mapping", "topk_ids", "weights", "enabled", "x", "y", "expected"):
            setattr(self, name, getattr(self, name).to(device))
        self.a, self.b = [one.to(device) for one in self.a], [one.to(device) for one in self.b]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.case.dtype)

    def _slots(self) -> Tensor:
        if self.case.mapping is not None:
            return torch.tensor(self.case.mapping, dtype=torch.int32)
        return torch.randint(-1, self.case.slots, (self.case.tokens,), generator=self.generator, dtype=torch.int32)

    def used(self) -> list[tuple[int, int, int, int]]:
        """(token, place, slot, expert) of every pair that is computed."""
        found = []
        for t, slot in enumerate(self.mapping.tolist()):
            if slot >= 0 and self.enabled[slot]:
                found += [(t, j, slot, expert) for j, expert in enumerate(self.topk_ids[t].tolist())]
        return found

    def _expected(self) -> Tensor:
        case, result = self.case, self.y.double().clone()
        for t, j, slot, expert in self.used():
            row = self.x[t * case.top_k + j if case.down else t].double()
            for s, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
                delta = b[slot, expert].double() @ (a[slot, expert].double() @ row)
                delta *= self.weights[t, j].double() if case.down else 1
                start = case.offset + s * case.width
                target = result[t, j, start : start + case.width]
                target.copy_(target + delta if case.add_inputs else delta)
        return result

    def _poison(self) -> None:
        used = {(slot, expert) for _, _, slot, expert in self.used()}
        for slot in range(self.case.slots):
            for expert in range(self.case.experts):
                if (slot, expert) not in used:
                    for weights in (*self.a, *self.b):
                        weights[slot, expert] = float("nan")

    @property
    def switches(self) -> Switches:
        case = self.case
        return Switches(case.down, False, case.offset, case.add_inputs)

    def given(self, align: Any) -> Experts:
        """The operands, aligned by ``align`` (`moe_lora_align_block_size` of some op) unless the case is naive."""
        case, device = self.case, self.x.device
        aligned: tuple = (None, self.topk_ids.reshape(-1), None)
        lora_ids = torch.full((case.slots + 1,), -1, dtype=torch.int32)
        present = self.mapping.unique().cpu().int()
        lora_ids[: len(present)] = present
        lora_ids = lora_ids.to(device)
        if not case.naive:
            blocks = -(-(case.tokens * case.top_k + case.experts * (case.block - 1)) // case.block)
            padded = blocks * case.block
            ids = torch.full((case.slots, padded), -9, dtype=torch.int32, device=device)
            experts = torch.full((case.slots, blocks), -9, dtype=torch.int32, device=device)
            counts = torch.full((case.slots,), 10**6, dtype=torch.int32, device=device)  # of slots that are not listed
            align(
                self.topk_ids, self.mapping, case.experts, case.block, case.slots, padded, blocks, ids, experts, counts,
                self.enabled, lora_ids,
            )  # fmt: skip
            aligned = ids, experts, counts
        weights = (self.a, self.b, self.weights)
        return Experts(self.y.clone(), self.x, *weights, *aligned, self.mapping, self.enabled, lora_ids)

    def check(self, output: Tensor) -> None:
        """Rows of computed pairs are right, everything else is as it was, bit for bit."""
        case = self.case
        rtol, atol = TOLERANCE[case.dtype]
        torch.testing.assert_close(output.double(), self.expected, rtol=rtol, atol=atol)
        untouched = torch.ones(output.shape, dtype=torch.bool, device=output.device)
        for t, j, _, _ in self.used():
            untouched[t, j, case.offset : case.offset + case.slices * case.width] = False
        assert torch.equal(output[untouched], self.y[untouched])


CASES = {
    "plain": Case(),
    "naive": Case(naive=True),
    "gate and up": Case(slices=2, offset=5),
    "gate and up, naive": Case(slices=2, naive=True, offset=5),
    "down": Case(down=True, hidden=40, width=33),
    "down, naive, overwrite": Case(down=True, naive=True, add_inputs=False),
    "overwrite": Case(add_inputs=False, slices=2),
    "float16": Case(dtype=torch.float16, hidden=128),
    "bfloat16": Case(dtype=torch.bfloat16, slices=2),
    "top 1": Case(top_k=1, experts=3),
    "top 8": Case(tokens=5, top_k=8, experts=16, slots=2),
    "rank 1": Case(rank=1),
    "rank 20": Case(rank=20, naive=True),
    "rank 20 sorted": Case(rank=20, slices=2),
    "rank 96": Case(rank=96),
    "wide rank": Case(rank=136, tokens=4, slots=2),
    "ragged sizes": Case(hidden=100, width=33, slices=2),
    "many pairs of one": Case(tokens=40, experts=2, slots=1, hidden=32, width=32),
    "disabled": Case(disabled=(1,), tokens=12),
    "disabled, naive": Case(disabled=(1,), tokens=12, naive=True),
    "nobody": Case(mapping=(-1,) * 9),
    "first of the list is none": Case(slots=1, tokens=6, mapping=(-1, 0, 0, -1, 0, -1)),
    "16 slots, one token": Case(tokens=1, slots=16, mapping=(13,)),
    "no token": Case(tokens=0, mapping=()),
}
