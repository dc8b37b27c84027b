"""The FP8 operators on a CPU, in every mode, against float64; and what both paths refuse."""

import numpy as np
import pytest
import torch
from fp8_batches import E4M3, E5M2, MODES, Stack, fp8, product, real_rows

from punica.metadata import LoRABatch, RowGroups
from punica.ops.scales import Scheme
from tests.ops.step_calls import TORCH

SLOTS = [1, -1, 0, 2, 2, 0, -1]


def step(slots: list[int]) -> LoRABatch:
    batch = LoRABatch(16, 3)
    batch.fill(RowGroups.of_rows(np.array(slots)))
    return batch


@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("mode", MODES)
class TestModes:
    def test_shrink(self, mode, dtype, w8a8):
        given = MODES[mode]
        a = [Stack.random(3, 20, 200, given, dtype, "cpu") for _ in range(2)]
        x, a_scale = torch.randn(7, 200), None
        if w8a8:
            groups = -(-200 // given["group_k"]) if "group_k" in given else 1
            x, a_scale = fp8((7, 200), E4M3), torch.rand(7, groups) + 0.1
        y = torch.full((2, 7, 20), float("nan"))
        scheme = Scheme(use_fp8_w8a8=w8a8, **given)
        TORCH.shrink(
            x, [s.stored for s in a], y, step(SLOTS), 0.5, b_scale=[s.scale for s in a], a_scale=a_scale, scheme=scheme
        )
        rows = real_rows(x, a_scale, given)
        for i, stack in enumerate(a):
            expected = 0.5 * product(rows, stack.real(), SLOTS, None, True)
            torch.testing.assert_close(y[i].double(), expected, rtol=1e-4, atol=1e-4)

    def test_expand(self, mode, dtype, w8a8):
        given = MODES[mode]
        b = [Stack.random(3, n, 20, given, dtype, "cpu") for n in (33, 150)]
        x, a_scale = torch.randn(2, 7, 20), None
        if w8a8:
            x, a_scale = fp8((2, 7, 20), E4M3), torch.rand(7) + 0.1
        before = torch.randn(7, 200)
        y = before.clone()
        TORCH.expand(
            x, [s.stored for s in b], y, step(SLOTS), 10, True,
            b_scale=[s.scale for s in b], a_scale=a_scale, scheme=Scheme(use_fp8_w8a8=w8a8, **given),
        )  # fmt: skip
        column = 10
        for i, stack in enumerate(b):
            delta = product(real_rows(x[i], a_scale, given), stack.real(), SLOTS, None, False)
            end = column + delta.shape[1]
            expected = before[:, column:end].double() + delta
            torch.testing.assert_close(y[:, column:end].double(), expected, rtol=1e-4, atol=1e-4)
            column = end
        assert torch.equal(y[:, :10], before[:, :10])
        assert torch.equal(y[:, column:], before[:, column:])
        bare = torch.tensor(SLOTS) < 0
        assert torch.equal(y[bare], before[bare])


def test_the_example_of_the_specification():
    qw = torch.tensor([[1.0, 2, 0, 1], [0, 1, 1, 0]]).to(E4M3)[None]
    qx, batch, y = torch.tensor([[2.0, 1, 0, 4]]).to(E4M3), step([0]), torch.empty(1, 1, 2)
    given = {"b_scale": [torch.tensor([[0.5, 2.0]])], "a_scale": torch.tensor([0.25])}
    TORCH.shrink(qx, [qw], y, batch, 2.0, **given, scheme=Scheme(use_fp8_w8a8=True, per_channel_quant=True))
    assert y.tolist() == [[[2.0, 1.0]]]
    given = {"b_scale": [torch.tensor([[[0.5, 2.0]]])], "a_scale": torch.tensor([[1.0, 0.25]])}
    TORCH.shrink(qx, [qw], y, batch, 1.0, **given, scheme=Scheme(2, 2, use_fp8_w8a8=True))
    assert y.tolist() == [[[4.0, 0.5]]]


def test_true_ranks_and_poison():
    """Nothing of another slot, of lanes beyond a rank, or of their scales is read."""
    ranks = [8, 0, 20]
    a, b = (Stack.random(3, n, k, MODES["channel"], E4M3, "cpu") for n, k in ((20, 40), (50, 20)))
    a_real, b_real = a.real(), b.real()
    for slot, rank in enumerate(ranks):
        a.stored[slot, :, rank:] = b.stored[slot, :, :, rank:] = float("nan")
        a.scale[slot, rank:] = float("nan")
    x, y = torch.randn(4, 40), torch.zeros(4, 50)
    slots = [0, 1, 0, -1]
    a.stored[2] = b.stored[2] = float("nan")
    TORCH.linear(
        y, x, [a.stored], [b.stored], step(slots), 1.0, lora_a_scale=[a.scale], lora_b_scale=[b.scale],
        shrink=Scheme(per_channel_quant=True), expand=Scheme(per_channel_quant=True),
        lora_ranks=torch.tensor([ranks], dtype=torch.int32),
    )  # fmt: skip
    h = product(x.double(), a_real, slots, ranks, True)
    expected = product(h, b_real, slots, ranks, False)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantised", [False, True], ids=["x real", "x fp8"])
@pytest.mark.parametrize("mode", MODES)
def test_linear_w8a8(mode, quantised):
    given = MODES[mode]
    a, b = (Stack.random(3, n, k, given, E4M3, "cpu") for n, k in ((20, 200), (150, 20)))
    x, a_scale = torch.randn(7, 200), None
    if quantised:
        x, a_scale = fp8((7, 200), E4M3), torch.rand(7) + 0.1
    scheme, y = Scheme(use_fp8_w8a8=True, **given), torch.zeros(7, 150)
    TORCH.linear(
        y, x, [a.stored], [b.stored], step(SLOTS), lora_a_scale=[a.scale], lora_b_scale=[b.scale], a_scale=a_scale,
        shrink=scheme, expand=scheme,
    )  # fmt: skip
    h = product(real_rows(x, a_scale, given), a.real(), SLOTS, None, True)
    expected = product(h, b.real(), SLOTS, None, False)
    size = float(expected.abs().max())
    torch.testing.assert_close(y.double() / size, expected / size, rtol=5e-2, atol=5e-2)
