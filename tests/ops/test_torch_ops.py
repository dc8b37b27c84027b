"""The fast CPU operators: every layout, dtype and form against float64; calls on a known step; what they refuse."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from punica.metadata import LoRABatch
from punica.metadata.segment_plan import Run
from punica.ops import segment_gemm, torch_ops
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import Stack
from tests.ops.helpers import TORCH, assert_close, assert_shrunk, normal, products, random_slots

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


def check_lora(
    slots, hidden, rank, widths, dtype=F32, *, y_dtype=None, num_slots=7, offset=0, spare=0, add_inputs=True,
    order=torch.clone, ranks=None,
):  # fmt: skip
    """Run both products. Slots that are not used, and lanes beyond a true rank, are NaN in the operands."""
    slots = torch.as_tensor(slots, dtype=torch.int64)
    rows, n = len(slots), len(widths)
    x, y = normal(rows, hidden, dtype=dtype), normal(rows, offset + sum(widths) + spare, dtype=y_dtype or dtype, seed=3)
    a = [normal(num_slots, 1, rank, hidden, dtype=dtype, scale=hidden**-0.5, seed=10 + i) for i in range(n)]
    b = [normal(num_slots, w, rank, dtype=dtype, scale=rank**-0.5, seed=20 + i) for i, w in enumerate(widths)]
    a_read, b_read = [w.clone() for w in a], [w.clone() for w in b]
    for i, slot in itertools.product(range(n), range(num_slots)):
        true = 0 if not (slots == slot).any() else rank if ranks is None else int(ranks[i, slot])
        a[i][slot, :, true:], b[i][slot, :, true:] = 0, 0
        a_read[i][slot, :, true:], b_read[i][slot, :, true:] = torch.nan, torch.nan
    before, expected = y.clone(), y.double()
    buffer = run_lora(x, a_read, [order(w) for w in b_read], y, slots, 0.5, offset, add_inputs, ranks)
    for low, one_a, one_b in zip(buffer, a, b, strict=True):
        assert_shrunk(low, products(x, one_a, slots, 0.5))
        target = expected[:, offset : offset + one_b.shape[1]]
        target[slots >= 0] = (products(low, one_b, slots) + (target if add_inputs else 0))[slots >= 0]
        offset += one_b.shape[1]
    assert_close(y, expected)
    first = offset - sum(widths)
    for kept in (slots < 0, (slice(None), slice(first)), (slice(None), slice(offset, None))):
        assert torch.equal(y[kept], before[kept])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "y_dtype", "add"), [(F32, F32, True), (BF16, F32, False), (F16, BF16, True)], ids=["f32", "bf16", "f16"]
)
def test_every_layout(layout, dtype, y_dtype, add):
    check_lora(LAYOUTS[layout], 100, 20, [33], dtype, y_dtype=y_dtype, add_inputs=add, order=lambda b: b.unsqueeze(1))


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
@pytest.mark.parametrize(
    ("layout", "dtype", "order"),
    [("distinct", BF16, torch.clone), ("identical", F64, rank_major), ("uniform", BF16, rank_major),
     ("long-segment", F64, torch.clone)],
)  # fmt: skip
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


@pytest.mark.parametrize(("dtype", "add"), [(F32, True), (BF16, False), (F16, True)], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("layout", [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [2, 0, 3, 1, 0, 2]], ids=str)
def test_true_ranks(dtype, add, layout):
    ranks = torch.tensor([[8, 20, 64, 0], [64, 64, 1, 8]], dtype=torch.int32)
    check_lora(layout, 32, 64, [40, 40], dtype, num_slots=4, add_inputs=add, ranks=ranks)


def test_conversion_rounds_once_whatever_the_dtype_of_the_intermediate():
    """A bfloat16 result is the rounded float64 result, up to ties where float32 sums differ: no second rounding."""
    slots, b = torch.tensor(LAYOUTS["uniform"]), normal(7, 50, 16, dtype=BF16, scale=0.25, seed=1)
    for dtype in (F32, BF16):
        h, y = normal(len(slots), 16, dtype=dtype), normal(len(slots), 50, dtype=BF16, seed=2)
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
        assert_close(out[i], before[i].double() + products(x, a[i], slots, 0.5))
    assert torch.equal(out[:, slots < 0], before[:, slots < 0])


@pytest.mark.parametrize(("dtype", "layout"), [(F32, "uniform"), (BF16, "distinct"), (BF16, "shuffled")])
def test_strided_operands(dtype, layout):
    slots = torch.tensor(LAYOUTS[layout])
    rows, step, a, b = len(slots), step_of(slots), normal(7, 4, 30, dtype=dtype), normal(7, 12, 4, dtype=dtype, seed=2)
    strided, one_row = normal(rows, 60, dtype=dtype)[:, ::2], normal(1, 30, dtype=dtype, seed=6).expand(rows, 30)
    for inputs in (normal(30, rows, dtype=dtype).t(), strided, one_row):
        out = torch.empty(1, rows, 4)
        shrink(inputs, (a,), out, step)
        assert_shrunk(out[0], products(inputs, a, slots))
    y, h = normal(rows, 22, dtype=dtype, seed=5), normal(1, 4, rows, seed=7).transpose(1, 2)
    before = y.clone()
    expand(h, (b,), y[:, 10:], step)
    assert_close(y[:, 10:], before[:, 10:].double() + products(h[0], b, slots))
    assert torch.equal(y[:, :10], before[:, :10])


def test_plan_keeps_grouped_rows_in_place_and_sorts_scattered_ones():
    uniform = step_of(LAYOUTS["uniform"]).plan
    assert uniform.rows is None
    assert uniform.runs == (Run(0, 0, 3, 3), Run(3, 9, 1, 2))
    scattered = step_of([1, -1, 0] * 8).plan
    assert scattered.runs == (Run(0, 0, 2, 8),)
    assert scattered.rows is not None
    assert scattered.rows.tolist() == [*range(2, 24, 3), *range(0, 24, 3)]
    assert (scattered.all_active, scattered.num_tokens, scattered.max_slot) == (False, 24, 1)

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
        assert_close(y, products(h[0], b.tensors[0], slots))
        a.tensors[0][int(slots[0])].copy_(factor_a(9 + seed, dtype)[2])
    assert len(a.cuts[1]) == len(b.cuts[1]) == 1


def test_true_ranks_changed_in_place_are_seen_and_checked():
    step, x = step_of(SLOTS), normal(6, 10)
    ranks = torch.tensor([[4, 4, 4, 4], [1, 4, 2, 0]], dtype=torch.int32)
    a = Stack.of_a((factor_a(), factor_a(2)), ranks)
    for slot, rank in ((0, 4), (0, 2), (3, 0), (0, 4), (3, 4)):
        ranks[0, slot] = rank
        check_shrink(step, a, x)
    assert len(a.cuts[1]) == 1
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
            assert len(a.cuts[1]) <= 2
        assert a.cuts[0] is step.plan
        for dtype, offset in ((BF16, 0), (BF16, 2), (F32, 1), (F32, 0)):
            y = torch.zeros(6, 12, dtype=dtype)
            OPS.expand(y, normal(1, 6, 4), b, step, offset)
            assert_close(y[:, offset : offset + 9], products(normal(6, 4), b.tensors[0], SLOTS))
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
            assert_close(y, products(h[0], b[0], slots))

ONES = torch.ones
INT = torch.int32
GOOD = {"x": ONES(3, 8), "a": [ONES(2, 4, 8)], "h": ONES(1, 3, 4), "b": [ONES(2, 6, 4)], "slots": [0, 1, -1],
        "scale": 1.0, "offset": 0, "ranks": None}  # fmt: skip
BAD = [
    ("shrink", {"a": []}, ValueError, "lora_a_stacked is empty"),
    ("shrink", {"slots": [0] * 4}, ValueError, "at least the 4 tokens"),
    ("shrink", {"slots": [0, 2]}, ValueError, "slot 2"),
    ("expand", {"h": ONES(1, 3, 5)}, ValueError, r"x .*\(1, 3, 5\), expected \(1, 3, 4\).*as in lora_b_stacked"),
    ("expand", {"h": ONES(1, 2, 4)}, ValueError, r"x .*\(1, 2, 4\).*rows 3 as in y"),
    ("expand", {"offset": torch.tensor(0)}, TypeError, "offset_start must be an int, got Tensor"),
    ("expand", {"offset": 1}, ValueError, "offset_start 1.* column 7"),
    ("expand", {"ranks": ONES(2, 2, dtype=INT)}, ValueError, r"lora_ranks .*\(2, 2\).*slices 1"),
    ("expand", {"ranks": torch.full((1, 2), 5, dtype=INT)}, ValueError, "5 for slot 0"),
]


@pytest.mark.parametrize(("op", "changes", "error", "match"), BAD)
def test_bad_calls_raise_and_write_nothing(op, changes, error, match):
    case = GOOD | changes
    out, step = torch.full((1, 3, 4) if op == "shrink" else (3, 6), 5.0), step_of(case["slots"])
    calls = {
        "shrink": lambda: shrink(case["x"], case["a"], out, step, case["scale"]),
        "expand": lambda: expand(case["h"], case["b"], out, step, case["offset"], lora_ranks=case["ranks"]),
    }
    with pytest.raises(error, match=match):
        calls[op]()
    assert (out == 5).all()


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


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["inputs", "weights", "output"])
def test_what_requires_a_gradient_is_refused_and_leaves_no_graph_in_memory_of_later_calls(dtype, which):
    slots, a, b = torch.tensor([1, 0, -1]), normal(2, 8, 16, dtype=dtype), normal(2, 24, 8, dtype=dtype)
    for op, weights, x, width in (
        (torch_ops.bgmv_shrink, a, normal(3, 16, dtype=dtype), 8), (torch_ops.bgmv_expand, b, normal(3, 8), 24)
    ):  # fmt: skip
        given = [x, weights, torch.zeros(3, width)]
        training = [*given]
        training[which] = given[which].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"torch.no_grad\(\); lora_linear trains"):
            op(*training, slots)
        with torch.no_grad():
            op(*training, slots)
        op(*given, slots)
        assert torch.equal(given[2], training[2])


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import punica.ops; "
        "assert before or 'triton' not in sys.modules; assert 'punica.ops.triton_ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
