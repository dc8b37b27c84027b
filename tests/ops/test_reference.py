"""The operators named after the paper's, of the oracle and of the fast path, against float64 row by row."""

from __future__ import annotations

import pytest
import torch

from punica.metadata import compute_meta
from punica.ops import reference, torch_ops
from tests.ops.helpers import assert_close, assert_shrunk, normal, products, random_slots

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[reference, torch_ops], ids=["reference", "torch_ops"])
def ops(request):
    return request.param


def segments(slots: torch.Tensor) -> tuple:
    return compute_meta(slots)[:6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "rank", "num_slots"), [(1, 16, 1, 1), (3, 100, 20, 8), (33, 128, 16, 2), (16, 2049, 4, 128)]
)
def test_shrink_by_row_and_by_segment(ops, dtype, rows, hidden, rank, num_slots):
    slots = random_slots(rows, num_slots)
    x = normal(rows, hidden, dtype=dtype)
    a = normal(num_slots, 1, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=1)
    per_token, per_segment = torch.full((rows, rank + 1), 7.0), torch.full((rows, rank + 1), 7.0)
    ops.bgmv_shrink(x, a, per_token, slots, 0.5)
    ops.sgmv_shrink(x, a, per_segment, *segments(slots), 0.5)
    assert_shrunk(per_token[:, :-1], products(x, a, slots, 0.5))
    assert (per_token[:, -1] == 7).all()
    assert torch.equal(per_token, per_segment)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add_inputs", [True, False], ids=["add", "overwrite"])
@pytest.mark.parametrize("width", [70, 100, 103], ids=["narrower", "equal", "wider"])
def test_expand_by_row_and_by_segment(ops, dtype, add_inputs, width):
    rows, rank, columns = 33, 20, min(width, 100)
    slots = random_slots(rows, 5, seed=3)
    h, b = normal(rows, rank), normal(5, 100, rank, dtype=dtype, scale=rank**-0.5, seed=1)
    start = normal(rows, width, dtype=dtype, seed=2)
    expected = start.double()
    expected[:, :columns] = products(h, b, slots)[:, :columns] + (start[:, :columns].double() if add_inputs else 0)
    expected[slots < 0] = start[slots < 0].double()
    per_token, per_segment = start.clone(), start.clone()
    ops.bgmv_expand(h, b, per_token, slots, add_inputs)
    ops.sgmv_expand(h, b, per_segment, *segments(slots), add_inputs)
    assert_close(per_token, expected)
    assert torch.equal(per_token, per_segment)
    assert torch.equal(per_token[slots < 0], start[slots < 0])


def test_expand_slice_writes_its_columns_only(ops):
    slots = torch.tensor([1, -1, 0, 1])
    h, b, start = normal(4, 3), normal(2, 5, 3, seed=1), normal(4, 12, seed=2)
    per_token, per_segment = start.clone(), start.clone()
    ops.bgmv_expand_slice(h, b, per_token, slots, 4, 5)
    ops.sgmv_expand_slice(h, b, per_segment, *segments(slots), 4, 5, True)
    expected = start.double()
    expected[:, 4:9] += products(h, b, slots)
    assert_close(per_token, expected)
    assert torch.equal(per_token, per_segment)
    outside = [0, 1, 2, 3, 9, 10, 11]
    assert torch.equal(per_token[:, outside], start[:, outside])


def test_rows_beyond_the_segments_are_padding(ops):
    x, a, out = torch.ones(4, 2), torch.ones(1, 1, 2), torch.full((4, 1), torch.nan)
    ops.sgmv_shrink(x, a, out, torch.tensor([0]), torch.tensor([2]), torch.tensor([0]), 1, 2, 2, 1.0)
    assert out.flatten().tolist() == [2.0, 2.0, 0.0, 0.0]


def test_float64_is_computed_in_float64(ops):
    slots, x, a = torch.tensor([0, 0]), normal(2, 300, dtype=torch.float64), normal(1, 2, 300, dtype=torch.float64)
    out = torch.empty(2, 2, dtype=torch.float64)
    ops.bgmv_shrink(x, a, out, slots)
    torch.testing.assert_close(out, products(x, a, slots), rtol=1e-13, atol=1e-13)


