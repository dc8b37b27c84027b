"""The fast CPU operators: every layout, dtype and form against float64; calls on a known step; what they refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from punica.metadata import LoRABatch
from punica.metadata.segment_plan import Run
from punica.ops import segment_gemm, torch_ops
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import LoRAWeights, Stack
from tests.ops.helpers import assert_expanded, assert_shrunk, normal, products, random_slots
from tests.ops.step_calls import TORCH

OPS, shrink, expand = TorchOps(), TORCH.shrink, TORCH.expand
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
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


def rank_major(b):
    return b.mT.contiguous().mT


def step_of(slots):
    return LoRABatch.of_slots(torch.as_tensor(slots, dtype=torch.int64))


def run_lora(x, a, b, y, slots, scaling=0.5, offset=0, add_inputs=True, ranks=None):
    buffer = torch.full((len(a), x.shape[0], a[0].shape[-2]), torch.nan)
    shrink(x, a, buffer, step_of(slots), scaling, lora_ranks=ranks)
    expand(buffer, b, y, step_of(slots), offset, add_inputs, lora_ranks=ranks)
    return buffer


def expected_lora(buffer, b, y, slots, offset=0, add_inputs=True):
    result, slots = y.double(), torch.as_tensor(slots, dtype=torch.int64)
    for i, weight in enumerate(b):
        columns = slice(offset, offset + weight.shape[-2])
        delta = products(buffer[i], weight, slots) + (y[:, columns].double() if add_inputs else 0)
        result[:, columns] = torch.where((slots >= 0)[:, None], delta, y[:, columns].double())
        offset += weight.shape[-2]
    return result


def check_lora(
    slots, hidden, rank, widths, dtype=F32, *, y_dtype=None, num_slots=7, offset=0, spare=0, add_inputs=True,
    order=torch.clone,
):  # fmt: skip
    """Run both products, and compare what is and what is not to be written."""
    slots = torch.as_tensor(slots, dtype=torch.int64)
    rows, n = len(slots), len(widths)
    x, y = normal(rows, hidden, dtype=dtype), normal(rows, offset + sum(widths) + spare, dtype=y_dtype or dtype, seed=3)
    a = [normal(num_slots, 1, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=10 + i) for i in range(n)]
    b = [order(normal(num_slots, w, rank, dtype=dtype, scale=rank**-0.5, seed=20 + i)) for i, w in enumerate(widths)]
    before = y.clone()
    buffer = run_lora(x, a, b, y, slots, offset=offset, add_inputs=add_inputs)
    for part, weight in zip(buffer, a, strict=True):
        assert_shrunk(part, products(x, weight, slots, 0.5))
    assert_expanded(y, expected_lora(buffer, b, before, slots, offset, add_inputs))
    for kept in (slots < 0, (slice(None), slice(offset)), (slice(None), slice(offset + sum(widths), None))):
        assert torch.equal(y[kept], before[kept])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "add"), [(F32, True), (BF16, False), (F16, True)], ids=["f32", "bf16-set", "f16"])
def test_every_layout(layout, dtype, add):
    check_lora(LAYOUTS[layout], 100, 20, [33], dtype, add_inputs=add, order=lambda b: b.unsqueeze(1))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "rank", "num_slots"),
    [(1, 4096, 16, 1), (3, 2049, 64, 128), (128, 128, 8, 2), (33, 2048, 256, 8), (257, 16, 1, 8), (40, 4096, 16, 40)],
)
def test_sizes_that_reach_each_form(dtype, rows, hidden, rank, num_slots):
    """One matmul, batched, tiled conversion, native 16-bit."""
    slots = random_slots(rows, num_slots, seed=5).sort().values
    check_lora(slots, hidden, rank, [hidden], dtype, num_slots=num_slots)


@pytest.mark.parametrize("native", [True, False], ids=["native", "convert"])
@pytest.mark.parametrize(("layout", "order"), [("identical", rank_major), ("uniform", torch.clone),
                                               ("distinct", rank_major), ("long-segment", torch.clone)])  # fmt: skip
def test_both_bfloat16_forms_whatever_the_processor(native, layout, order, monkeypatch):
    monkeypatch.setattr(segment_gemm, "_onednn_multiplies_bfloat16", lambda: native)
    check_lora(LAYOUTS[layout], 64, 16, [4100], BF16, order=order)


@pytest.mark.parametrize("tile", [1, 200, 700, 2500])
@pytest.mark.parametrize(("dtype", "order"), [(BF16, torch.clone), (BF16, rank_major), (F64, rank_major)])
@pytest.mark.parametrize("layout", ["distinct", "identical", "uniform", "long-segment"])
def test_every_way_to_tile_a_conversion(layout, dtype, tile, order, monkeypatch):
    """One tile, groups of segments with a rest, segment by segment, blocks of columns; float64 inputs stay float64."""
    monkeypatch.setattr(segment_gemm, "_TILE", tile)
    check_lora(LAYOUTS[layout], 30, 5, [21], dtype, y_dtype=BF16, order=order)


@pytest.mark.parametrize(
    ("widths", "offset", "layout"),
    [((64, 16, 16), 0, "distinct"), ((7, 5, 3), 17, "uniform"), ((33,) * 8, 17, "shuffled"), ((7, 5), 0, "shuffled")],
)
def test_slices_and_offset(widths, offset, layout):
    check_lora(LAYOUTS[layout], 48, 8, widths, offset=offset, spare=2)


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("h_dtype", [F32, BF16], ids=str)
def test_output_dtype_is_free_and_inputs_may_have_the_dtype_of_b(h_dtype, out_dtype):
    slots, b = LAYOUTS["uniform"], (normal(7, 24, 8, dtype=BF16, scale=0.3, seed=1),)
    h, y = normal(1, len(slots), 8, dtype=h_dtype), normal(len(slots), 24, dtype=out_dtype, seed=2)
    before = y.clone()
    expand(h, b, y, step_of(slots))
    assert_expanded(y, expected_lora(h, b, before, slots))


def test_conversion_rounds_once():
    """A bfloat16 result is the rounded float64 result, up to ties where float32 sums differ: no second rounding."""
    slots = torch.tensor(LAYOUTS["uniform"])
    h, b = normal(len(slots), 16), normal(7, 50, 16, dtype=BF16, scale=0.25, seed=1)
    y = normal(len(slots), 50, dtype=BF16, seed=2)
    expected = (products(h, b, slots) + y.double()).bfloat16()
    expand(h[None], (b,), y, step_of(slots))
    assert (y != expected).float().mean() < 0.002


def test_float32_intermediate_survives_cancelling_ranks():
    """Two lanes of 1000 that cancel up to 0.25: rounding the intermediate to bfloat16 would lose the result."""
    x = torch.tensor([[1000.0, 0.25]], dtype=BF16)
    a = torch.tensor([[[1.0, 1.0], [-1.0, 0.0]]], dtype=BF16)
    y = torch.zeros(1, 8, dtype=BF16)
    run_lora(x, (a,), (torch.ones(1, 8, 2, dtype=BF16),), y, [0], scaling=1.0)
    assert (y == 0.25).all()


def test_float32_products_are_ieee():
    """TF32 or bfloat16 arithmetic would miss by 1e-3 here."""
    x, a, out = normal(4, 4096), normal(1, 8, 4096, scale=1 / 64, seed=1), torch.empty(1, 4, 8)
    shrink(x, (a,), out, step_of([0] * 4))
    assert (out[0] - products(x, a, torch.tensor([0] * 4))).abs().max() < 5e-6


@pytest.mark.parametrize(("layout", "dtype"), [("uniform", F32), ("shuffled", F32), ("gaps", BF16), ("distinct", F16)])
def test_shrink_accumulates_into_any_dtype(layout, dtype):
    slots = torch.tensor(LAYOUTS[layout])
    x, a = normal(len(slots), 40), tuple(normal(7, 6, 40, scale=0.1, seed=i) for i in range(2))
    out = normal(2, len(slots), 6, dtype=dtype, seed=9)
    before = out.clone()
    shrink(x, a, out, step_of(slots), 0.5, accumulate=True)
    for i in range(2):
        assert_expanded(out[i], before[i].double() + products(x, a[i], slots, 0.5))
    assert torch.equal(out[:, slots < 0], before[:, slots < 0])


@pytest.mark.parametrize(("dtype", "layout"), [(F32, "uniform"), (BF16, "distinct"), (BF16, "shuffled")])
def test_strided_inputs_and_outputs(dtype, layout):
    slots = LAYOUTS[layout]
    rows, step = len(slots), step_of(slots)
    a, b = (normal(7, 4, 30, dtype=dtype, seed=1),), (normal(7, 12, 4, dtype=dtype, seed=2),)
    strided, one_row = normal(rows, 60, dtype=dtype)[:, ::2], normal(1, 30, dtype=dtype, seed=6).expand(rows, 30)
    for inputs in (normal(30, rows, dtype=dtype).t(), strided, one_row):
        out = torch.empty(1, rows, 4)
        shrink(inputs, a, out, step)
        assert_shrunk(out[0], products(inputs, a[0], torch.tensor(slots)))
    y, h = normal(rows, 22, dtype=dtype, seed=5), normal(1, 4, rows, seed=7).transpose(1, 2)
    before = y.clone()
    expand(h, b, y[:, 10:], step)
    assert_expanded(y[:, 10:], expected_lora(h, b, before[:, 10:], slots))
    assert torch.equal(y[:, :10], before[:, :10])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("layout", [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [2, 0, 3, 1, 0, 2]], ids=str)
def test_true_ranks(dtype, layout):
    """Ranks 8, 20, 64 and 0 in slots of width 64; lanes beyond them, and a slot that is not used, are NaN."""
    slots, width = torch.tensor(layout), 40
    ranks = torch.tensor([[8, 20, 64, 0, 64], [64, 64, 1, 8, 64]], dtype=torch.int32)
    a = tuple(normal(5, 64, 32, dtype=dtype, scale=0.18, seed=i) for i in range(2))
    b = tuple(normal(5, width, 64, dtype=dtype, scale=0.125, seed=8 + i) for i in range(2))
    a_true, b_true = [t.clone() for t in a], [t.clone() for t in b]
    for i in range(2):
        a[i][4], b[i][4] = torch.nan, torch.nan
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
    y, ranks = torch.full((2, 3), 7.0), torch.zeros(1, 1, dtype=torch.int32)
    expand(torch.ones(1, 2, 4), (torch.ones(1, 3, 4),), y, step_of([0, -1]), 0, False, lora_ranks=ranks)
    assert y.tolist() == [[0.0] * 3, [7.0] * 3]


def test_rows_beyond_the_plan_are_padding():
    h, y = torch.full((1, 4, 2), torch.nan), torch.full((4, 3), 7.0)
    shrink(torch.ones(4, 5), (torch.ones(1, 2, 5),), h, step_of([0, 0]))
    assert h[0].tolist() == [[5.0, 5.0]] * 2 + [[0.0, 0.0]] * 2
    expand(h, (torch.ones(1, 3, 2),), y, step_of([0, 0]))
    assert y.tolist() == [[17.0] * 3] * 2 + [[7.0] * 3] * 2


def test_plan_keeps_grouped_rows_in_place_and_sorts_scattered_ones():
    uniform = step_of(LAYOUTS["uniform"]).plan
    assert uniform.rows is None
    assert uniform.runs == (Run(0, 0, 3, 3), Run(3, 9, 1, 2))
    scattered = step_of([1, -1, 0] * 8).plan
    assert scattered.runs == (Run(0, 0, 2, 8),)
    assert scattered.rows is not None
    assert scattered.rows.tolist() == [*range(2, 24, 3), *range(0, 24, 3)]
    assert (scattered.all_active, scattered.num_tokens, scattered.max_slot) == (False, 24, 1)


# --- calls on a known step: cuts that are used again follow every change of the operands -----------------------------

SLOTS = torch.tensor([0, 0, 1, 2, 2, 3])


def factor_a(seed=1, dtype=F32):
    return normal(4, 4, 10, dtype=dtype, scale=0.3, seed=seed)


def check_shrink(step, a, x, slots=SLOTS):
    """Shrink into NaN and compare with the product over the true ranks, computed afresh."""
    out, ranks = torch.full((len(a.tensors), x.shape[0], 4), torch.nan), a.ranks
    OPS.shrink(out, x, a, step)
    for i, weight in enumerate(a.tensors):
        true = weight.clone()
        for slot in range(4):
            if ranks is not None:
                true[slot, int(ranks[i, slot]) :] = 0
        assert_shrunk(out[i], products(x, true, slots))


@pytest.mark.parametrize(("dtype", "slots"), [(F32, [0] * 6), (BF16, SLOTS.tolist()), (F32, [3, 0, 3, 0, 1, 1])])
def test_repeated_calls_see_new_activations_and_an_adapter_loaded_into_a_slot(dtype, slots):
    slots = torch.tensor(slots)
    step, a, b = step_of(slots), Stack.of_a((factor_a(dtype=dtype),)), Stack.of_b((normal(4, 9, 4, dtype=dtype),))
    for seed in range(3):
        check_shrink(step, a, normal(6, 10, dtype=dtype, seed=seed), slots)
        h, y = normal(1, 6, 4, seed=seed), torch.zeros(6, 9, dtype=dtype)
        OPS.expand(y, h, b, step)
        assert_expanded(y, products(h[0], b.tensors[0], slots))
        a.tensors[0][int(slots[0])].copy_(factor_a(9 + seed, dtype)[2])
    assert len(a.cuts) == len(b.cuts) == 1


def test_true_ranks_changed_in_place_are_seen_and_checked():
    step, x = step_of(SLOTS), normal(6, 10)
    ranks = torch.tensor([[4, 4, 4, 4], [1, 4, 2, 0]], dtype=torch.int32)
    a = Stack.of_a((factor_a(), factor_a(2)), ranks)
    for slot, rank in ((0, 4), (0, 2), (3, 0), (0, 4), (3, 4)):
        ranks[0, slot] = rank
        check_shrink(step, a, x)
    assert len(a.cuts) == 1
    ranks[0, 0], out = 5, torch.full((2, 6, 4), 7.0)
    with pytest.raises(ValueError, match="5 for slot 0"):
        OPS.shrink(out, x, a, step)
    assert (out == 7).all()


def test_other_shapes_dtypes_and_offsets_with_one_stack(monkeypatch):
    monkeypatch.setattr(torch_ops, "_MOST_CUTS", 2)
    a, b = Stack.of_a((factor_a(),)), Stack.of_b((normal(4, 9, 4, scale=0.5),))
    for step in (step_of(SLOTS), step_of(SLOTS)):
        for rows in (6, 8, 7, 6):
            check_shrink(step, a, normal(rows, 10), torch.cat([SLOTS, torch.full((rows - 6,), -1)]))
            assert len(a.cuts) <= 2
        assert a.cuts_of is step.plan
        for dtype, offset in ((BF16, 0), (BF16, 2), (F32, 1), (F32, 0)):
            y = torch.zeros(6, 12, dtype=dtype)
            OPS.expand(y, normal(1, 6, 4), b, step, offset)
            assert_expanded(y[:, offset : offset + 9], products(normal(6, 4), b.tensors[0], SLOTS))
            assert not y[:, :offset].any()


@pytest.mark.parametrize("first", [True, False], ids=["inference-first", "normal-first"])
def test_scratch_serves_in_and_outside_of_inference_mode(first, monkeypatch):
    monkeypatch.setattr(segment_gemm, "_scratch", segment_gemm._Scratch())
    slots, b = torch.tensor([0, 0, 1]), (normal(2, 9, 4, dtype=BF16),)
    h = normal(1, 3, 4, seed=1)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            y = torch.zeros(3, 9, dtype=BF16)
            expand(h, b, y, step_of(slots))
            assert_expanded(y, products(h[0], b[0], slots))


# --- refusals --------------------------------------------------------------------------------------------------------

GOOD = {"x": torch.ones(3, 8), "a": [torch.ones(2, 4, 8)], "h": torch.full((1, 3, 4), 5.0), "b": [torch.ones(2, 6, 4)],
        "y": torch.full((3, 6), 5.0), "slots": [0, 1, -1], "scale": 1.0, "offset": 0, "ranks": None}  # fmt: skip
ONES = torch.ones
BAD_SHRINKS = {
    "no-slices": ({"a": []}, ValueError, "lora_a_stacked is empty"),
    "unequal-ranks": ({"a": [ONES(2, 4, 8), ONES(2, 5, 8)]}, ValueError, r"\(2, 5, 8\).*rank 4"),
    "unequal-slots": ({"a": [ONES(2, 4, 8), ONES(3, 4, 8)]}, ValueError, r"\(3, 4, 8\).*slots 2"),
    "hidden-size": ({"x": ONES(3, 9)}, ValueError, r"x .*\(3, 9\).*hidden size 8 as in lora_a_stacked"),
    "output-shape": ({"h": torch.full((1, 2, 4), 5.0)}, ValueError, r"y .*\(1, 2, 4\).*rows 3 as in x"),
    "dtype": ({"x": ONES(3, 8).bfloat16()}, TypeError, "bfloat16"),
    "step-too-long": ({"slots": [0] * 4}, ValueError, "at least the 4 tokens"),
    "slot": ({"slots": [0, 2]}, ValueError, "slot 2"),
    "nan": ({"scale": float("nan")}, ValueError, "nan"),
    "bool": ({"scale": True}, TypeError, "bool"),
}
BAD_EXPANDS = {
    "no-slices": ({"b": []}, ValueError, "lora_b_stacked is empty"),
    "unequal-slices": ({"b": [ONES(2, 6, 4), ONES(3, 6, 4)]}, ValueError, r"\(3, 6, 4\)"),
    "mixed-dtypes": ({"b": [ONES(2, 6, 4), ONES(2, 6, 4).bfloat16()]}, TypeError, r"bfloat16.*torch\.float32"),
    "rank": ({"h": ONES(1, 3, 5)}, ValueError, r"\(1, 3, 5\), expected \(1, 3, 4\).*rank 4 as in lora_b_stacked"),
    "slice-count": ({"h": ONES(2, 3, 4)}, ValueError, r"\(2, 3, 4\).*slices 1 as in lora_b_stacked"),
    "too-wide": ({"offset": 1}, ValueError, "offset_start 1.* column 7"),
    "negative-offset": ({"offset": -1}, ValueError, "offset_start -1"),
    "step-too-long": ({"slots": [0] * 4}, ValueError, "at least the 4 tokens"),
    "ranks-dtype": ({"ranks": torch.full((1, 2), 4)}, TypeError, "int64"),
    "ranks-shape": ({"ranks": torch.full((2, 2), 4, dtype=torch.int32)}, ValueError, r"\(2, 2\).*slices 1"),
    "rank-too-large": ({"ranks": torch.full((1, 2), 5, dtype=torch.int32)}, ValueError, "5 for slot 0"),
}


@pytest.mark.parametrize("name", BAD_SHRINKS)
def test_bad_shrinks_raise_and_write_nothing(name):
    changes, error, match = BAD_SHRINKS[name]
    case = GOOD | changes
    with pytest.raises(error, match=match):
        shrink(case["x"], case["a"], case["h"], step_of(case["slots"]), case["scale"])
    assert (case["h"] == 5).all()


@pytest.mark.parametrize("name", BAD_EXPANDS)
def test_bad_expands_raise_and_write_nothing(name):
    changes, error, match = BAD_EXPANDS[name]
    case = GOOD | changes
    with pytest.raises(error, match=match):
        expand(case["h"], case["b"], case["y"], step_of(case["slots"]), case["offset"], lora_ranks=case["ranks"])
    assert (case["y"] == 5).all()


def test_a_call_is_checked_also_after_a_good_one():
    step, a, out = step_of(SLOTS), Stack.of_a((factor_a(),)), torch.empty(1, 6, 4)
    OPS.shrink(out, torch.ones(6, 10), a, step)
    before = out.clone()
    for x, scale, error in ((torch.ones(6, 9), 1.0, ValueError), (torch.ones(5, 10), 1.0, ValueError),
                            (torch.ones(6, 10).bfloat16(), 1.0, TypeError), (torch.ones(6, 10), torch.nan, ValueError),
                            ([1.0], 1.0, TypeError)):  # fmt: skip
        with pytest.raises(error):
            OPS.shrink(out, x, a, step, scale)
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("b", "error", "match"),
    [
        (ONES(2, 6, 3), ValueError, "rank 4, lora_b_stacked rank 3"),
        (ONES(3, 6, 4), ValueError, "2 slots, lora_b_stacked 3"),
        (ONES(2, 6, 4).half(), TypeError, "float16"),
        (ONES(2, 6, 4, device="meta"), ValueError, "on cpu.*meta"),
    ],
    ids=["rank", "slots", "dtype", "device"],
)
def test_factors_that_do_not_fit_together(b, error, match):
    with pytest.raises(error, match=match):
        LoRAWeights.of((ONES(2, 4, 8),), (b,))


@pytest.mark.parametrize(
    ("slots", "error", "match"),
    [([[0]], ValueError, r"\(1, 1\)"), ([0.5], TypeError, "float32"), ([0, -2], ValueError, r"\[1\] is -2")],
    ids=["2-D", "float", "negative"],
)
def test_bad_plans_raise(slots, error, match):
    with pytest.raises(error, match=match):
        LoRABatch.of_slots(torch.tensor(slots))


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import punica.ops; "
        "assert before or 'triton' not in sys.modules; assert 'punica.ops.triton_ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors():
    import punica.ops

    with pytest.raises(AttributeError, match="lora_shrnk"):
        _ = punica.ops.lora_shrnk
