"""Mixtures: gates per row against a loop in float64, on both backends; rows of one adapter stay today's."""

import pytest
import torch

from punica.checks import MOST_MIXED
from punica.metadata import LoRABatch, MixedBatch, MixedRows
from punica.ops.torch_ops import TorchOps
from punica.ops.triton_ops import TritonOps
from punica.ops.weights import LoRAWeights
from tests.ops.helpers import step

OPS = {"torch": TorchOps(), "triton": TritonOps()}
POISON = float("nan")


def weights_of(
    dtype: torch.dtype, device: str, k: int, widths: tuple[int, ...], ranks: list[int], *, row_major: bool = False
) -> LoRAWeights:
    """Weights in slots of rank ``max(ranks)``; lanes beyond a rank hold NaN."""
    slots, rank = len(ranks), max(ranks)
    a = [torch.randn(slots, 1, rank, k).div(k**0.5).to(dtype) for _ in widths]
    b = [torch.randn(slots, 1, *((width, rank) if row_major else (rank, width))).to(dtype) for width in widths]
    b = b if row_major else [one.mT for one in b]
    for slot, true in enumerate(ranks):
        for one_a, one_b in zip(a, b, strict=True):
            one_a[slot, :, true:], one_b[slot, ..., true:] = POISON, POISON
    table = torch.tensor([ranks] * len(widths), dtype=torch.int32)
    return LoRAWeights.of([one.to(device) for one in a], [one.to(device) for one in b], table.to(device))


def expected(y: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, gates: torch.Tensor) -> torch.Tensor:
    found, ranks = y.double().cpu(), weights.a.ranks.cpu()
    for row, slot in gates.nonzero().tolist():
        column = 0
        for i, (a, b) in enumerate(zip(weights.a.tensors, weights.b.tensors, strict=True)):
            rank, width = int(ranks[i, slot]), b.shape[-2]
            low = a[slot, 0, :rank].double().cpu() @ x[row].double().cpu()
            found[row, column : column + width] += float(gates[row, slot]) * (b[slot, 0, :, :rank].double().cpu() @ low)
            column += width
    return found


def batch_of(rows: MixedRows, device: str) -> MixedBatch:
    batch = MixedBatch(rows.groups.num_rows + 3, None, device)
    batch.fill(rows)
    return batch


