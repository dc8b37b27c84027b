"""A random mixture-of-experts call with its result in float64: what every fused MoE LoRA test starts from.

Weights may be FP8 (``fp8`` names a way in which scales lie), x too (``w8a8``), and adapters narrower than their slots
(``ranks``, one per slot of the first slice; other slices have one rank less).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from punica.ops.experts import Experts, Fp8Experts, Switches
from punica.ops.scales import Scheme
from tests.ops.helpers import E4M3, E5M2, TOLERANCE, Fp8Stack, real_rows

SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {"per_channel_quant": True},
    "blocks": {"group_n": 16, "group_k": 32},
    "odd blocks": {"group_n": 12, "group_k": 20},
    "large blocks": {"group_n": 128, "group_k": 128},
}
NAN = float("nan")


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
    ranks: tuple[int, ...] | None = None
    fp8: str | None = None
    fp8_dtype: torch.dtype = E4M3
    w8a8: bool = False
    x_scales: str = "rows"  # with w8a8: "one", "rows", or block-wise "groups"

    def but(self, **changes: Any) -> "Case":
        return replace(self, **changes)


class World:
    """Operands of a case. Weights that no pair may read, and lanes beyond them, are NaN (``poison``)."""

    def __init__(self, case: Case, device: str = "cpu", poison: bool = True) -> None:
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
        self.x_scale: Tensor | None = None
        self.scheme = Scheme(**SCHEMES[case.fp8], use_fp8_w8a8=case.w8a8) if case.fp8 else None
        self.real_x = self.x.double()
        columns = case.offset + case.slices * case.width + 3
        self.y = self.normal(case.tokens, case.top_k, columns)
        lead = (case.slots, case.experts)
        self.a = [self.normal(*lead, case.rank, case.hidden, scale=case.hidden**-0.5) for _ in range(case.slices)]
        self.b = [self.normal(*lead, case.width, case.rank, scale=case.rank**-0.5) for _ in range(case.slices)]
        self.real_a, self.real_b = [one.double() for one in self.a], [one.double() for one in self.b]
        self.a_scale: list[Tensor] = []
        self.b_scale: list[Tensor] = []
        if self.scheme is not None:
            self.a, self.a_scale, self.real_a = self._stored(self.a)
            self.b, self.b_scale, self.real_b = self._stored(self.b)
        if case.w8a8:
            self._store_x()
        rank = torch.tensor(case.ranks or (case.rank,) * case.slots, dtype=torch.int32)
        self.ranks = torch.stack([(rank - s * bool(case.ranks)).clamp(min=0) for s in range(case.slices)])
        self.expected = self._expected()
        if poison:
            self._poison()
        for name in ("mapping", "topk_ids", "weights", "enabled", "x", "y", "expected", "ranks"):
            setattr(self, name, getattr(self, name).to(device))
        for name in ("a", "b", "a_scale", "b_scale"):
            setattr(self, name, [one.to(device) for one in getattr(self, name)])
        self.x_scale = None if self.x_scale is None else self.x_scale.to(device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.case.dtype)

    def _stored(self, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Other values of these shapes, random scales, and what they stand for in float64."""
        values, scales, real = [], [], []
        torch.manual_seed(self.case.seed)
        for slots, experts, n, k in (weight.shape for weight in weights):
            scheme = SCHEMES[self.case.fp8 or ""]
            stack = Fp8Stack.random(slots * experts, n, k, scheme, self.case.fp8_dtype, "cpu")
            values.append(stack.stored.view(slots, experts, n, k))
            scales.append(stack.scale.unflatten(0, (slots, experts)))
            real.append(stack.real().view(slots, experts, n, k))
        return values, scales, real

    def _store_x(self) -> None:
        scheme, (rows, k) = SCHEMES[self.case.fp8 or ""], self.x.shape
        shape = {"one": (), "rows": (rows, 1), "groups": (rows, -(-k // scheme.get("group_k", k)))}[self.case.x_scales]
        self.x_scale = torch.rand(shape, generator=self.generator) + 0.5
        self.x = self.x.float().to(E4M3)
        self.real_x = real_rows(self.x, self.x_scale, scheme)

    def _slots(self) -> Tensor:
        if self.case.mapping is not None:
            return torch.tensor(self.case.mapping, dtype=torch.int32)
        return torch.randint(-1, self.case.slots, (self.case.tokens,), generator=self.generator, dtype=torch.int32)

    def used(self) -> list[tuple[int, int, int, int]]:
        """(token, place, slot, expert) of every pair that is computed."""
        return [
            (t, j, slot, expert)
            for t, slot in enumerate(self.mapping.tolist()) if slot >= 0 and self.enabled[slot]
            for j, expert in enumerate(self.topk_ids[t].tolist())
        ]  # fmt: skip

    def _expected(self) -> Tensor:
        case, result = self.case, self.y.double().clone()
        for t, j, slot, expert in self.used():
            row = self.real_x[t * case.top_k + j if case.down else t]
            for s, (a, b) in enumerate(zip(self.real_a, self.real_b, strict=True)):
                rank = int(self.ranks[s, slot])
                delta = b[slot, expert][:, :rank] @ (a[slot, expert][:rank] @ row)
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
                    for weights in (*self.a, *self.b, *self.a_scale, *self.b_scale):
                        weights[slot, expert] = NAN
            for s, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
                a[slot, :, int(self.ranks[s, slot]) :] = NAN
                b[slot, :, :, int(self.ranks[s, slot]) :] = NAN
                if self.case.fp8 == "channel":
                    self.a_scale[s][slot, :, int(self.ranks[s, slot]) :] = NAN

    @property
    def fp8(self) -> Fp8Experts | None:
        """The scales, as an op takes them."""
        if self.scheme is None:
            return None
        return Fp8Experts(self.a_scale, self.b_scale, self.x_scale, None, self.scheme, self.scheme)

    @property
    def switches(self) -> Switches:
        return Switches(self.case.down, False, self.case.offset, self.case.add_inputs)

    def given(self, align: Any, listed: bool = True) -> Experts:
        """The operands, aligned by ``align`` (`moe_lora_align_block_size` of some op) unless the case is naive;
        ``listed``: with ids of the adapters that are present, else as the engine calls, without.
        """
        case, device = self.case, self.x.device
        aligned: tuple = (None, self.topk_ids.reshape(-1), None)
        lora_ids = None
        if listed:
            lora_ids = torch.full((case.slots + 1,), -1, dtype=torch.int32, device=device)
            present = self.mapping.unique().int()
            lora_ids[: len(present)] = present
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
        operands = (self.y.clone(), self.x, *weights, *aligned, self.mapping, self.enabled, lora_ids)
        return Experts(*operands, self.ranks if case.ranks else None, self.fp8)

    def check(self, output: Tensor) -> None:
        """Rows of computed pairs are right, everything else is as it was, bit for bit."""
        case = self.case
        rtol, atol = TOLERANCE[case.dtype] if case.fp8 is None else (2e-2, 2e-2)
        torch.testing.assert_close(output.double(), self.expected, rtol=rtol, atol=atol)
        untouched = torch.ones(output.shape, dtype=torch.bool, device=output.device)
        for t, j, _, _ in self.used():
            untouched[t, j, case.offset : case.offset + case.slices * case.width] = False
        assert torch.equal(output[untouched], self.y[untouched])


def narrow(world: World) -> Tensor:
    """y without columns behind the slices."""
    return world.y[..., : world.case.slices * world.case.width].contiguous()


def add_w13(
    wrapper: Any, world: World, y: Tensor, mapping: Any = None, expert_map: Any = None, tuned: bool = False,
    **changes: Any,
) -> tuple:  # fmt: skip
    """The alignment that w13 leaves; ``changes``: of its keywords, of ``x``, ``num_tokens`` and ``num_slices``."""
    case, w, x = world.case, torch.empty(world.case.experts, 1, 1), changes.pop("x", world.x)
    tokens, slices = changes.pop("num_tokens", case.tokens), changes.pop("num_slices", case.slices)
    return wrapper.add_lora_w13(
        y, x, tuple(world.a), tuple(world.b), world.topk_ids, world.weights, expert_map, w, w, tokens, case.top_k,
        case.slots, world.enabled, case.experts, case.top_k, slices, False, tuned, mapping, **keywords(world) | changes,
    )  # fmt: skip


def add_w2(
    wrapper: Any, world: World, y: Tensor, aligned: tuple, sharded: bool = False, offset: int = 0,
    tuned: bool = False, **changes: Any,
) -> None:  # fmt: skip
    case, w = world.case, torch.empty(world.case.experts, 1, 1)
    wrapper.add_lora_w2(
        y, world.x, tuple(world.a), tuple(world.b), world.weights, *aligned, case.tokens, w, w, case.top_k, case.slots,
        world.enabled, case.top_k, sharded, offset, tuned, **keywords(world) | changes,
    )  # fmt: skip


def keywords(world: World) -> dict[str, Any]:
    """Ranks, and what is to be said of FP8, as a layer passes it."""
    found: dict[str, Any] = {"lora_ranks": world.ranks} if world.case.ranks else {}
    if world.scheme is not None:
        found |= {"lora_a_scale": world.a_scale, "lora_b_scale": world.b_scale, "quant_args": world.scheme._asdict()}
    return found if world.x_scale is None else found | {"a_scale": world.x_scale}


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
    "true ranks": Case(tokens=6, rank=32, ranks=(8, 20, 32), slices=2),
    "true ranks, naive": Case(rank=64, ranks=(8, 0, 20), slices=2, naive=True),
    "true ranks, odd width": Case(rank=20, ranks=(3, 20, 0), dtype=torch.float16, down=True),
    "true ranks, overwrite": Case(tokens=6, rank=32, ranks=(0, 8, 17), add_inputs=False, dtype=torch.bfloat16),
    "wide slots": Case(tokens=12, rank=64, ranks=(8, 20, 64), slices=2),
    "wide true ranks": Case(rank=136, ranks=(5, 130), tokens=4, slots=2),
    "nobody has ranks": Case(rank=16, ranks=(0, 0, 0)),
}
FP8_CASES = {
    "per tensor": Case(fp8="tensor", dtype=torch.float16, slices=2),
    "per channel": Case(fp8="channel", dtype=torch.bfloat16, slices=2),
    "per channel, naive": Case(fp8="channel", naive=True, rank=20, dtype=torch.float16),
    "per channel, down": Case(fp8="channel", down=True, dtype=torch.float16, offset=3),
    "e5m2": Case(fp8="channel", fp8_dtype=E5M2, slices=2, dtype=torch.float16, hidden=100, width=33),
    "blocks": Case(fp8="blocks", tokens=5, slices=2, rank=20, hidden=70, width=40, dtype=torch.float16),
    "odd blocks, naive": Case(fp8="odd blocks", naive=True, rank=40, hidden=70, width=50),
    "large blocks": Case(fp8="large blocks", hidden=200, width=150, rank=16, dtype=torch.float16),
    "true ranks": Case(fp8="channel", rank=32, ranks=(8, 20, 32), slices=2, tokens=6, dtype=torch.float16),
    "wide slots": Case(fp8="channel", rank=64, ranks=(8, 20, 64), slices=2, tokens=12, dtype=torch.float16),
    "true ranks, blocks": Case(fp8="blocks", rank=64, ranks=(8, 0, 33), slices=2, tokens=12, dtype=torch.float16),
    "wide rank": Case(fp8="channel", rank=136, ranks=(130, 9), slots=2, tokens=4, dtype=torch.float16),
    "w8a8 per tensor": Case(fp8="tensor", w8a8=True, x_scales="one", dtype=torch.float16),
    "w8a8": Case(fp8="channel", w8a8=True, slices=2, dtype=torch.bfloat16),
    "w8a8, naive": Case(fp8="channel", w8a8=True, naive=True, ranks=(3, 8, 5), dtype=torch.float16),
    "w8a8, blocks": Case(fp8="blocks", w8a8=True, x_scales="groups", hidden=70, tokens=5, dtype=torch.float16),
    "w8a8, down": Case(fp8="odd blocks", w8a8=True, x_scales="groups", hidden=70, rank=24, down=True, naive=True),
    "w8a8, e5m2": Case(fp8="channel", w8a8=True, fp8_dtype=E5M2, slices=2, dtype=torch.float16),
    "no token": Case(fp8="channel", tokens=0, mapping=()),
}
