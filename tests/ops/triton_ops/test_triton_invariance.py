"""Batch invariance: with the switch on, a row has the same bits alone, in part of its batch, and in all of it."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from triton_batches import TOLERANCE, linear

from punica.metadata import LoRABatch
from punica.ops.quant import quantize_per_channel
from punica.ops.scales import PER_CHANNEL
from punica.ops.triton_ops import Options, lora_linear
from tests.ops.helpers import by_ranks as rank_major
from tests.ops.helpers import step

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
