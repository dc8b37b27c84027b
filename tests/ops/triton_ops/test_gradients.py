"""`Ops.gradient` of both backends against float64: shapes, layouts, true ranks, what is not read, and its bits; and
`lora_linear` under autograd, and what it refuses.
"""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor

from punica.metadata import LoRABatch, RowGroups
from punica.ops.gradients import lora_linear
from punica.ops.torch_ops import TorchOps
from punica.ops.triton_ops import TritonOps
from punica.ops.weights import LoRAWeights, Stack
from tests.ops.helpers import normal, step

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
OPS = {"torch": TorchOps(), "triton": TritonOps()}
TOLERANCE = {FP16: 2e-3, BF16: 6e-3, FP32: 2e-6}
RAGGED, GIANT = (2, 0, -1, 2, 2, 1, -1, 0, 2), (0,) * 130 + (3,) + (-1, 1, 1)
Case = namedtuple("Case", "slots k widths rank count dtype ranks", defaults=(None,))  # ranks: of slices and slots
CASES = {
    "one row, rank 1": Case((0,), 5, (3,), 1, 1, FP16),
    "ragged": Case(RAGGED, 33, (33, 7), 8, 3, BF16, ((8, 3, 5), (0, 8, 1))),
    "more slots than rows": Case((5, 1), 16, (40,), 16, 9, FP16),
    "many rows": Case(GIANT, 40, (20, 20, 24), 20, 4, BF16, ((20, 0, 16, 1),) * 3),
    "two blocks of ranks": Case(RAGGED, 16, (130,), 96, 3, FP32, ((96, 65, 64),)),
    "float32": Case(GIANT, 17, (9,), 4, 4, FP32),
    "no adapter": Case((-1, -1), 16, (16,), 8, 2, FP16),
    "no rows": Case((), 16, (16,), 8, 2, FP16),
}
if torch.cuda.is_available():
    MIXED = tuple(np.random.default_rng(0).integers(-1, 32, 4096).tolist())
    CASES |= {
        "7B": Case(MIXED, 4096, (4096, 1024, 1024), 16, 32, BF16),
        "8B down": Case((0,) * 4096, 14336, (4096,), 64, 1, FP16),
        "one of many": Case((200,) * 33, 2049, (1111,), 128, 256, FP32),
    }


class Given:
    """Random operands; rows without adapter, lanes beyond true ranks and all weights are NaN: they are not read."""

    def __init__(self, case: Case, device: str, side: str) -> None:
        slots, self.side = [*case.slots, -1], side
        whole = (case.k,) * len(case.widths) if side == "a" else case.widths
        self.x = normal(len(slots), case.k if side == "a" else sum(whole), dtype=case.dtype, seed=1)
        self.low = normal(len(whole), len(slots), case.rank, seed=2)
        ranks = None if case.ranks is None else torch.tensor(case.ranks, dtype=torch.int32)
        for t, slot in enumerate(slots):
            for i, low in enumerate(self.low[:, t]):
                low[0 if slot < 0 else case.rank if ranks is None else int(ranks[i, slot]) :] = float("nan")
            if slot < 0:
                self.x[t] = float("nan")
        self.x, self.low = self.x.to(device), self.low.to(device)
        nan = [torch.full((case.count, 1, case.rank, n), float("nan"), device=device, dtype=case.dtype) for n in whole]
        ranks = None if ranks is None else ranks.to(device)
        self.stack = Stack.of_a(nan, ranks) if side == "a" else Stack.of_b([one.mT for one in nan], ranks)
        self.batch = step(case.slots, device, case.count, len(slots))
        self.rows_of = (torch.tensor(slots) == torch.arange(case.count)[:, None]).double()  # [L, T]

    def check(self, ops: str) -> None:
        found, again = (OPS[ops].gradient(self.stack, self.low, self.x, self.batch) for _ in range(2))
        x, low, column = self.x.cpu().double().nan_to_num(0), self.low.cpu().double().nan_to_num(0), 0
        for i, (one, weight) in enumerate(zip(found, self.stack.tensors, strict=True)):
            width = weight.shape[-1 if self.side == "a" else -2]
            want = (self.rows_of[:, None] * low[i].T) @ x[:, column : column + width]  # [L, r, width]
            want = (want if self.side == "a" else want.mT)[:, None]
            column += width if self.side == "b" else 0
            assert (one.shape, one.dtype) == (weight.shape, weight.dtype)
            bound = TOLERANCE[one.dtype] * max(1.0, float(want.abs().max()))
            torch.testing.assert_close(one.cpu().double(), want, rtol=TOLERANCE[one.dtype], atol=bound)
            assert not one.cpu()[want == 0].any()
            assert torch.equal(one, again[i])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("case", CASES)
def test_sums_the_rows_of_each_slot_and_reads_nothing_else(case, side, ops, device):
    Given(CASES[case], device, side).check(ops)


@pytest.mark.parametrize("ops", OPS)
def test_any_strides_of_x(ops, device):
    given = Given(CASES["float32"], device, "b")
    rows, columns = given.x.shape
    unaligned = given.x.new_zeros(rows, columns + 3)[:, 1:-2].copy_(given.x)
    for x in (given.x.T.contiguous().T, given.x[:1, :1].expand(rows, columns), unaligned):  # expanded: of a sum
        given.x = x
        given.check(ops)


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


def test_spare_rows_behind_a_step_of_adapters_alone_get_no_term(monkeypatch):
    """Memory of new outputs is never read."""
    monkeypatch.setattr(Tensor, "new_empty", lambda one, *size, **form: one.new_full(size, torch.nan, **form))
    given = [one.data.nan_to_num_(0.0).requires_grad_() for one in leaves()]
    y = linear(*given, base=(), batch=step([2, 0, 2], slot_count=COUNT, rows=8))
    y.sum().backward()
    assert (y[:3, :5].isfinite() & (y[:3, :5] != 0)).all()
    for one in (y[3:], given[0].grad[3:]):
        assert torch.equal(one, torch.zeros_like(one))


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
