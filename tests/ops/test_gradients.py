"""`lora_linear` under autograd in float64, and what it refuses."""

import numpy as np
import pytest
import torch
from torch import Tensor

from punica.metadata import LoRABatch, RowGroups
from punica.ops.gradients import lora_linear
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import LoRAWeights
from tests.ops.helpers import normal, step

SLOTS, K, WIDTHS, RANK, COUNT, F64 = (2, 0, -1, 2, 2, 0, -1), 6, (5, 4), 3, 4, torch.float64
RANKS = torch.tensor([[3, 3, 1, 3], [2, 3, 0, 3]], dtype=torch.int32)
SCALES = {"one scale": 0.5, "a scale of each row": torch.arange(1.0, 9.0, dtype=F64) / 4}
BASE = normal(sum(WIDTHS), K, dtype=F64, seed=9)


def leaves() -> list[Tensor]:
    """x with a spare row, A and B of both slices, NaN in slots without rows and beyond true ranks."""
    shapes = [(8, K), *[(COUNT, 1, RANK, K)] * 2, *[(COUNT, 1, width, RANK) for width in WIDTHS]]
    x, *factors = (normal(*shape, dtype=F64, seed=i) for i, shape in enumerate(shapes))
    for i, slot in np.ndindex(2, COUNT):
        live = int(RANKS[i, slot]) if slot in SLOTS else 0
        factors[i][slot, :, live:] = factors[2 + i][slot, ..., live:] = float("nan")
    return [one.requires_grad_() for one in (x, *factors)]


def linear(x: Tensor, *factors: Tensor, scale: float | Tensor = 1.0, base=(BASE,), batch=None, **more) -> Tensor:
    batch = batch or step(SLOTS, slot_count=COUNT, rows=8)
    return lora_linear(TorchOps(), x, LoRAWeights.of(factors[:2], factors[2:], RANKS), batch, scale, base, **more)


@pytest.mark.parametrize("scale", SCALES)
def test_the_dense_definition_and_its_gradients(scale):
    given, used = leaves(), SCALES[scale] if isinstance(SCALES[scale], Tensor) else torch.full((8,), 0.5, dtype=F64)
    y = linear(*given, scale=SCALES[scale])
    found = torch.autograd.grad(y.square().sum(), given)
    assert not any(one[[1, 3]].any() for one in found[1:])  # slots without rows
    assert not any(one.any() for one in (found[1][2, :, 1:], found[2][0, :, 2:], found[3][2, ..., 1:]))  # padding
    for one in given[1:]:
        one.data.nan_to_num_(0.0)
    x, *factors = given
    for t, slot in enumerate(SLOTS):
        parts = [used[t] * b[slot, 0] @ (a[slot, 0] @ x[t]) for a, b in zip(factors[:2], factors[2:], strict=True)]
        torch.testing.assert_close(y[t], BASE @ x[t] + torch.cat(parts) * (slot >= 0))
    assert torch.autograd.gradcheck(lambda *one: linear(*one, scale=SCALES[scale]), given)


def test_experts_are_slots_of_pairs():
    a, b = normal(2, 3, RANK, K, dtype=F64).requires_grad_(), normal(2, 3, 5, RANK, dtype=F64)
    x, slots, experts = normal(4, K, dtype=F64), torch.tensor([1, -1, 0, 1]), torch.tensor([[0, 2], [1, 0]] * 2)
    pairs = torch.where(slots[:, None] < 0, -1, slots[:, None] * 3 + experts).flatten()
    weights = LoRAWeights.of((a.flatten(0, 1),), (b.flatten(0, 1),))
    y = lora_linear(TorchOps(), x.repeat_interleave(2, 0), weights, LoRABatch.of_slots(pairs)).view(4, 2, 5)
    want = torch.einsum("tknr,tkrc,tc->tkn", b[slots[:, None], experts], a[slots[:, None], experts], x)
    want = want * (slots >= 0)[:, None, None]
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), a), torch.autograd.grad(want.sin().sum(), a))


def test_refuses_what_would_give_no_or_another_gradient():
    given, batch = leaves(), LoRABatch.of_slots(torch.tensor(SLOTS))
    for error, message, options in [
        (RuntimeError, "base weight requires a gradient", {"base": (BASE.clone().requires_grad_(),)}),
        (ValueError, r"base weight has shape \(9, 5\), expected \(9, 6\)", {"base": (BASE[:, 1:],)}),
        (ValueError, "uses slot 0, of which views have no A and B", {"views": {2: (given[1][2, 0], given[3][2, 0])}}),
        (ValueError, "uses slot 5; the weights have slots 0 to 3", {"batch": LoRABatch.of_slots(torch.tensor([5]))}),
    ]:
        with pytest.raises(error, match=message):
            linear(*given, **options)
    y = linear(*given, batch=batch)
    batch.fill(RowGroups.of_rows(np.array(SLOTS[::-1])))
    with pytest.raises(RuntimeError, match="another step began between forward and backward"):
        y.sum().backward()