SPARSE = torch.tensor([[0.7, 0, 0.3, 0], [0, 0, 0, 0], [0, -2, 0.5, 1], [0, 0, 0, 0.5], [0.1, 0, 0.9, 0], [1, 0, 0, 0]])
CASES = {
    "fp32": (torch.float32, 70, (33,), [5, 8, 1, 3], SPARSE, False),
    "bf16-two-slices": (torch.bfloat16, 96, (40, 24), [4, 4, 4, 4], SPARSE, True),
    "fp16-odd": (torch.float16, 33, (17,), [2, 3, 1, 1], SPARSE, False),
    "dense-many-rows": (torch.float32, 32, (16,), [1, 2, 4, 1], torch.linspace(-1, 1, 80).view(20, 4) + 0.01, False),
    "rank-blocks-and-split": (torch.float32, 2100, (20,), [70, 3], torch.tensor([[0.5, 2.0], [1, 0]]), False),
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_the_gates(case: str, ops: str, device: str) -> None:
    dtype, k, widths, ranks, gates, row_major = CASES[case]
    weights = weights_of(dtype, device, k, widths, ranks, row_major=row_major)
    plain, mixed = MixedRows.of_gates(gates)
    x, y = (torch.randn(len(gates), width).to(device, dtype) for width in (k, sum(widths)))
    wanted = expected(y, x, weights, gates)
    OPS[ops].linear(y, x, weights, step(plain.row_slots, device, len(ranks)))
    OPS[ops].mix(y, x, weights, batch_of(mixed, device))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y.double().cpu(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_gates_of_one_adapter_are_todays_mapping() -> None:
    slots = torch.tensor([2, -1, 0, 0, 1])
    gates = torch.zeros(5, 3)
    gates[slots >= 0, slots[slots >= 0]] = 1
    plain, mixed = MixedRows.of_gates(gates)
    assert plain.equals(LoRABatch.of_slots(slots).rows)
    assert mixed.groups.no_lora
    assert mixed.groups.num_rows == 5
    assert MixedRows.of_gates(gates[:0])[1].groups.num_rows == 0
    assert MixedRows.of_gates(gates, slots=[4, 7, 9])[0].row_slots.tolist() == [9, -1, 4, 4, 7]


@pytest.mark.parametrize("ops", OPS)
def test_a_row_depends_on_no_other_row_and_no_other_slot(ops: str, device: str) -> None:
    weights = weights_of(torch.float32, device, 40, (24,), [4, 4, 4, 4])
    gates = torch.zeros(9, 4)
    gates[:, 0], gates[:, 1] = torch.linspace(0.1, 2, 9), 0.25
    gates[3] = torch.tensor([0.5, 0, 0.25, 0])  # in the midst of the others' tile
    x, y = torch.randn(9, 40, device=device), torch.randn(9, 24, device=device)
    for stack in (weights.a, weights.b):
        stack.tensors[0][3] = POISON  # a slot that no row names
    together = y.clone()
    OPS[ops].mix(together, x, weights, batch_of(MixedRows.of_gates(gates)[1], device))
    for row in (0, 3, 8):
        alone = y[row : row + 1].clone()
        one = batch_of(MixedRows.of_gates(gates[row : row + 1])[1], device)
        OPS[ops].mix(alone, x[row : row + 1], weights, one)
        if ops == "triton":
            assert torch.equal(alone[0], together[row])
        torch.testing.assert_close(alone[0], together[row])
    torch.testing.assert_close(together.double().cpu(), expected(y, x, weights, gates), rtol=1e-5, atol=1e-5)


def test_a_later_step_takes_the_place_of_the_one_before(device: str) -> None:
    weights = weights_of(torch.float32, device, 16, (8,), [2, 2, 2])
    x, first = torch.randn(4, 16, device=device), torch.full((4, 3), 0.5)
    batch = batch_of(MixedRows.of_gates(first)[1], device)
    for ops in OPS.values():  # what each reads exists from here on
        ops.mix(torch.zeros(4, 8, device=device), x, weights, batch)
    later = torch.tensor([[0, 0, 0], [2, 0, 1.0], [0, 3, 0]])
    batch.fill(MixedRows.of_gates(later)[1])
    for ops in OPS.values():  # one row more than the step has: padding
        y = torch.ones(4, 8, device=device)
        ops.mix(y, x, weights, batch)
        wanted = expected(torch.ones(4, 8), x, weights, later)
        torch.testing.assert_close(y.double().cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gates", "error", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "int64"),
        ([[1.0]], TypeError, "list"),
        (torch.ones(3), ValueError, r"\[T, n\]"),
        (torch.ones(3, 0), ValueError, r"\[T, n\]"),
        (torch.tensor([[1.0, 0], [0, float("nan")]]), ValueError, r"gates\[1\]"),
        (torch.tensor([[1.0, float("inf")]]), ValueError, r"gates\[0\]"),
        (torch.ones(2, MOST_MIXED + 1), ValueError, f"up to {MOST_MIXED}"),
    ],
)
def test_refuses_gates(gates: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixedRows.of_gates(gates)


def test_refuses_slots_rows_and_fp8_before_anything_changes(device: str) -> None:
    mixed = MixedRows.of_gates(torch.full((4, 2), 0.5), slots=[0, 5])[1]
    batch = MixedBatch(4, 6, device)
    batch.fill(mixed)
    for limits, message in (((4, 5), "max_loras=5"), ((3, 6), "4 rows")):
        with pytest.raises(ValueError, match=message):
            MixedBatch(*limits, device).fill(mixed)
    with pytest.raises(ValueError, match="4"):
        OPS["torch"].mix(torch.zeros(2, 8), torch.zeros(2, 16), weights_of(torch.float32, "cpu", 16, (8,), [2]), batch)
    y, x = (torch.zeros(4, width, dtype=torch.float16, device=device) for width in (8, 16))
    for name in OPS:
        with pytest.raises(ValueError, match=r"slot 5.* 0 to 4"):
            OPS[name].mix(y, x, weights_of(torch.float16, device, 16, (8,), [2] * 5), batch)
    values = [torch.zeros(6, 1, *shape, dtype=torch.float8_e4m3fn, device=device) for shape in ((2, 16), (8, 2))]
    scales = [[torch.ones(6, device=device)] for _ in values]
    fp8 = LoRAWeights.of([values[0]], [values[1]], scales=tuple(scales))
    with pytest.raises(NotImplementedError, match="float8"):
        OPS["triton"].mix(y, x, fp8, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [8, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 33, 700])
def test_layers_of_7b(rows: int, rank: int, dtype: torch.dtype) -> None:
    weights = weights_of(dtype, "cuda", 4096, (4096, 1024, 1024), [rank, rank // 2, 3, rank, 1, rank, 2, rank])
    gates = torch.rand(rows, 8) * (torch.rand(rows, 8) < 0.5)
    plain, mixed = MixedRows.of_gates(gates)
    x, y = torch.randn(rows, 4096).to("cuda", dtype), torch.zeros(rows, 6144, dtype=dtype, device="cuda")
    gates[plain.row_slots >= 0] = 0
    some = torch.randperm(rows)[:24].sort().values
    wanted = expected(y[some.cuda()], x[some.cuda()], weights, gates[some])
    found = [y.clone(), y.clone()]
    for one in found:
        OPS["triton"].mix(one, x, weights, batch_of(mixed, "cuda"))
    assert torch.equal(*found)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    error = (found[0][some.cuda()].double().cpu() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max().clamp(min=1)
