"""A plan that is used again: prepared calls must follow every change of the operands, and stay few."""

from __future__ import annotations

import pytest
import torch

from punica.metadata import LoRABatch
from punica.ops import expand, segment_calls, shrink
from tests.ops.helpers import assert_expanded, assert_shrunk, normal, products

SLOTS = torch.tensor([0, 0, 1, 2, 2, 3])
DTYPES = [torch.float32, torch.bfloat16]


def weights(seed=1, dtype=torch.float32, slots=4, rank=4, hidden=10):
    return normal(slots, rank, hidden, dtype=dtype, scale=0.3, seed=seed)


def check_shrink(step, a, x, slots=SLOTS, ranks=None):
    """Shrink into NaN with ``step`` and compare with the product over the true ranks, computed afresh."""
    out = torch.full((len(a), x.shape[0], a[0].shape[-2]), torch.nan)
    shrink(x, a, out, step, lora_ranks=ranks)
    for i, weight in enumerate(a):
        true = weight.clone()
        for slot in range(weight.shape[0]):
            if ranks is not None:
                true[slot, ..., int(ranks[i, slot]) :, :] = 0
        assert_shrunk(out[i], products(x, true, slots))


def check_expand(step, b, h, slots=SLOTS):
    y = torch.zeros(h.shape[1], sum(weight.shape[-2] for weight in b), dtype=b[0].dtype)
    expand(h, b, y, step)
    assert_expanded(y, torch.cat([products(h[i], weight, slots) for i, weight in enumerate(b)], 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[0] * 6, SLOTS.tolist(), [3, 0, 3, 0, 1, 1]], ids=["one", "runs", "sorted"])
def test_repeated_calls_take_new_activations(dtype, slots):
    slots = torch.tensor(slots)
    step, a, b = LoRABatch.of_slots(slots), (weights(dtype=dtype),), (normal(4, 9, 4, dtype=dtype, scale=0.5),)
    for seed in range(3):
        check_shrink(step, a, normal(6, 10, dtype=dtype, seed=seed), slots)
        check_expand(step, b, normal(1, 6, 4, seed=seed), slots)
    assert len(step.plan.shrinks) == len(step.plan.expands) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_adapter_loaded_into_a_slot_is_seen(dtype):
    step, a, x = LoRABatch.of_slots(SLOTS), weights(dtype=dtype), normal(6, 10, dtype=dtype)
    check_shrink(step, (a,), x)
    a[2].copy_(weights(seed=9, dtype=dtype)[2])
    check_shrink(step, (a,), x)


def test_true_ranks_changed_in_place_are_seen():
    step, a, x = LoRABatch.of_slots(SLOTS), (weights(), weights(seed=2)), normal(6, 10)
    ranks = torch.tensor([[4, 4, 4, 4], [1, 4, 2, 0]], dtype=torch.int32)
    for slot, rank in ((0, 4), (0, 2), (3, 0), (0, 4), (3, 4)):
        ranks[0, slot] = rank
        check_shrink(step, a, x, ranks=ranks)
    check_shrink(step, a, x)
    assert len(step.plan.shrinks) == 1


@pytest.mark.parametrize("slots", [1, 2], ids=["used", "unused"])
def test_a_rank_out_of_range_raises_on_a_repeated_call(slots):
    step = LoRABatch.of_slots(torch.zeros(3, dtype=torch.int64))
    a, out = weights(slots=slots), torch.full((1, 3, 4), 7.0)
    ranks = torch.full((1, slots), 4, dtype=torch.int32)
    shrink(normal(3, 10), (a,), out, step, lora_ranks=ranks)
    before = out.clone()
    ranks[0, 0] = 5
    with pytest.raises(ValueError, match="5 for slot 0"):
        shrink(normal(3, 10, seed=1), (a,), out, step, lora_ranks=ranks)
    with pytest.raises(TypeError, match="int64"):
        shrink(normal(3, 10, seed=1), (a,), out, step, lora_ranks=torch.full((1, slots), 4))
    assert torch.equal(out, before)


@pytest.mark.parametrize("which", [0, 1])
def test_a_replaced_weight_is_seen(which):
    """Another tensor in one slice, then other memory behind the same tensor."""
    step, a, x = LoRABatch.of_slots(SLOTS), [weights(), weights(seed=2)], normal(6, 10)
    check_shrink(step, tuple(a), x)
    a[which] = weights(seed=5)
    check_shrink(step, tuple(a), x)
    a[which].data = weights(seed=6)
    check_shrink(step, tuple(a), x)


def test_weights_freed_and_made_anew_are_not_confused():
    """A kept call holds its weights, so a new tensor cannot take the id or address of an old one."""
    step, x = LoRABatch.of_slots(SLOTS), normal(6, 10)
    for seed in range(20):
        check_shrink(step, (weights(seed=seed),), x)
    assert len(step.plan.shrinks) == 20


def test_other_shapes_dtypes_slices_and_offsets_with_one_plan():
    step, a, b = LoRABatch.of_slots(SLOTS), weights(), normal(4, 9, 4, scale=0.5)
    for rows in (6, 8, 6):
        padded = torch.cat([SLOTS, torch.full((rows - 6,), -1)])
        check_shrink(step, (a,), normal(rows, 10), padded)
        check_shrink(step, (a, weights(seed=2)), normal(rows, 10), padded)
        check_expand(step, (b,), normal(1, rows, 4), padded)
    for dtype in (torch.bfloat16, torch.float32):
        for offset in (0, 2, 1):
            y = torch.zeros(6, 12, dtype=dtype)
            expand(normal(1, 6, 4), (b,), y, step, offset)
            assert_expanded(y[:, offset : offset + 9], products(normal(6, 4), b, SLOTS))
            assert not y[:, :offset].any()


def test_one_tensor_as_both_weights():
    """A square weight may be the A of one call and the B of another."""
    step, w = LoRABatch.of_slots(SLOTS), weights(rank=10)
    for _ in range(2):
        check_shrink(step, (w,), normal(6, 10))
        check_expand(step, (w,), normal(1, 6, 10))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"scaling": float("nan")}, ValueError, "nan"),
        ({"scaling": True}, TypeError, "bool"),
        ({"x": (6, 9)}, ValueError, "hidden size of x is 9"),
        ({"x": (5, 10)}, ValueError, r"expected \(1, 5, 4\)"),
        ({"dtype": torch.bfloat16}, TypeError, "bfloat16"),
        ({"a": []}, ValueError, "lora_a_stacked is empty"),
    ],
    ids=["nan", "bool", "hidden-size", "rows", "dtype", "no-slices"],
)
def test_bad_input_raises_also_after_a_good_call(changes, error, match):
    step, out = LoRABatch.of_slots(SLOTS), torch.full((1, 6, 4), 5.0)
    good = {"x": (6, 10), "dtype": torch.float32, "a": (weights(),), "scaling": 1.0}
    for case in (good, good | changes):
        x = torch.ones(case["x"], dtype=case["dtype"])
        if case is good:
            shrink(x, case["a"], out, step, case["scaling"])
            before = out.clone()
        else:
            with pytest.raises(error, match=match):
                shrink(x, case["a"], out, step, case["scaling"])
    assert torch.equal(out, before)


def test_the_number_of_kept_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(segment_calls, "KEPT_CALLS", 3)
    step, x, stacks = LoRABatch.of_slots(SLOTS), normal(6, 10), [weights(seed=i) for i in range(5)]
    for stack in stacks + stacks:
        check_shrink(step, (stack,), x)
    assert [id(stack) for stack in stacks[2:]] == list(step.plan.shrinks)
