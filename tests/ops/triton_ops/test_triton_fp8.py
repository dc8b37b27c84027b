"""The FP8 kernels against float64: modes, forms, layouts, true ranks, and what they must not touch or accept."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp8_case import Case
from triton_batches import EXPANDS, SHRINKS, Batch, assert_close, linear, shrink

from punica.metadata import LoRAKernelMeta
from punica.ops.scales import PER_CHANNEL, Scheme
from punica.ops.triton_ops import lora_expand, lora_expand_fp8, lora_linear, lora_shrink, lora_shrink_fp8
from tests.ops.fp8_batches import E4M3, E5M2, MODES, Stack, by_ranks, fp8, product, real_rows, step

SLOTS = [1, -1, 0, 2, 2, 0, -1]
FP16, FP32 = torch.float16, torch.float32
PROMPT = [2] * 41 + [0, 1, -1, 1, 0, 1, 0]
STEP_SHRINKS = SHRINKS | {"left": SHRINKS["tiles"]._replace(swap_ab=True), "deep": SHRINKS["tiles"]}
STEP_EXPANDS = EXPANDS | {"left": EXPANDS["tiles"]._replace(swap_ab=True)}


def flat(slots: list[int], device: str, slot_count: int = 3) -> tuple:
    """The seven arguments of the metadata."""
    meta = LoRAKernelMeta.make(slot_count, max(1, len(slots)), device)
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64))
    return meta.meta_args(len(slots), True)


def stacks(shapes: list[tuple[int, int]], mode: dict[str, Any], device: str, dtype: torch.dtype = E4M3) -> list[Stack]:
    return [Stack.random(3, n, k, mode, dtype, device) for n, k in shapes]


def activations(shape: tuple[int, ...], k: int, mode: dict[str, Any], w8a8: bool, device: str) -> tuple:
    """x, its scales (or None), and the switch."""
    if not w8a8:
        return torch.randn(shape).half().to(device), None
    groups = -(-k // mode["group_k"]) if mode.get("group_k") else 1
    return fp8(shape, E4M3).to(device), (torch.rand(shape[-2], groups) + 0.1).to(device)


@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
@pytest.mark.parametrize(("form", "slices"), [("rows", 1), ("tiles", 2)])
@pytest.mark.parametrize("mode", MODES)
def test_shrink(mode, form, slices, w8a8, device, use_schedules):
    use_schedules(shrink=SHRINKS[form])
    given = MODES[mode]
    a = stacks([(20, 200)] * slices, given, device)
    x, a_scale = activations((7, 200), 200, given, w8a8, device)
    y = torch.full((slices, 7, 20), float("nan"), device=device)
    lora_shrink_fp8(
        x, [s.stored for s in a], y, *flat(SLOTS, device), 0.5, [s.scale for s in a], a_scale,
        use_fp8_w8a8=w8a8, **given,
    )  # fmt: skip
    rows = real_rows(x, a_scale, given)
    expected = torch.stack([0.5 * product(rows, s.real(), SLOTS, None, True) for s in a])
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
@pytest.mark.parametrize(
    ("form", "widths"),
    [("rows", (33, 40)), ("tiles", (33, 70)), ("walk", (150,)), ("deep", (70,))],
)
@pytest.mark.parametrize("mode", MODES)
def test_expand(mode, form, widths, w8a8, device, use_schedules):
    use_schedules(expand=EXPANDS[form])
    given = MODES[mode]
    b = stacks([(n, 40) for n in widths], given, device)
    x, a_scale = activations((len(widths), 7, 40), 40, given, w8a8, device)
    before = torch.randn(7, 250).half().to(device)
    y = before.clone()
    lora_expand_fp8(
        x, [by_ranks(s.stored) for s in b], y, *flat(SLOTS, device), [s.scale for s in b], a_scale, 10, True,
        use_fp8_w8a8=w8a8, **given,
    )  # fmt: skip
    deltas = [product(real_rows(x[i], a_scale, given), s.real(), SLOTS, None, False) for i, s in enumerate(b)]
    end, expected = 10 + sum(widths), before.cpu().double()
    expected[:, 10:end] += torch.cat(deltas, 1)
    assert_close(y, expected, FP16)
    bare = torch.tensor(SLOTS) < 0
    assert torch.equal(y[bare], before[bare])
    assert torch.equal(y[:, :10], before[:, :10])
    assert torch.equal(y[:, end:], before[:, end:])


@pytest.mark.parametrize("shrink", SHRINKS)
@pytest.mark.parametrize(("weights", "values"), [(E5M2, E4M3), (E5M2, E5M2), (E4M3, E5M2)], ids=str)
def test_formats(weights, values, shrink, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink], expand=EXPANDS["tiles" if shrink == "tiles" else "rows"])
    a, b = (
        stacks([(20, 100)] * 2, MODES["channel"], device, weights),
        stacks([(50, 20)] * 2, MODES["channel"], device, weights),
    )
    x, scale = fp8((7, 100), values).to(device), torch.tensor(0.25, device=device)
    h = torch.empty(2, 7, 20, device=device)
    switches = {"use_fp8_w8a8": True, "per_channel_quant": True}
    lora_shrink_fp8(x, [s.stored for s in a], h, *flat(SLOTS, device), 1.0, [s.scale for s in a], scale, **switches)
    rows = real_rows(x, scale, {})
    expected = torch.stack([product(rows, s.real(), SLOTS, None, True) for s in a])
    torch.testing.assert_close(h.cpu().double(), expected, rtol=1e-3, atol=1e-3)
    low, y = h.to(values), torch.zeros(7, 100, device=device)
    lora_expand_fp8(low, [s.stored for s in b], y, *flat(SLOTS, device), [s.scale for s in b], scale, **switches)
    deltas = [product(real_rows(low[i], scale, {}), s.real(), SLOTS, None, False) for i, s in enumerate(b)]
    torch.testing.assert_close(y.cpu().double(), torch.cat(deltas, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "mode", "slots"),
    [
        *((form, "channel", SLOTS) for form in ("rows", "tiles", "left")),
        *((form, "32 x r", SLOTS) for form in ("rows", "left")),
        ("tiles", "channel", PROMPT),
    ],
)
def test_linear_on_a_step(form, mode, slots, device, use_schedules):
    expand = "walk" if form == "tiles" else form
    use_schedules(shrink=STEP_SHRINKS[form], expand=STEP_EXPANDS[expand])
    case = Case(slots, (96, 40), 20, [20, 20, 20], device, mode=mode, k=300)
    case.check(case.run(lora_ranks=None))


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("form", ["rows", "tiles", "deep", "left"])
@pytest.mark.parametrize(("by_rows", "width"), [(False, 152), (False, 150), (True, 150)], ids=str)
def test_true_ranks_and_poison(by_rows, width, form, rank, device, use_schedules):
    """Neither other slots nor lanes beyond a rank nor their scales are read, by the kernels of wide weights (B by ranks
    in words) or by FP8's own.
    """
    use_schedules(shrink=STEP_SHRINKS[form], expand=STEP_EXPANDS[form])
    case = Case([0, 1, 0, -1, 1] + [0] * 20, (width,), rank, [5, 0], device, k=100, by_rows=by_rows)
    y = case.run()
    case.check(y)
    assert torch.equal(y[[1, 4]], case.before[[1, 4]])


@pytest.mark.parametrize("layout", ["stride 0", "4 dimensions", "gaps"])
def test_any_strides_of_scales(layout, device):
    a = stacks([(20, 100)] * 2, MODES["channel"], device)
    for stack in a:
        if layout == "stride 0":
            stack.scale = stack.scale[:, :1].expand(3, 20)
        elif layout == "gaps":
            stack.scale = torch.stack([stack.scale, stack.scale + 9], -1)[..., 0]
    scales = [s.scale[:, None] if layout == "4 dimensions" else s.scale for s in a]
    x, y = fp8((7, 100), E4M3).to(device), torch.empty(2, 7, 20, device=device)
    a_scale = torch.rand(1, device=device).expand(7)
    lora_shrink_fp8(
        x, [s.stored for s in a], y, *flat(SLOTS, device), 1.0, scales, a_scale,
        use_fp8_w8a8=True, per_channel_quant=True,
    )  # fmt: skip
    expected = torch.stack([product(real_rows(x, a_scale, {}), s.real(), SLOTS, None, True) for s in a])
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_plain_mode_is_the_plain_operator(device):
    batch = Batch(SLOTS, 100, (50, 30), 20, 3, FP16, device)
    h, same_h = torch.empty(2, 7, 20, device=device), torch.empty(2, 7, 20, device=device)
    count = batch.count["num_active_loras"]
    lora_shrink_fp8(batch.x, batch.a, h, *batch.args, count, 0.5, [])
    lora_shrink(batch.x, batch.a, same_h, *batch.args, 0.5, **batch.count)
    assert torch.equal(h, same_h)
    y, z = batch.y.clone(), batch.y.clone()
    lora_expand_fp8(h, batch.b, y, *batch.args, count, None, add_inputs=True)
    lora_expand(h, batch.b, z, *batch.args, **batch.count, add_inputs=True)
    assert torch.equal(y, z)


def test_nothing_to_do(device):
    a = stacks([(20, 100)], MODES["channel"], device)[0]
    x, y = torch.randn(2, 100).half().to(device), torch.full((1, 2, 20), 7.0, device=device)
    lora_shrink_fp8(x, [a.stored], y, *flat([-1, -1], device), 1.0, [a.scale], per_channel_quant=True)
    assert (y == 7).all()
    shrink(x[:0], [a.stored], y[:, :0], step([], device), b_scale=[a.scale], scheme=PER_CHANNEL)
    shrink(x, [a.stored], y, step([-1, -1], device), b_scale=[a.scale], scheme=PER_CHANNEL)
    assert (y == 0).all()


def test_schemes_of_both(device):
    a, b = stacks([(16, 64)], MODES["channel"], device)[0], stacks([(40, 16)], MODES["channel"], device)[0]
    meta = flat([0, 1], device)[:-1]
    y, x = torch.zeros(2, 40, dtype=FP16, device=device), torch.randn(2, 64).half().to(device)
    scales = {"lora_a_scale": [a.scale], "lora_b_scale": [b.scale]}
    with pytest.raises(ValueError, match="schemes has 4 entries"):
        lora_linear(y, x, [a.stored], [b.stored], *meta, 0.5, **scales, schemes=[0, 0, 0, 1])
    with pytest.raises(ValueError, match="inputs has 1 rows and output_tensor has 2"):
        lora_linear(y, x[:1], [a.stored], [b.stored], *meta, 0.5, **scales, schemes=[0, 0, 1, 1] * 2)


@pytest.mark.parametrize("mode", ["channel", "32 x r"])
@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
def test_the_first_product_may_be_launched_elsewhere(w8a8, mode, device):
    """All that it needs happens inside of the context, and the second product outside."""
    events, given = [], MODES[mode]

    @contextmanager
    def aside():
        events.append("begin")
        yield
        events.append(y.clone())

    a, b = stacks([(16, 96)], given, device)[0], stacks([(40, 16)], given, device)[0]
    x, y = torch.randn(3, 96).half().to(device), torch.zeros(3, 40, dtype=FP16, device=device)
    scheme = Scheme(use_fp8_w8a8=w8a8, **given)
    given = {"lora_a_scale": [a.scale], "lora_b_scale": [b.scale], "shrink": scheme, "expand": scheme}
    weights, rows = ([a.stored], [by_ranks(b.stored)]), step([0, 2, -1], device)
    linear(expected := y.clone(), x, *weights, rows, **given)
    linear(y, x, *weights, rows, aside=aside, **given)
    assert events[0] == "begin"
    assert not bool(events[1].any())
    assert torch.equal(y, expected)
    assert bool(y.any())


ONES = torch.ones


@pytest.mark.skipif(torch.cuda.is_available(), reason="checked on the CPU")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a_scale": None}, ValueError, "a_scale required for fp8 activations"),
        ({"b_scale": [ONES(3), ONES(4)]}, ValueError, r"b_scale\[1\].*\(4,\)"),
        ({"lora_a_weights": [fp8((3, 16, 64), E4M3), fp8((3, 16, 64), E5M2)]}, TypeError, "e5m2"),
        ({"group_k": 24, "group_n": 16, "b_scale": [ONES(3, 1, 3)] * 2}, ValueError, "24.*power of two"),
        ({"lora_a_weights": [torch.zeros(3, 16, 64).half()] * 2, "b_scale": []}, TypeError, "float16|use_fp8"),
    ],
    ids=["no a_scale", "shape", "two formats", "odd group", "plain"],
)  # fmt: skip
def test_bad_input_writes_nothing(changes, error, message):
    a = stacks([(16, 64)] * 2, {}, "cpu")
    given = {"lora_a_weights": [s.stored for s in a], "b_scale": [s.scale for s in a], "a_scale": torch.tensor(1.0)}
    given |= {"use_fp8_w8a8": True} | changes
    y = torch.full((2, 7, 16), 7.0)
    with pytest.raises(error, match=message):
        lora_shrink_fp8(fp8((7, 64), E4M3), given.pop("lora_a_weights"), y, *flat(SLOTS, "cpu"), scaling=1.0, **given)
    assert (y == 7).all()
