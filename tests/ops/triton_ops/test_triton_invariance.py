"""Batch invariance: with the switch on, a row has the same bits alone, in part of its batch, and in all of it."""

import pytest
import torch

from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops import Options, linear, lora_linear

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


class Layer:
    """Weights of random adapters, and rows of x with the slot of each."""

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
        step = LoRABatch(len(slots), SLOTS, self.x.device)
        step.fill(RowGroups.of_rows(slots))
        return step

    def added(self, rows: slice) -> torch.Tensor:
        y = self.y[rows].clone()
        linear(y, self.x[rows], self.a, self.b, self.step(rows), 0.5, lora_ranks=self.ranks, options=INVARIANT)
        return y


def check(layer: Layer, rows: int) -> None:
    whole = layer.added(slice(0, rows))
    parts = [
        slice(0, (rows + 1) // 2),
        slice(rows // 3, rows),
        *(slice(t, t + 1) for t in range(0, rows, 1 + rows // 9)),
    ]
    parts.append(slice(rows // 2, rows // 2 + 1))
    for part in parts:
        assert torch.equal(layer.added(part), whole[part]), part
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
