"""Batch invariance: with the switch on, a row, or a token of experts, has the same bits alone and in any batch."""

import copy
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from triton_batches import TOLERANCE, linear

from punica.metadata import LoRABatch
from punica.ops.quant import quantize_per_channel
from punica.ops.scales import PER_CHANNEL
from punica.ops.triton_ops import Options, lora_linear, moe_align
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from tests.ops.helpers import by_ranks as rank_major
from tests.ops.helpers import step
from tests.ops.moe_cases import Case, World

INVARIANT = Options(batch_invariant=True)
SHAPES = {
    "7b up": (4096, (11008,), 16),
    "8b qkv": (4096, (4096, 1024, 1024), 8),
    "70b tp8 qkv": (8192, (1024, 128, 128), 32),
    "1.5b up": (1536, (8960,), 64),
    "8b down": (14336, (4096,), 16),
    "odd": (1000, (333, 70), 20),
    "wide": (2048, (2048,), 256),
}
SMALL = {"narrow": (200, (72, 40), 8), "lanes": (130, (48,), 40), "tiny": (24, (16,), 4)}
SLOTS = 6
FP8 = {"by ranks": (False, True), "by rows": (False, False), "w8a8": (True, True)}
"""Whether activations are FP8 too, and whether B lies rank after rank, as layers store it."""


