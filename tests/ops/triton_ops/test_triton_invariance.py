"""Batch invariance: with the switch on, a row has the same bits alone, in part of its batch, and in all of it."""

import sys
from typing import Any

import pytest
import torch
from triton_batches import linear

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


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_row_alone_and_in_company(dtype, shape, rows, device):
    check(Layer(shape, rows, dtype, device), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 9, 64, 65, 128, 129, 513, 2048, 8192])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_alone_and_in_company_in_models(dtype, shape, rows, device):
    check(Layer(shape, rows, dtype, device), rows)


def check_fp8(layer: Fp8Layer, rows: int) -> None:
    added = check_parts(layer, rows) - layer.y
    assert bool(added[torch.from_numpy(layer.slots) >= 0].any(1).all())


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("form", FP8.values(), ids=FP8)
def test_fp8_alone_and_in_company(form, shape, rows, device):
    w8a8, by_ranks = form
    check_fp8(Fp8Layer(shape, rows, torch.float16, device, w8a8=w8a8, by_ranks=by_ranks), rows)


def test_fp8_forms_are_the_same_with_a_folder_of_tuned_tables(tmp_path, monkeypatch, device):
    """No table has a say in them."""
    found = []

    def noted(y, x, weights, batch, schedules, *_):
        found.append(schedules)
        raise StopIteration

    monkeypatch.setattr(sys.modules["punica.ops.triton_ops.lora_linear"], "plan_linear", noted)
    layer = Fp8Layer((16, (16,), 64), 1100, torch.float16, device, w8a8=False, by_ranks=True)
    for options in (INVARIANT, INVARIANT._replace(tuned_dir=str(tmp_path))):
        with pytest.raises(StopIteration):
            linear(layer.y, layer.x, layer.a, layer.b, layer.step(slice(0, 1100)), options=options, **layer.fp8)
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 129, 513, 2048])
@pytest.mark.parametrize(("name", "dtype"), [("7b up", torch.float16), ("1.5b up", torch.float16),
                                             ("odd", torch.float16), ("8b qkv", torch.bfloat16)])  # fmt: skip
def test_fp8_alone_and_in_company_in_models(name, dtype, rows, device):
    check_fp8(Fp8Layer(SHAPES[name], rows, dtype, device, w8a8=False, by_ranks=True), rows)
