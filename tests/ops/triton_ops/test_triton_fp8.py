"""FP8 operators of both backends against float64: modes, forms, layouts, true ranks, and what they must not touch."""

from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from fp8_case import Case
from triton_batches import EXPANDS, KERNELS, SHRINKS, Batch, shrink

from punica.metadata import LoRAKernelMeta
from punica.ops.scales import PER_CHANNEL, Scheme
from punica.ops.triton_ops import lora_expand, lora_expand_fp8, lora_linear, lora_shrink, lora_shrink_fp8
from tests.ops.helpers import E4M3, E5M2, MODES, TORCH, Fp8Stack, by_ranks, fp8, products, real_rows, step

SLOTS = [1, -1, 0, 2, 2, 0, -1]
FP16, FP32 = torch.float16, torch.float32
PROMPT = [2] * 41 + [0, 1, -1, 1, 0, 1, 0]
STEP_SHRINKS = SHRINKS | {"left": SHRINKS["tiles"]._replace(swap_ab=True), "deep": SHRINKS["tiles"]}
STEP_EXPANDS = EXPANDS | {"left": EXPANDS["tiles"]._replace(swap_ab=True)}
BACKENDS = {"torch": TORCH, "triton": KERNELS}
FORMS = {
    "torch": ("torch", "rows", "rows"), "rows": ("triton", "rows", "rows"), "tiles": ("triton", "tiles", "tiles"),
    "walk": ("triton", "tiles", "walk"), "deep": ("triton", "rows", "deep"),
}  # fmt: skip
"""Backend, and schedules of its kernels."""


def flat(slots: list[int], device: str, slot_count: int = 3) -> tuple:
    """The seven arguments of the metadata."""
    meta = LoRAKernelMeta.make(slot_count, max(1, len(slots)), device)
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64))
    return meta.meta_args(len(slots), True)


def stacks(shapes: list[tuple[int, int]], mode: dict[str, Any], device: str, dtype: Any = E4M3) -> list[Fp8Stack]:
    return [Fp8Stack.random(3, n, k, mode, dtype, device) for n, k in shapes]


def activations(shape: tuple[int, ...], mode: dict[str, Any], dtype: torch.dtype, device: str) -> tuple:
    """Real ones without scales, or FP8 with them, by group where there are some."""
    if dtype not in (E4M3, E5M2):
        return torch.randn(shape).to(dtype).to(device), None
    groups = -(-shape[-1] // mode["group_k"]) if "group_k" in mode else 1
    return fp8(shape, dtype).to(device), (torch.rand(shape[-2], groups) + 0.1).to(device)


@pytest.mark.parametrize(
    ("mode", "form", "weights", "values"),
    [
        *product(MODES, ("torch", "rows", "tiles"), (E4M3,), (FP16, E4M3)),
        *((mode, form, E4M3, values) for mode in MODES for form, values in (("walk", E4M3), ("deep", FP16))),
        *product(("channel",), FORMS, (E5M2,), (E4M3, E5M2)),
        *product(("channel",), FORMS, (E4M3,), (E5M2,)),
    ],
    ids=str,
)
def test_shrink_and_expand(mode, form, weights, values, device, use_schedules):
    backend, shrinks, expands = FORMS[form]
    use_schedules(shrink=SHRINKS[shrinks], expand=EXPANDS[expands])
    given, device = MODES[mode], "cpu" if backend == "torch" else device
    scheme, batch = Scheme(use_fp8_w8a8=values in (E4M3, E5M2), **given), step(SLOTS, device)
    a = stacks([(20, 200)] * 2, given, device, weights)
    x, a_scale = activations((7, 200), given, values, device)
    h = torch.full((2, 7, 20), float("nan"), device=device)
    scales = {"b_scale": [s.scale for s in a], "a_scale": a_scale}
    BACKENDS[backend].shrink(x, [s.stored for s in a], h, batch, 0.5, scheme=scheme, **scales)
    expected = torch.stack([products(real_rows(x, a_scale, given), s.real(), SLOTS, 0.5) for s in a])
    torch.testing.assert_close(h.cpu().double(), expected, rtol=1e-3, atol=1e-3)

    b = stacks([(33, 20), (150, 20)], given, device, weights)
    x, a_scale = activations((2, 7, 20), given, values, device)
    before = torch.randn(7, 200).to(device)
    y, scales = before.clone(), {"b_scale": [s.scale for s in b], "a_scale": a_scale}
    BACKENDS[backend].expand(x, [by_ranks(s.stored) for s in b], y, batch, 10, scheme=scheme, **scales)
    expected = before.cpu().double()
    expected[:, 10:193] += torch.cat(
        [products(real_rows(x[i], a_scale, given), s.real(), SLOTS) for i, s in enumerate(b)], 1
    )
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-3, atol=1e-3)
    for kept in (torch.tensor(SLOTS) < 0, (slice(None), slice(10)), (slice(None), slice(193, None))):
        assert torch.equal(y[kept], before[kept])


