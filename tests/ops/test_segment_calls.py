"""Cuts that are used again: they must follow every change of the operands, and stay few."""

from __future__ import annotations

import pytest
import torch

from punica.metadata import LoRABatch
from punica.ops import torch_ops
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import Stack
from tests.ops.helpers import assert_expanded, assert_shrunk, normal, products

SLOTS = torch.tensor([0, 0, 1, 2, 2, 3])
OPS = TorchOps()
DTYPES = [torch.float32, torch.bfloat16]


def weights(seed=1, dtype=torch.float32, slots=4, rank=4, hidden=10):
    return normal(slots, rank, hidden, dtype=dtype, scale=0.3, seed=seed)


def check_shrink(step, a, x, slots=SLOTS):
    """Shrink into NaN with ``step`` and compare with the product over the true ranks, computed afresh."""
    out, ranks = torch.full((len(a.tensors), x.shape[0], a.form.stored.rank), torch.nan), a.ranks
    OPS.shrink(out, x, a, step)
    for i, weight in enumerate(a.tensors):
        true = weight.clone()
        for slot in range(weight.shape[0]):
            if ranks is not None:
                true[slot, ..., int(ranks[i, slot]) :, :] = 0
        assert_shrunk(out[i], products(x, true, slots))


def check_expand(step, b, h, slots=SLOTS):
    y = torch.zeros(h.shape[1], sum(b.form.stored.widths), dtype=b.form.stored.dtype)
    OPS.expand(y, h, b, step)
    assert_expanded(y, torch.cat([products(h[i], weight, slots) for i, weight in enumerate(b.tensors)], 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[0] * 6, SLOTS.tolist(), [3, 0, 3, 0, 1, 1]], ids=["one", "runs", "sorted"])
def test_repeated_calls_take_new_activations(dtype, slots):
    slots = torch.tensor(slots)
    step, a = LoRABatch.of_slots(slots), Stack.of_a((weights(dtype=dtype),))
    b = Stack.of_b((normal(4, 9, 4, dtype=dtype, scale=0.5),))
    for seed in range(3):
        check_shrink(step, a, normal(6, 10, dtype=dtype, seed=seed), slots)
        check_expand(step, b, normal(1, 6, 4, seed=seed), slots)
    assert len(a.cuts) == len(b.cuts) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_adapter_loaded_into_a_slot_is_seen(dtype):
    step, w, x = LoRABatch.of_slots(SLOTS), weights(dtype=dtype), normal(6, 10, dtype=dtype)
    a = Stack.of_a((w,))
    check_shrink(step, a, x)
    w[2].copy_(weights(seed=9, dtype=dtype)[2])
    check_shrink(step, a, x)


def test_true_ranks_changed_in_place_are_seen():
    step, x = LoRABatch.of_slots(SLOTS), normal(6, 10)
    ranks = torch.tensor([[4, 4, 4, 4], [1, 4, 2, 0]], dtype=torch.int32)
    a = Stack.of_a((weights(), weights(seed=2)), ranks)
    for slot, rank in ((0, 4), (0, 2), (3, 0), (0, 4), (3, 4)):
        ranks[0, slot] = rank
        check_shrink(step, a, x)
    assert len(a.cuts) == 1


@pytest.mark.parametrize("slots", [1, 2], ids=["used", "unused"])
def test_a_rank_out_of_range_raises_on_a_repeated_call(slots):
    step = LoRABatch.of_slots(torch.zeros(3, dtype=torch.int64))
    out, ranks = torch.full((1, 3, 4), 7.0), torch.full((1, slots), 4, dtype=torch.int32)
    a = Stack.of_a((weights(slots=slots),), ranks)
    OPS.shrink(out, normal(3, 10), a, step)
    before = out.clone()
    ranks[0, 0] = 5
    with pytest.raises(ValueError, match="5 for slot 0"):
        OPS.shrink(out, normal(3, 10, seed=1), a, step)
    with pytest.raises(TypeError, match="int64"):
        Stack.of_a(a.tensors, ranks.long())
    assert torch.equal(out, before)


def test_other_shapes_dtypes_and_offsets_with_one_stack():
    step, a, b = LoRABatch.of_slots(SLOTS), Stack.of_a((weights(),)), Stack.of_b((normal(4, 9, 4, scale=0.5),))
    for rows in (6, 8, 6):
        padded = torch.cat([SLOTS, torch.full((rows - 6,), -1)])
        check_shrink(step, a, normal(rows, 10), padded)
        check_expand(step, b, normal(1, rows, 4), padded)
    for dtype in (torch.bfloat16, torch.float32):
        for offset in (0, 2, 1):
            y = torch.zeros(6, 12, dtype=dtype)
            OPS.expand(y, normal(1, 6, 4), b, step, offset)
            assert_expanded(y[:, offset : offset + 9], products(normal(6, 4), b.tensors[0], SLOTS))
            assert not y[:, :offset].any()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"scaling": float("nan")}, ValueError, "nan"),
        ({"scaling": True}, TypeError, "bool"),
        ({"x": (6, 9)}, ValueError, "hidden size 10 as in lora_a_stacked"),
        ({"x": (5, 10)}, ValueError, r"expected \(1, 5, 4\)"),
        ({"dtype": torch.bfloat16}, TypeError, "bfloat16"),
    ],
    ids=["nan", "bool", "hidden-size", "rows", "dtype"],
)
def test_bad_input_raises_also_after_a_good_call(changes, error, match):
    step, out = LoRABatch.of_slots(SLOTS), torch.full((1, 6, 4), 5.0)
    good, a = {"x": (6, 10), "dtype": torch.float32, "scaling": 1.0}, Stack.of_a((weights(),))
    for case in (good, good | changes):
        x = torch.ones(case["x"], dtype=case["dtype"])
        if case is good:
            OPS.shrink(out, x, a, step, case["scaling"])
            before = out.clone()
        else:
            with pytest.raises(error, match=match):
                OPS.shrink(out, x, a, step, case["scaling"])
    assert torch.equal(out, before)


def test_cuts_are_those_of_one_step_and_bounded(monkeypatch):
    monkeypatch.setattr(torch_ops, "_MOST_CUTS", 2)
    a = Stack.of_a((weights(),))
    for step in (LoRABatch.of_slots(SLOTS), LoRABatch.of_slots(SLOTS)):
        for rows in (6, 7, 8):
            check_shrink(step, a, normal(rows, 10), torch.cat([SLOTS, torch.full((rows - 6,), -1)]))
            assert len(a.cuts) <= 2
        assert a.cuts_of is step.plan