def test_meta_tensors_are_checked_and_not_computed():
    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    slots, counts = empty(4, dtype=torch.int64), empty(2, dtype=torch.int64)
    reference.bgmv_expand(empty(4, 2), empty(3, 8, 2), empty(4, 8), slots)
    reference.sgmv_shrink(empty(4, 8), empty(3, 2, 8), empty(4, 2), counts, counts, counts, 2, 2, 4, 1.0)
    with pytest.raises(ValueError, match="hidden size 8 as in lora_a_weights"):
        reference.bgmv_shrink(empty(4, 9), empty(3, 2, 8), empty(4, 2), slots)


ONES, tensor = torch.ones, torch.tensor
BAD = {
    "mixed-dtypes": ("inputs", ONES(2, 4).bfloat16(), TypeError, "bfloat16"),
    "hidden-size": ("inputs", ONES(2, 5), ValueError, "hidden size 4 as in lora_a_weights"),
    "row-count": ("inputs", ONES(3, 4), ValueError, "rows 3 as in inputs"),
    "4-D-weights": ("lora_a_weights", ONES(3, 2, 2, 4), ValueError, r"\(3, 2, 2, 4\)"),
    "narrow-output": ("lora_a_weights", ONES(3, 3, 4), ValueError, "2 columns.* 3"),
    "broadcast": ("lora_indices_tensor", tensor([0]), ValueError, "1 entries for 2 rows"),
    "too-many-slots": ("lora_indices_tensor", tensor([0, 1, 1]), ValueError, "3 entries"),
    "slot-too-large": ("lora_indices_tensor", tensor([0, 3]), ValueError, "slot 3"),
    "slot-too-small": ("lora_indices_tensor", tensor([0, -2]), ValueError, "-2"),
    "float-slots": ("lora_indices_tensor", tensor([0.0, 1.0]), TypeError, "float32"),
    "bool-scaling": ("scaling", True, TypeError, "True"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_and_write_nothing(ops, name):
    changed, value, error, match = BAD[name]
    output = torch.full((2, 2), 5.0)
    given = {"inputs": ONES(2, 4), "lora_a_weights": ONES(3, 2, 4), "output_tensor": output,
             "lora_indices_tensor": tensor([0, 1]), "scaling": 1.0}  # fmt: skip
    with pytest.raises(error, match=match):
        ops.bgmv_shrink(**given | {changed: value})
    assert (output == 5).all()


@pytest.mark.parametrize(("offset", "size", "match"), [(0, 4, "4.* 5"), (-1, 5, "-1"), (4, 5, "column 9.* 8 columns")])
def test_bad_slices_raise(ops, offset, size, match):
    y = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=match):
        ops.bgmv_expand_slice(ONES(2, 3), ONES(1, 5, 3), y, tensor([0, 0]), offset, size)
    assert not y.any()


@pytest.mark.parametrize(
    ("starts", "lengths", "tokens", "match"),
    [
        ([0, 2], [2, 1], 4, "sum 3"), ([0, 1], [2, 2], 4, "running sum"), ([0, 2], [2, 2], 5, "token_nums is 5"),
        ([0, 5], [5, -1], 4, ">= 0"),
    ],
    ids=["short", "overlap", "too-many", "negative"],
)
def test_bad_segments_raise(ops, starts, lengths, tokens, match):
    out = torch.full((4, 1), 5.0)
    with pytest.raises(ValueError, match=match):
        ops.sgmv_shrink(
            ONES(4, 2), ONES(2, 1, 2), out, tensor(starts), tensor(lengths), tensor([0, 1]), 2, 2, tokens, 1.0
        )
    with pytest.raises(TypeError, match="inputs must be a tensor, got list"):
        ops.sgmv_shrink([1.0], ONES(2, 1, 2), out, tensor([0]), tensor([4]), tensor([0]), 1, 4, 4, 1.0)
    assert (out == 5).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
def test_segments_of_every_integer_dtype(ops, dtype):
    x, a, out = normal(300, 4), normal(3, 2, 4, seed=1), torch.empty(300, 2)
    starts, lengths, slots = tensor([0, 100, 200]), tensor([100] * 3, dtype=dtype), tensor([2, -1, 0], dtype=dtype)
    ops.sgmv_shrink(x, a, out, starts, lengths, slots, 3, 100, 300, 1.0)
    assert_shrunk(out, products(x, a, slots.long().repeat_interleave(lengths.long()), 1.0))