@pytest.mark.parametrize("values", [FP16, E4M3], ids=str)
@pytest.mark.parametrize("mode", ["tensor", "channel", "r x 32", "32 x r"])
def test_flat_ops_give_the_bits_of_a_step(mode, values, device):
    given, batch, meta = MODES[mode], step(SLOTS, device), flat(SLOTS, device)
    scheme = Scheme(use_fp8_w8a8=values == E4M3, **given)
    (a,), (b,) = stacks([(16, 70)], given, device), stacks([(33, 16)], given, device)
    x, x_scale = activations((7, 70), given, values, device)
    low, low_scale = activations((1, 7, 16), given, values, device)
    h, y = torch.zeros(2, 1, 7, 16, device=device), torch.ones(2, 7, 40, device=device)
    KERNELS.shrink(x, [a.stored], h[0], batch, 0.5, b_scale=[a.scale], a_scale=x_scale, scheme=scheme)
    KERNELS.expand(low, [b.stored], y[0], batch, 5, b_scale=[b.scale], a_scale=low_scale, scheme=scheme)
    given = given | {"use_fp8_w8a8": scheme.use_fp8_w8a8}
    lora_shrink_fp8(x, [a.stored], h[1], *meta, 0.5, [a.scale], x_scale, **given)
    lora_expand_fp8(low, [b.stored], y[1], *meta, [b.scale], low_scale, 5, True, **given)
    assert torch.equal(h[0], h[1])
    assert torch.equal(y[0], y[1])


def test_the_example_of_the_specification():
    qw = torch.tensor([[1.0, 2, 0, 1], [0, 1, 1, 0]]).to(E4M3)[None]
    qx, batch, y = torch.tensor([[2.0, 1, 0, 4]]).to(E4M3), step([0]), torch.empty(1, 1, 2)
    given = {"b_scale": [torch.tensor([[0.5, 2.0]])], "a_scale": torch.tensor([0.25])}
    TORCH.shrink(qx, [qw], y, batch, 2.0, **given, scheme=Scheme(use_fp8_w8a8=True, per_channel_quant=True))
    assert y.tolist() == [[[2.0, 1.0]]]
    given = {"b_scale": [torch.tensor([[[0.5, 2.0]]])], "a_scale": torch.tensor([[1.0, 0.25]])}
    TORCH.shrink(qx, [qw], y, batch, 1.0, **given, scheme=Scheme(2, 2, use_fp8_w8a8=True))
    assert y.tolist() == [[[4.0, 0.5]]]


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


def test_true_ranks_and_poison_in_torch():
    case = Case([0, 1, 0, -1, 2], (50, 33), 20, [8, 0, 20], "cpu", dtype=FP32, k=40)
    case.check(case.run(linear=TORCH.linear))


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
    assert torch.equal(y[[1, 4]], case.y[[1, 4]])


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
    expected = torch.stack([products(real_rows(x, a_scale, {}), s.real(), SLOTS) for s in a])
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
    case, seen = Case([0, 2, -1], (40,), 16, [16] * 3, device, mode=mode, k=96), []
    case.scheme, y = case.scheme._replace(use_fp8_w8a8=w8a8), case.y.clone()

    @contextmanager
    def aside():
        seen.append(y.clone())
        yield
        seen.append(y.clone())

    case.run(y, aside=aside)
    assert [torch.equal(one, case.y) for one in seen] == [True, True]
    assert torch.equal(y, case.run())
    assert not torch.equal(y, case.y)


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