class Layer:
    """Weights of random adapters, and rows of x with the slot of each."""

    fp8: dict[str, Any] = {}

    def __init__(self, shape: tuple[int, tuple[int, ...], int], rows: int, dtype: torch.dtype, device: str) -> None:
        k, widths, rank = shape
        torch.manual_seed(rows)
        self.slots = (torch.randint(-1, SLOTS, (rows,)) if rows < 200 else torch.arange(rows) * SLOTS // rows).numpy()
        self.slots[rows // 2] = 1
        self.x = torch.randn(rows, k, device=device).to(dtype)
        self.y = torch.randn(rows, sum(widths), device=device).to(dtype)
        self.a = tuple((torch.randn(SLOTS, 1, rank, k, device=device) * k**-0.5).to(dtype) for _ in widths)
        self.b = tuple((torch.randn(SLOTS, 1, n, rank, device=device) * rank**-0.5).to(dtype) for n in widths)
        self.ranks = torch.randint(1, rank + 1, (len(widths), SLOTS), dtype=torch.int32).to(device)

    def step(self, rows: slice) -> LoRABatch:
        slots = self.slots[rows]
        return step(slots, self.x.device, SLOTS, len(slots))

    def added(self, rows: slice) -> torch.Tensor:
        y, given = self.y[rows].clone(), {"lora_ranks": self.ranks, "options": INVARIANT, **self.fp8}
        linear(y, self.x[rows], self.a, self.b, self.step(rows), 0.5, **given)
        return y


class Fp8Layer(Layer):
    """With A and B in FP8, one scale per channel."""

    def __init__(self, *sizes: Any, w8a8: bool, by_ranks: bool) -> None:
        super().__init__(*sizes)
        (self.a, a), (self.b, b) = (
            zip(*[quantize_per_channel(w[:, 0]) for w in side], strict=True) for side in (self.a, self.b)
        )
        if by_ranks:
            self.b = tuple(map(rank_major, self.b))
        scheme = PER_CHANNEL._replace(use_fp8_w8a8=w8a8)
        self.fp8 = {"lora_a_scale": list(a), "lora_b_scale": list(b), "shrink": scheme, "expand": scheme}
        self.fp8["options"] = INVARIANT._replace(tuned_dir="nowhere")  # no table has a say


def check_parts(layer: Layer, rows: int) -> torch.Tensor:
    """The whole, after it was compared with its parts."""
    whole = layer.added(slice(0, rows))
    parts = [
        slice(0, (rows + 1) // 2),
        slice(rows // 3, rows),
        *(slice(t, t + 1) for t in range(0, rows, 1 + rows // 9)),
    ]
    parts.append(slice(rows // 2, rows // 2 + 1))
    for part in parts:
        assert torch.equal(layer.added(part), whole[part]), part
    return whole


def check(layer: Layer, rows: int) -> None:
    whole = check_parts(layer, rows)
    flat, (*tensors, count) = layer.y[:rows].clone(), layer.step(slice(0, rows)).meta_args(rows)
    lora_linear(
        flat, layer.x[:rows], layer.a, layer.b, *tensors, 0.5,
        num_active_loras=count, lora_ranks=layer.ranks, batch_invariant=True,
    )  # fmt: skip
    assert torch.equal(flat, whole)


def on_gpu(cases: Iterable[tuple]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize(
    ("dtype", "name", "rows"),
    [
        *product(TOLERANCE, SMALL, (1, 7, 33)),
        *on_gpu(product((torch.float16, torch.bfloat16), SHAPES, (1, 2, 9, 64, 65, 128, 129, 513, 2048, 8192))),
    ],
    ids=str,
)
def test_a_row_alone_and_in_company(dtype, name, rows, device):
    check(Layer((SMALL | SHAPES)[name], rows, dtype, device), rows)


@pytest.mark.parametrize(
    ("form", "name", "dtype", "rows"),
    [
        *product(FP8, SMALL, (torch.float16,), (1, 33)),
        *on_gpu(product(("by ranks",), ("7b up", "1.5b up", "odd"), (torch.float16,), (9, 129, 513, 2048))),
        *on_gpu(("by ranks", "8b qkv", torch.bfloat16, rows) for rows in (9, 129, 513, 2048)),
    ],
    ids=str,
)
def test_fp8_alone_and_in_company(form, name, dtype, rows, device):
    w8a8, by_ranks = FP8[form]
    layer = Fp8Layer((SMALL | SHAPES)[name], rows, dtype, device, w8a8=w8a8, by_ranks=by_ranks)
    added = check_parts(layer, rows) - layer.y
    assert bool(added[torch.from_numpy(layer.slots) >= 0].any(1).all())


EXPERTS = {
    "gate and up": Case(tokens=8, slices=2, dtype=torch.float16),
    "down, true ranks": Case(tokens=8, down=True, rank=20, ranks=(3, 20, 0), dtype=torch.bfloat16),
    "FP8": Case(tokens=8, slices=2, fp8="channel", dtype=torch.float16),
    "FP8, blocks": Case(tokens=6, fp8="blocks", hidden=70, rank=20, dtype=torch.float16),
    "w8a8": Case(tokens=6, fp8="channel", w8a8=True, dtype=torch.float16),
}
MODELS = {
    "model, bfloat16": Case(256, 4, 16, 8, 16, 2048, 768, 2, torch.bfloat16),
    "model, true ranks": Case(256, 4, 16, 4, 64, 1024, 768, 1, torch.float16, ranks=(64, 8, 33, 0), down=True),
    "model, FP8": Case(256, 4, 16, 8, 16, 2048, 768, 2, torch.bfloat16, fp8="channel"),
    "model, FP8, rank 64": Case(256, 4, 16, 4, 64, 1024, 768, 1, torch.float16, fp8="channel", down=True),
}


def added_by_experts(world: World, rows: slice, naive: bool) -> torch.Tensor:
    """The rows of the output for these tokens of the world, as a batch of their own."""
    part, case = copy.copy(world), world.case
    tokens = len(range(*rows.indices(case.tokens)))
    part.case = case.but(tokens=tokens, naive=naive)
    own = slice(rows.start * case.top_k, rows.stop * case.top_k) if case.down else rows
    part.x, part.y = world.x[own], world.y[rows]
    part.mapping, part.topk_ids, part.weights = world.mapping[rows], world.topk_ids[rows], world.weights[rows]
    if world.x_scale is not None:
        part.x_scale = world.x_scale[own]
    given = part.given(moe_align.moe_lora_align_block_size)
    active = max(1, len(part.mapping.unique()))
    fused(given, case.rank, case.top_k, part.switches, How(active=active, options=Options(batch_invariant=True)))
    return given.output


def check_experts(case: Case, device: str) -> None:
    world = World(case, device)
    world.weights = world.weights.to(device)
    whole = added_by_experts(world, slice(0, case.tokens), False)
    world.check(whole)
    middle, last = case.tokens // 2, case.tokens - 1
    parts = [(0, middle), (middle // 2, case.tokens), (middle, middle + 1), (last, last + 1), (0, 1), (3, 5)]
    for start, stop in parts:
        for naive in (False, True):
            part = added_by_experts(world, slice(start, stop), naive)
            assert torch.equal(part, whole[start:stop]), (start, stop, naive)


@pytest.mark.parametrize("name", [*EXPERTS, *(pytest.param(name, marks=pytest.mark.gpu) for name in MODELS)])
def test_a_token_of_experts_alone_and_in_company(name, device):
    check_experts((EXPERTS | MODELS)[name], device)
