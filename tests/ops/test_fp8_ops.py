"""The FP8 operators on a CPU, in every mode, against float64."""

import pytest
import torch

from punica.ops.scales import Scheme
from tests.ops.fp8_batches import E4M3, E5M2, MODES, Stack, fp8, product, real_rows, step
from tests.ops.step_calls import TORCH

SLOTS = [1, -1, 0, 2, 2, 0, -1]
NAN = float("nan")


def stack(n, k, given, dtype=E4M3):
    return Stack.random(3, n, k, given, dtype, "cpu")


def activations(shape, given, w8a8):
    """Real ones, or FP8 with scales, by group where there are some."""
    if not w8a8:
        return torch.randn(shape), None
    groups = -(-shape[-1] // given["group_k"]) if "group_k" in given else 1
    return fp8(shape, E4M3), torch.rand(shape[-2], groups) + 0.1


@pytest.mark.parametrize(("dtype", "w8a8"), [(E4M3, False), (E4M3, True), (E5M2, True)], ids=["real", "w8a8", "e5m2"])
@pytest.mark.parametrize("mode", MODES)
def test_shrink_and_expand(mode, dtype, w8a8):
    given, batch = MODES[mode], step(SLOTS, "cpu")
    scheme = Scheme(use_fp8_w8a8=w8a8, **given)
    a = [stack(20, 200, given, dtype) for _ in range(2)]
    x, a_scale = activations((7, 200), given, w8a8)
    y = torch.full((2, 7, 20), NAN)
    scales = {"b_scale": [s.scale for s in a], "a_scale": a_scale}
    TORCH.shrink(x, [s.stored for s in a], y, batch, 0.5, scheme=scheme, **scales)
    for i, each in enumerate(a):
        expected = 0.5 * product(real_rows(x, a_scale, given), each.real(), SLOTS, None, True)
        torch.testing.assert_close(y[i].double(), expected, rtol=1e-4, atol=1e-4)

    b = [stack(n, 20, given, dtype) for n in (33, 150)]
    x, a_scale = activations((2, 7, 20), given, w8a8)
    y = torch.randn(7, 200)
    expected, column = y.double(), 10
    scales = {"b_scale": [s.scale for s in b], "a_scale": a_scale}
    TORCH.expand(x, [s.stored for s in b], y, batch, 10, scheme=scheme, **scales)
    for i, each in enumerate(b):
        delta = product(real_rows(x[i], a_scale, given), each.real(), SLOTS, None, False)
        expected[:, column : column + delta.shape[1]] += delta
        column += delta.shape[1]
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(y[:, [*range(10), *range(column, 200)]].double(), expected[:, [*range(10), *range(column, 200)]])


def test_the_example_of_the_specification():
    qw = torch.tensor([[1.0, 2, 0, 1], [0, 1, 1, 0]]).to(E4M3)[None]
    qx, batch, y = torch.tensor([[2.0, 1, 0, 4]]).to(E4M3), step([0], "cpu"), torch.empty(1, 1, 2)
    given = {"b_scale": [torch.tensor([[0.5, 2.0]])], "a_scale": torch.tensor([0.25])}
    TORCH.shrink(qx, [qw], y, batch, 2.0, **given, scheme=Scheme(use_fp8_w8a8=True, per_channel_quant=True))
    assert y.tolist() == [[[2.0, 1.0]]]
    given = {"b_scale": [torch.tensor([[[0.5, 2.0]]])], "a_scale": torch.tensor([[1.0, 0.25]])}
    TORCH.shrink(qx, [qw], y, batch, 1.0, **given, scheme=Scheme(2, 2, use_fp8_w8a8=True))
    assert y.tolist() == [[[4.0, 0.5]]]


def test_true_ranks_and_poison():
    """Nothing of another slot, of lanes beyond a rank, or of their scales is read."""
    ranks, slots = [8, 0, 20], [0, 1, 0, -1]
    a, b = stack(20, 40, MODES["channel"]), stack(50, 20, MODES["channel"])
    a_real, b_real = a.real(), b.real()
    for slot, rank in enumerate(ranks):
        a.stored[slot, :, rank:] = b.stored[slot, :, :, rank:] = NAN
        a.scale[slot, rank:] = NAN
    a.stored[2] = b.stored[2] = NAN
    x, y, scheme = torch.randn(4, 40), torch.zeros(4, 50), Scheme(per_channel_quant=True)
    TORCH.linear(
        y, x, [a.stored], [b.stored], step(slots, "cpu"), lora_a_scale=[a.scale], lora_b_scale=[b.scale],
        shrink=scheme, expand=scheme, lora_ranks=torch.tensor([ranks], dtype=torch.int32),
    )  # fmt: skip
    expected = product(product(x.double(), a_real, slots, ranks, True), b_real, slots, ranks, False)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
