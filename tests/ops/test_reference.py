"""The oracle itself: against float64 row by row, and the meaning of slot -1."""

from __future__ import annotations

import pytest
import torch

from punica.metadata import compute_meta
from punica.ops import reference, torch_ops
from tests.ops.helpers import assert_expanded, assert_shrunk, normal, products, random_slots

BOTH = [pytest.param(reference, id="reference"), pytest.param(torch_ops, id="torch_ops")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def segments(slots: torch.Tensor) -> tuple:
    return compute_meta(slots)[:6]


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "rank", "num_slots"), [(1, 16, 1, 1), (3, 100, 20, 8), (33, 128, 16, 2), (16, 2049, 4, 128)]
)
def test_shrink_equals_float64_and_sgmv_equals_bgmv(ops, dtype, rows, hidden, rank, num_slots):
    slots = random_slots(rows, num_slots)
    x = normal(rows, hidden, dtype=dtype)
    a = normal(num_slots, 1, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=1)
    per_token, per_segment = torch.full((rows, rank), torch.nan), torch.full((rows, rank), torch.nan)
    ops.bgmv_shrink(x, a, per_token, slots, 0.5)
    ops.sgmv_shrink(x, a, per_segment, *segments(slots), 0.5)
    assert_shrunk(per_token, products(x, a, slots, 0.5))
    assert torch.equal(per_token, per_segment)


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add_inputs", [True, False], ids=["add", "overwrite"])
def test_expand_equals_float64_and_sgmv_equals_bgmv(ops, dtype, add_inputs):
    rows, rank, width, num_slots = 33, 20, 100, 5
    slots = random_slots(rows, num_slots, seed=3)
    h, b = normal(rows, rank), normal(num_slots, width, rank, dtype=dtype, scale=rank**-0.5, seed=1)
    start = normal(rows, width, dtype=dtype, seed=2)
    expected = products(h, b, slots) + (start.double() if add_inputs else 0)
    expected[slots < 0] = start[slots < 0].double()
    per_token, per_segment = start.clone(), start.clone()
    ops.bgmv_expand(h, b, per_token, slots, add_inputs)
    ops.sgmv_expand(h, b, per_segment, *segments(slots), add_inputs)
    assert_expanded(per_token, expected)
    assert torch.equal(per_token, per_segment)
    assert torch.equal(per_token[slots < 0], start[slots < 0])


@pytest.mark.parametrize("ops", BOTH)
def test_expand_slice_writes_its_columns_only(ops):
    slots = torch.tensor([1, -1, 0, 1])
    h, b, start = normal(4, 3), normal(2, 5, 3, seed=1), normal(4, 12, seed=2)
    per_token, per_segment = start.clone(), start.clone()
    ops.bgmv_expand_slice(h, b, per_token, slots, 4, 5)
    ops.sgmv_expand_slice(h, b, per_segment, *segments(slots), 4, 5, True)
    expected = start.double()
    expected[:, 4:9] += products(h, b, slots)
    assert_expanded(per_token, expected)
    assert torch.equal(per_token, per_segment)
    outside = [0, 1, 2, 3, 9, 10, 11]
    assert torch.equal(per_token[:, outside], start[:, outside])


@pytest.mark.parametrize("ops", BOTH)
def test_slot_minus_one_never_reads_the_last_slot(ops):
    a, b = torch.full((3, 4, 8), torch.nan), torch.full((3, 6, 4), torch.nan)
    a[0], b[0] = 1.0, 1.0
    slots = torch.tensor([-1, 0, -1])
    h, y = torch.full((3, 4), 7.0), torch.full((3, 6), 7.0)
    ops.bgmv_shrink(torch.ones(3, 8), a, h, slots)
    ops.bgmv_expand(h, b, y, slots)
    assert h.tolist() == [[0.0] * 4, [8.0] * 4, [0.0] * 4]
    assert y.tolist() == [[7.0] * 6, [39.0] * 6, [7.0] * 6]


@pytest.mark.parametrize("ops", BOTH)
def test_output_narrower_and_wider_than_the_weights(ops):
    slots, h, b = torch.tensor([0, 1]), normal(2, 3), normal(2, 6, 3, seed=1)
    narrow, wide, expected = torch.zeros(2, 4), torch.zeros(2, 8), products(h, b, torch.tensor([0, 1]))
    ops.bgmv_expand(h, b, narrow, slots)
    ops.bgmv_expand(h, b, wide, slots)
    assert_expanded(narrow, expected[:, :4])
    assert_expanded(wide[:, :6], expected)
    assert not wide[:, 6:].any()
    x, a, out = normal(2, 5), normal(2, 3, 5, seed=1), torch.full((2, 4), 9.0)
    ops.bgmv_shrink(x, a, out, slots)
    assert_shrunk(out[:, :3], products(x, a, slots))
    assert (out[:, 3] == 9).all()


