"""`Ops.gradient` of both backends against float64: shapes, layouts, true ranks, what is not read, and its bits."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from punica.ops.torch_ops import TorchOps
from punica.ops.triton_ops import TritonOps
from punica.ops.weights import Stack
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
