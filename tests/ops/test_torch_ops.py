"""The fast CPU operators: every layout, dtype and form against float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from punica.metadata import LoRABatch
from punica.metadata.segment_plan import Run
from punica.ops import segment_gemm
from tests.ops.helpers import assert_expanded, assert_shrunk, normal, products, random_slots
from tests.ops.step_calls import TORCH

shrink, expand = TORCH.shrink, TORCH.expand
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

LAYOUTS = {
    "distinct": list(range(7)),
    "distinct-permuted": [3, 0, 6, 1, 5, 2, 4],
    "identical": [2] * 9,
    "uniform": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3],
    "skewed": [0] * 5 + [1] * 3 + [2] * 2 + [3] + [4],
    "interleaved": [1, 0] * 6,
    "gaps": [-1, 0, 0, -1, 1, 1, -1, 5, -1],
    "one": [4],
    "none": [-1, -1, -1],
    "empty": [],
    "shuffled": random_slots(67, 6).tolist(),
    "long-segment": [1] * 130 + [0] * 3,
}

ORDERS = pytest.mark.parametrize(
    "order", [torch.clone, lambda b: b.mT.contiguous().mT], ids=["row-major", "rank-major"]
)


def run_lora(x, a, b, y, slots, scaling=0.5, offset=0, add_inputs=True, ranks=None):
    step = LoRABatch.of_slots(torch.as_tensor(slots, dtype=torch.int64))
    buffer = torch.full((len(a), x.shape[0], a[0].shape[-2]), torch.nan)
    shrink(x, a, buffer, step, scaling, lora_ranks=ranks)
    expand(buffer, b, y, step, offset, add_inputs, lora_ranks=ranks)
    return buffer


def expected_lora(buffer, b, y, slots, offset=0, add_inputs=True):
    result, slots = y.double(), torch.as_tensor(slots, dtype=torch.int64)
    for i, weight in enumerate(b):
        columns = slice(offset, offset + weight.shape[-2])
        delta = products(buffer[i], weight, slots) + (y[:, columns].double() if add_inputs else 0)
        result[:, columns] = torch.where((slots >= 0)[:, None], delta, y[:, columns].double())
        offset += weight.shape[-2]
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add_inputs", [True, False], ids=["add", "overwrite"])
def test_every_layout(layout, dtype, add_inputs):
    slots = LAYOUTS[layout]
    rows, hidden, rank, width = len(slots), 100, 20, 33
    x, y = normal(rows, hidden, dtype=dtype), normal(rows, width, dtype=dtype, seed=3)
    a = (normal(7, 1, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=1),)
    b = (normal(7, 1, width, rank, dtype=dtype, scale=rank**-0.5, seed=2),)
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots, add_inputs=add_inputs)
    assert_shrunk(buffer[0], products(x, a[0], torch.tensor(slots, dtype=torch.int64), 0.5))
    assert_expanded(y, expected_lora(buffer, b, before, slots, add_inputs=add_inputs))
    idle = torch.tensor([slot < 0 for slot in slots], dtype=torch.bool)
    assert torch.equal(y[idle], before[idle])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "rank", "num_slots"),
    [(1, 4096, 16, 1), (3, 2049, 64, 128), (128, 128, 8, 2), (33, 2048, 256, 8), (257, 16, 1, 8), (40, 4096, 16, 40)],
)
def test_sizes(dtype, rows, hidden, rank, num_slots):
    """Sizes that reach each form: one matmul, batched, tiled conversion, native 16-bit."""
    slots = random_slots(rows, num_slots, seed=5).sort().values
    x, y = normal(rows, hidden, dtype=dtype), normal(rows, hidden, dtype=dtype, seed=3)
    a = (normal(num_slots, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=1),)
    b = (normal(num_slots, hidden, rank, dtype=dtype, scale=rank**-0.5, seed=2),)
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots)
    assert_shrunk(buffer[0], products(x, a[0], slots, 0.5))
    assert_expanded(y, expected_lora(buffer, b, before, slots))


@ORDERS
@pytest.mark.parametrize("native", [True, False], ids=["native", "convert"])
@pytest.mark.parametrize("layout", ["identical", "uniform", "distinct", "long-segment"])
def test_both_bfloat16_forms_agree_with_float64(native, layout, order, monkeypatch):
    """The processor decides between the forms; this test runs both on every machine."""
    monkeypatch.setattr(segment_gemm, "_onednn_multiplies_bfloat16", lambda: native)
    slots = LAYOUTS[layout]
    rows, rank, width = len(slots), 16, 4100
    x, y = normal(rows, 64, dtype=torch.bfloat16), normal(rows, width, dtype=torch.bfloat16, seed=3)
    a = (normal(7, rank, 64, dtype=torch.bfloat16, scale=0.125, seed=1),)
    b = (order(normal(7, width, rank, dtype=torch.bfloat16, scale=0.25, seed=2)),)
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots)
    assert_expanded(y, expected_lora(buffer, b, before, slots))


@pytest.mark.parametrize("layout", ["distinct", "identical", "uniform", "interleaved"])
def test_conversion_rounds_once(layout):
    """A bfloat16 result is the rounded float64 result, up to ties where float32 sums differ: no second rounding."""
    slots = torch.tensor(LAYOUTS[layout])
    h, b = normal(len(slots), 16), normal(7, 50, 16, dtype=torch.bfloat16, scale=0.25, seed=1)
    y = normal(len(slots), 50, dtype=torch.bfloat16, seed=2)
    expected = (products(h, b, slots) + y.double()).bfloat16()
    expand(h[None], (b,), y, LoRABatch.of_slots(slots))
    assert (y != expected).float().mean() < 0.002


def test_float32_intermediate_survives_cancelling_ranks():
    """Two lanes of 1000 that cancel up to 0.25: rounding the intermediate to bfloat16 would lose the result."""
    x = torch.tensor([[1000.0, 0.25]], dtype=torch.bfloat16)
    a = torch.tensor([[[1.0, 1.0], [-1.0, 0.0]]], dtype=torch.bfloat16)
    b, y = torch.ones(1, 8, 2, dtype=torch.bfloat16), torch.zeros(1, 8, dtype=torch.bfloat16)
    run_lora(x, (a,), (b,), y, [0], scaling=1.0)
    assert (y == 0.25).all()


@pytest.mark.parametrize("layout", ["distinct", "uniform", "shuffled", "gaps"])
def test_shrink_accumulates(layout):
    slots = torch.tensor(LAYOUTS[layout])
    x, a = normal(len(slots), 40), tuple(normal(7, 6, 40, scale=0.1, seed=i) for i in range(2))
    out = normal(2, len(slots), 6, seed=9)
    before = out.clone()
    shrink(x, a, out, LoRABatch.of_slots(slots), 0.5, accumulate=True)
    for i in range(2):
        assert_shrunk(out[i], before[i].double() + products(x, a[i], slots, 0.5))
    assert torch.equal(out[:, slots < 0], before[:, slots < 0])


@pytest.mark.parametrize("widths", [(64, 16, 16), (7, 5, 3), (33,) * 8], ids=str)
@pytest.mark.parametrize("offset", [0, 17])
@pytest.mark.parametrize("layout", ["distinct", "uniform", "shuffled"])
def test_slices_and_offset(widths, offset, layout):
    slots = LAYOUTS[layout]
    x, y = normal(len(slots), 48), normal(len(slots), offset + sum(widths) + 2, seed=50)
    a = tuple(normal(7, 8, 48, scale=0.15, seed=i) for i in range(len(widths)))
    b = tuple(normal(7, width, 8, scale=0.3, seed=20 + i) for i, width in enumerate(widths))
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots, offset=offset)
    assert_expanded(y, expected_lora(buffer, b, before, slots, offset=offset))
    assert torch.equal(y[:, :offset], before[:, :offset])
    assert torch.equal(y[:, -2:], before[:, -2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["distinct", "uniform", "identical", "shuffled"])
def test_strided_inputs_and_outputs(dtype, layout):
    slots = LAYOUTS[layout]
    rows, step = len(slots), LoRABatch.of_slots(torch.tensor(slots))
    a, b = (normal(7, 4, 30, dtype=dtype, seed=1),), (normal(7, 12, 4, dtype=dtype, seed=2),)
    x = normal(rows, 30, dtype=dtype)
    strided = normal(rows, 60, dtype=dtype, seed=4)[:, ::2]
    one_row = normal(1, 30, dtype=dtype, seed=6).expand(rows, 30)
    for inputs in (x.t().contiguous().t(), strided, one_row):
        out, same = torch.empty(1, rows, 4), torch.empty(1, rows, 4)
        shrink(inputs, a, out, step)
        shrink(inputs.contiguous(), a, same, step)
        assert_shrunk(out[0], same[0].double())
    y = normal(rows, 22, dtype=dtype, seed=5)
    before = y.clone()
    h = normal(1, 4, rows, seed=7).transpose(1, 2)
    expand(h, b, y[:, 10:], step)
    assert_expanded(y[:, 10:], expected_lora(h, b, before[:, 10:], slots))
    assert torch.equal(y[:, :10], before[:, :10])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unused_slots_are_never_read(dtype):
    slots = [1, 1, -1, 3, 4, -1]
    a, b = torch.full((8, 4, 16), torch.nan, dtype=dtype), torch.full((8, 9, 4), torch.nan, dtype=dtype)
    for slot in (1, 3, 4):
        a[slot], b[slot] = normal(4, 16, dtype=dtype), normal(9, 4, dtype=dtype)
    y = torch.zeros(6, 9, dtype=dtype)
    run_lora(normal(6, 16, dtype=dtype), (a,), (b,), y, slots)
    assert torch.isfinite(y).all()
    assert y[3].any()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtype_is_free_and_inputs_may_have_the_dtype_of_b(b_dtype, out_dtype):
    slots, b = LAYOUTS["uniform"], (normal(7, 24, 8, dtype=b_dtype, scale=0.3, seed=1),)
    for h_dtype in (torch.float32, b_dtype):
        h, y = normal(1, len(slots), 8, dtype=h_dtype), normal(len(slots), 24, dtype=out_dtype, seed=2)
        before = y.clone()
        expand(h, b, y, LoRABatch.of_slots(torch.tensor(slots)))
        assert_expanded(y, expected_lora(h, b, before, slots))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shrink_into_16_bit_output(out_dtype):
    slots, x, a = torch.tensor([0, 1, -1]), normal(3, 64), normal(2, 4, 64, scale=0.125, seed=1)
    out = torch.full((1, 3, 4), torch.nan, dtype=out_dtype)
    shrink(x, (a,), out, LoRABatch.of_slots(slots))
    assert_expanded(out[0], products(x, a, slots))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [2, 0, 3, 1, 0, 2]], ids=str)
def test_true_ranks(dtype, layout):
    """Ranks 8, 20, 64 and 0 in slots of width 64; lanes beyond them are NaN and must not be read."""
    slots, width = torch.tensor(layout), 40
    ranks = torch.tensor([[8, 20, 64, 0], [64, 64, 1, 8]], dtype=torch.int32)
    a = tuple(normal(4, 64, 32, dtype=dtype, scale=0.18, seed=i) for i in range(2))
    b = tuple(normal(4, width, 64, dtype=dtype, scale=0.125, seed=8 + i) for i in range(2))
    a_true, b_true = [t.clone() for t in a], [t.clone() for t in b]
    for i in range(2):
        for slot, rank in enumerate(ranks[i].tolist()):
            a[i][slot, rank:], b[i][slot, :, rank:] = torch.nan, torch.nan
            a_true[i][slot, rank:], b_true[i][slot, :, rank:] = 0, 0
    x, y = normal(len(layout), 32, dtype=dtype), normal(len(layout), 2 * width, dtype=dtype, seed=3)
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots, ranks=ranks)
    for i in range(2):
        assert_shrunk(buffer[i], products(x, a_true[i], slots, 0.5))
    assert_expanded(y, expected_lora(buffer, b_true, before, slots))


def test_rank_zero_overwrites_with_zero():
    y = torch.full((2, 3), 7.0)
    ranks = torch.zeros(1, 1, dtype=torch.int32)
    step = LoRABatch.of_slots(torch.tensor([0, -1]))
    expand(torch.ones(1, 2, 4), (torch.ones(1, 3, 4),), y, step, 0, False, lora_ranks=ranks)
    assert y.tolist() == [[0.0] * 3, [7.0] * 3]


def test_float32_products_are_ieee():
    """TF32 or bfloat16 arithmetic would miss by 1e-3 here."""
    x, a, out = normal(4, 4096), normal(1, 8, 4096, scale=1 / 64, seed=1), torch.empty(1, 4, 8)
    shrink(x, (a,), out, LoRABatch.of_slots(torch.tensor([0] * 4)))
    assert (out[0] - products(x, a, torch.tensor([0] * 4))).abs().max() < 5e-6


def test_rows_beyond_the_plan_are_padding():
    step = LoRABatch.of_slots(torch.tensor([0, 0]))
    h, y = torch.full((1, 4, 2), torch.nan), torch.full((4, 3), 7.0)
    shrink(torch.ones(4, 5), (torch.ones(1, 2, 5),), h, step)
    assert h[0].tolist() == [[5.0, 5.0]] * 2 + [[0.0, 0.0]] * 2
    expand(h, (torch.ones(1, 3, 2),), y, step)
    assert y.tolist() == [[17.0] * 3] * 2 + [[7.0] * 3] * 2


def test_plan_keeps_grouped_rows_in_place_and_sorts_scattered_ones():
    uniform = LoRABatch.of_slots(torch.tensor(LAYOUTS["uniform"])).plan
    assert uniform.rows is None
    assert uniform.runs == (Run(0, 0, 3, 3), Run(3, 9, 1, 2))
    scattered = LoRABatch.of_slots(torch.tensor([1, -1, 0] * 8)).plan
    assert scattered.runs == (Run(0, 0, 2, 8),)
    assert scattered.rows is not None
    assert scattered.rows.tolist() == [*range(2, 24, 3), *range(0, 24, 3)]
    assert (scattered.all_active, scattered.num_tokens, scattered.max_slot) == (False, 24, 1)


@pytest.mark.parametrize(
    ("slots", "error", "match"),
    [
        ([[0]], ValueError, r"\(1, 1\)"),
        ([0.5], TypeError, "float32"),
        ([0, -2], ValueError, r"\[1\] is -2"),
    ],
    ids=["2-D", "float", "negative"],
)
def test_bad_plans_raise(slots, error, match):
    with pytest.raises(error, match=match):
        LoRABatch.of_slots(torch.tensor(slots))


GOOD = {"x": (3, 8), "a": [(2, 4, 8)], "h": (1, 3, 4), "b": [(2, 6, 4)], "y": (3, 6), "slots": [0, 1, -1]}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": [], "h": (0, 3, 4)}, "lora_a_stacked is empty"),
        ({"a": [(2, 4, 8), (2, 5, 8)], "h": (2, 3, 4)}, r"\(2, 5, 8\)"),
        ({"a": [(2, 4, 8), (3, 4, 8)], "h": (2, 3, 4)}, r"\(3, 4, 8\)"),
        ({"x": (3, 9)}, "hidden size 8 as in lora_a_stacked"),
        ({"h": (1, 2, 4)}, r"\(1, 2, 4\)"),
        ({"slots": [0] * 4}, "at least the 4 tokens"),
        ({"slots": [0, 2]}, "slot 2"),
    ],
    ids=["no-slices", "unequal-ranks", "unequal-slots", "hidden-size", "output-shape", "step-too-long", "slot"],
)
def test_bad_shrinks_raise_and_write_nothing(changes, match):
    case = GOOD | changes
    out, step = torch.full(case["h"], 5.0), LoRABatch.of_slots(torch.tensor(case["slots"]))
    weights = tuple(torch.ones(shape) for shape in case["a"])
    with pytest.raises(ValueError, match=match):
        shrink(torch.ones(case["x"]), weights, out, step)
    assert (out == 5).all()


@pytest.mark.parametrize(
    ("changes", "offset", "match"),
    [
        ({"b": []}, 0, "lora_b_stacked is empty"),
        ({"b": [(2, 6, 4), (3, 6, 4)], "h": (2, 3, 4)}, 0, r"\(3, 6, 4\)"),
        ({"h": (1, 3, 5)}, 0, r"\(1, 3, 5\), expected \(1, 3, 4\)"),
        ({"h": (2, 3, 4)}, 0, r"\(2, 3, 4\)"),
        ({}, 1, "offset_start 1"),
        ({}, -1, "offset_start -1"),
        ({"slots": [0] * 4}, 0, "at least the 4 tokens"),
    ],
    ids=["no-slices", "unequal-slices", "rank", "slice-count", "too-wide", "negative-offset", "step-too-long"],
)
def test_bad_expands_raise_and_write_nothing(changes, offset, match):
    case = GOOD | changes
    y, step = torch.full(case["y"], 5.0), LoRABatch.of_slots(torch.tensor(case["slots"]))
    weights = tuple(torch.ones(shape) for shape in case["b"])
    with pytest.raises(ValueError, match=match):
        expand(torch.ones(case["h"]), weights, y, step, offset)
    assert (y == 5).all()


@pytest.mark.parametrize(
    ("ranks", "error", "match"),
    [
        (torch.full((1, 2), 4), TypeError, "int64"),
        (torch.full((2, 2), 4, dtype=torch.int32), ValueError, r"\(2, 2\)"),
        (torch.full((1, 2), 5, dtype=torch.int32), ValueError, "5 for slot 0"),
    ],
    ids=["dtype", "shape", "too-large"],
)
def test_bad_ranks_raise_and_write_nothing(ranks, error, match):
    y, step = torch.full((3, 6), 5.0), LoRABatch.of_slots(torch.tensor([0, 1, -1]))
    with pytest.raises(error, match=match):
        expand(torch.ones(1, 3, 4), (torch.ones(2, 6, 4),), y, step, lora_ranks=ranks)
    assert (y == 5).all()


def test_slices_of_mixed_dtype_raise():
    y, step = torch.full((1, 4), 5.0), LoRABatch.of_slots(torch.tensor([0]))
    with pytest.raises(TypeError, match=r"bfloat16.*torch\.float32"):
        expand(torch.ones(2, 1, 3), (torch.ones(1, 2, 3), torch.ones(1, 2, 3).bfloat16()), y, step)
    assert (y == 5).all()


@ORDERS
@pytest.mark.parametrize("tile", [1, 200, 700, 2500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["distinct", "identical", "uniform", "long-segment"])
def test_every_way_to_tile_a_conversion(layout, dtype, tile, order, monkeypatch):
    """One tile, groups of segments with a rest, segment by segment, blocks of columns; float64 inputs stay float64."""
    monkeypatch.setattr(segment_gemm, "_TILE", tile)
    slots = LAYOUTS[layout]
    x, y = normal(len(slots), 30, dtype=dtype), normal(len(slots), 21, dtype=torch.bfloat16, seed=3)
    a = (normal(7, 5, 30, dtype=dtype, scale=0.2, seed=1),)
    b = (order(normal(7, 21, 5, dtype=dtype, scale=0.4, seed=2)),)
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots)
    assert_shrunk(buffer[0], products(x, a[0], torch.tensor(slots), 0.5))
    assert_expanded(y, expected_lora(buffer, b, before, slots))


@pytest.mark.parametrize("first", [True, False], ids=["inference-first", "normal-first"])
def test_scratch_serves_in_and_outside_of_inference_mode(first, monkeypatch):
    monkeypatch.setattr(segment_gemm, "_scratch", segment_gemm._Scratch())
    slots, b = torch.tensor([0, 0, 1]), (normal(2, 9, 4, dtype=torch.bfloat16),)
    step, h = LoRABatch.of_slots(slots), normal(1, 3, 4, seed=1)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            y = torch.zeros(3, 9, dtype=torch.bfloat16)
            expand(h, b, y, step)
            assert_expanded(y, products(h[0], b[0], slots))


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import punica.ops; "
        "assert before or 'triton' not in sys.modules; "
        "assert 'punica.ops.triton_ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors():
    import punica.ops

    with pytest.raises(AttributeError, match="no attribute 'lora_shrnk'"):
        _ = punica.ops.lora_shrnk