@pytest.mark.parametrize("ops", BOTH)
def test_rows_beyond_the_segments_are_padding(ops):
    x, a, out = torch.ones(4, 2), torch.ones(1, 1, 2), torch.full((4, 1), torch.nan)
    ops.sgmv_shrink(x, a, out, torch.tensor([0]), torch.tensor([2]), torch.tensor([0]), 1, 2, 2, 1.0)
    assert out.flatten().tolist() == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("ops", BOTH)
def test_float64_is_computed_in_float64(ops):
    slots, x, a = torch.tensor([0, 0]), normal(2, 300, dtype=torch.float64), normal(1, 2, 300, dtype=torch.float64)
    out = torch.empty(2, 2, dtype=torch.float64)
    ops.bgmv_shrink(x, a, out, slots)
    torch.testing.assert_close(out, products(x, a, slots), rtol=1e-13, atol=1e-13)


def test_meta_tensors_are_checked_and_not_computed():
    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    slots, out = empty(4, dtype=torch.int64), empty(4, 2)
    reference.bgmv_shrink(empty(4, 8), empty(3, 2, 8), out, slots)
    reference.bgmv_expand(empty(4, 2), empty(3, 8, 2), empty(4, 8), slots)
    counts = empty(2, dtype=torch.int64)
    reference.sgmv_shrink(empty(4, 8), empty(3, 2, 8), out, counts, counts, counts, 2, 2, 4, 1.0)
    assert out.is_meta
    with pytest.raises(ValueError, match="hidden size 8 as in lora_a_weights"):
        reference.bgmv_shrink(empty(4, 9), empty(3, 2, 8), out, slots)


def refuse(ops, error, match, **changes):
    arguments = {
        "inputs": torch.ones(2, 4), "lora_a_weights": torch.ones(3, 2, 4), "output_tensor": torch.full((2, 2), 5.0),
        "lora_indices_tensor": torch.tensor([0, 1]), "scaling": 1.0,
    } | changes  # fmt: skip
    with pytest.raises(error, match=match):
        ops.bgmv_shrink(**arguments)
    assert (arguments["output_tensor"] == 5).all()


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        pytest.param(TypeError, "int32", {"inputs": torch.ones(2, 4, dtype=torch.int32)}, id="integer-inputs"),
        pytest.param(TypeError, "bfloat16", {"inputs": torch.ones(2, 4).bfloat16()}, id="mixed-dtypes"),
        pytest.param(ValueError, "hidden size 4 as in lora_a_weights", {"inputs": torch.ones(2, 5)}, id="hidden-size"),
        pytest.param(ValueError, "rows 3 as in inputs", {"inputs": torch.ones(3, 4)}, id="row-count"),
        pytest.param(ValueError, r"\(3, 2, 2, 4\)", {"lora_a_weights": torch.ones(3, 2, 2, 4)}, id="4-D-weights"),
        pytest.param(ValueError, r"\(2, 4\)", {"lora_a_weights": torch.ones(2, 4)}, id="2-D-weights"),
        pytest.param(ValueError, "1 entries for 2 rows", {"lora_indices_tensor": torch.tensor([0])}, id="broadcast"),
        pytest.param(ValueError, "3 entries", {"lora_indices_tensor": torch.tensor([0, 1, 1])}, id="too-many-slots"),
        pytest.param(ValueError, "slot 3", {"lora_indices_tensor": torch.tensor([0, 3])}, id="slot-too-large"),
        pytest.param(ValueError, "-2", {"lora_indices_tensor": torch.tensor([0, -2])}, id="slot-too-small"),
        pytest.param(TypeError, "float32", {"lora_indices_tensor": torch.tensor([0.0, 1.0])}, id="float-slots"),
        pytest.param(ValueError, "nan", {"scaling": float("nan")}, id="nan-scaling"),
        pytest.param(TypeError, "True", {"scaling": True}, id="bool-scaling"),
    ],
)
def test_bad_arguments_raise_and_write_nothing(ops, error, match, changes):
    refuse(ops, error, match, **changes)


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize(
    ("offset", "size", "match"),
    [(0, 4, "slice_size is 4"), (-1, 5, "slice_offset -1"), (4, 5, r"slice_offset 4 .* column 9")],
)
def test_bad_slices_raise(ops, offset, size, match):
    y = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=match):
        ops.bgmv_expand_slice(torch.ones(2, 3), torch.ones(1, 5, 3), y, torch.tensor([0, 0]), offset, size)
    assert not y.any()


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize(
    ("starts", "lengths", "tokens", "match"),
    [([0, 2], [2, 1], 4, "covers 3 rows"), ([0, 1], [2, 2], 4, "running sum"), ([0, 2], [2, 2], 5, "token_nums is 5")],
    ids=["short", "overlap", "too-many"],
)
def test_bad_segments_raise(ops, starts, lengths, tokens, match):
    x, a, out = torch.ones(4, 2), torch.ones(2, 1, 2), torch.full((4, 1), 5.0)
    parts = torch.tensor(starts), torch.tensor(lengths), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=match):
        ops.sgmv_shrink(x, a, out, *parts, 2, 2, tokens, 1.0)
    assert (out == 5).all()
