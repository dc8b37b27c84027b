"""A base product and the LoRA term on top of it as one call: in one launch with the shrink, or in front of it."""

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton_batches import SHRINKS, TOLERANCE, Batch, assert_close, linear

from punica.ops.quant import E4M3, dequantize, quantize_per_channel
from punica.ops.scales import Scheme
from punica.ops.triton_ops import Options
from punica.ops.triton_ops.lora_linear import MOST_RANKS, GemmAndShrinkPlan, LinearPlan, describe_base, fused_schedule
from tests.ops.helpers import by_ranks, step

DISTINCT = [3, 0, -1, 5, 1, 2, 4]
IDENTICAL = [2] * 32
FP16 = torch.float16


class Case(Batch):
    """A batch, a base weight and bias beside it, and the result in float64."""

    def __init__(self, slots: list[int], device: str, dtype: torch.dtype = FP16, **sizes: Any) -> None:
        torch.manual_seed(len(slots))
        given = {"k": 200, "widths": (96, 40), "rank": 16, "ranks": None} | sizes
        super().__init__(slots, given["k"], given["widths"], given["rank"], 6, dtype, device, given["ranks"])
        self.weight = (torch.randn(self.y.shape[1], self.k) * self.k**-0.5).to(device, dtype)
        self.bias = torch.randn(self.y.shape[1]).to(device, dtype)
        self.step = step(slots, device, self.slot_count, 128)
        self.y.fill_(torch.nan)  # as new memory may be

    def run(self, with_bias: bool = True, **options: Any) -> torch.Tensor:
        base = (self.weight, self.bias) if with_bias else (self.weight,)
        options = {"lora_ranks": self.lora_ranks} | options
        linear(self.y, self.x, self.a, self.b, self.step, 0.5, base=base, **options)
        return self.y

    def product(self, with_bias: bool = True) -> torch.Tensor:
        return self.x.cpu().double() @ self.weight.cpu().double().T + self.bias.cpu().double() * with_bias

    def expected(self, with_bias: bool = True) -> torch.Tensor:
        return self.product(with_bias) + self.expanded(self.shrunk())


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every plan that runs, whether its shrink is in the launch of the base product."""
    seen: list[bool] = []
    run = LinearPlan.run

    def noted(plan: LinearPlan, *operands: Any) -> None:
        seen.append(isinstance(plan.shrink, GemmAndShrinkPlan))
        run(plan, *operands)

    monkeypatch.setattr(LinearPlan, "run", noted)
    return seen


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("slots", [DISTINCT, IDENTICAL, [1, -1, 1], [4]], ids=["distinct", "identical", "three", "one"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_base_and_lora(with_bias, slots, dtype, device, fused) -> None:
    case = Case(slots, device, dtype)
    assert_close(case.run(with_bias), case.expected(with_bias), dtype)
    assert fused == [len(slots) > 2], "one row is multiplied without tensor cores"


@pytest.mark.parametrize(
    ("k", "widths", "rank"), [(7, (1,), 1), (129, (65,), 8), (96, (64, 64, 64), 16), (4100, (33, 1), 5)]
)  # fmt: skip
def test_sizes(k, widths, rank, device, fused) -> None:
    case = Case(DISTINCT, device, k=k, widths=widths, rank=rank)
    assert_close(case.run(), case.expected(), FP16)
    assert fused == [True]


@pytest.mark.parametrize("rank", [8, 16, 24, 64])
def test_true_ranks_and_poison(rank, device, fused) -> None:
    """Lanes beyond a rank and slots that nobody asks for are not read into a result."""
    ranks = [[0, rank, 5, 8, 1, rank], [rank, 0, rank, 3, 8, 2]]
    case = Case([3, 0, -1, 1, 2, 4], device, rank=rank, ranks=ranks)
    case.poison()
    case.poison(ranks=True)
    assert_close(case.run(), case.expected(), FP16)
    assert fused == [rank <= MOST_RANKS]


def test_rows_apart(device) -> None:
    case = Case(DISTINCT, device)
    expected = case.expected()
    x, y = (torch.full((7, width + 8), torch.nan, dtype=FP16, device=device) for width in (200, 136))
    x[:, :200] = case.x
    case.x, case.y = x[:, :200], y[:, :136]
    assert_close(case.run(), expected, FP16)
    assert bool(y[:, 136:].isnan().all())


def test_the_bits_repeat_and_rows_of_no_adapter_have_the_base_product(device) -> None:
    case = Case(DISTINCT, device, k=600)
    first = case.run().clone()
    assert torch.equal(case.run(), first)
    bare = Case([-1] * 7, device, k=600)
    assert torch.equal(bare.run()[2], first[2])


def test_what_has_a_launch_of_its_own(device, fused, use_schedules) -> None:
    for schedule, options in ((SHRINKS["tiles"], {}), (SHRINKS["rows"], {"options": Options(tuned_dir="somewhere")})):
        use_schedules(shrink=schedule)
        case = Case(DISTINCT, device)
        assert_close(case.run(**options), case.expected(), FP16)
    assert fused == [False, False]


def test_the_shrink_of_a_launch_of_its_own_runs_aside(device, use_schedules) -> None:
    use_schedules(shrink=SHRINKS["tiles"])
    case, seen = Case(DISTINCT, device), []

    @contextmanager
    def aside():
        seen.append(case.y.clone())
        yield
        seen.append(case.y.clone())

    assert_close(case.run(aside=aside), case.expected(), FP16)
    assert len(seen) == 2
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert_close(seen[0], case.product(), FP16)


def test_a_step_without_adapters_and_an_empty_one(device) -> None:
    case = Case([-1, -1, -1], device)
    assert_close(case.run(), case.product(), FP16)
    case = Case(DISTINCT, device)
    case.a, case.b = (tuple(one[..., :0, :] for one in case.a)), (tuple(one[..., :0] for one in case.b))
    assert_close(case.run(lora_ranks=None), case.product(), FP16)


@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
def test_adapters_in_fp8(w8a8, rank, device, fused) -> None:
    case = Case(DISTINCT, device, rank=rank)
    a, b = ([quantize_per_channel(one[:, 0].float()) for one in stack] for stack in (case.a, case.b))
    stored = [values for values, _ in a], [by_ranks(values) for values, _ in b]
    scheme = Scheme(use_fp8_w8a8=w8a8, per_channel_quant=True)
    given: dict[str, Any] = {"lora_a_scale": [scale for _, scale in a], "lora_b_scale": [scale for _, scale in b]}
    given |= {"shrink": scheme, "expand": scheme}
    with pytest.raises(ValueError, match="scale is 1e"):
        linear(case.y.fill_(7), case.x, *stored, case.step, 1e39, base=(case.weight, case.bias), **given)
    assert (case.y == 7).all()
    linear(case.y, case.x, *stored, case.step, 0.5, base=(case.weight, case.bias), **given)
    expected = case.product().to(device, FP16)
    linear(expected, case.x, *stored, case.step, 0.5, **given)
    assert_close(case.y, expected.cpu().double(), FP16)
    assert fused[:1] == ([] if w8a8 else [rank <= MOST_RANKS])


@pytest.mark.parametrize("slots", [DISTINCT, [4], [-1, -1, -1]], ids=["distinct", "one", "none"])
@pytest.mark.parametrize(("dtype", "rank"), [(FP16, 16), (torch.bfloat16, 8), (FP16, 32)])
def test_base_in_fp8(slots, dtype, rank, device, fused) -> None:
    with_bias, case = dtype == FP16, Case(slots, device, dtype, rank=rank, k=208)
    values, scale = quantize_per_channel(case.weight.float())
    base = values, case.bias if with_bias else None, scale
    linear(case.y, case.x, case.a, case.b, case.step, 0.5, base=base)
    case.weight = dequantize(values, scale)
    assert_close(case.y, case.expected(with_bias), dtype)
    assert fused == ([] if max(slots) < 0 else [len(slots) > 2 and rank <= MOST_RANKS])


def test_weights_are_not_kept(device) -> None:
    case = Case(DISTINCT, device)
    case.run()
    gone = weakref.ref(case.weight)
    del case.weight
    gc.collect()
    assert gone() is None


def test_fused_schedule_covers_k_and_rank() -> None:
    for k, rank in ((1, 1), (130, 3), (4096, 16), (5120, 16), (13824, 9)):
        x, base = torch.empty(8, k, dtype=FP16), describe_base((torch.empty(64, k, dtype=FP16),))
        schedule = fused_schedule(x, base, rank)
        assert schedule.block_k * schedule.split_k >= k
        assert schedule.block_k * schedule.block_n <= 16384
    assert fused_schedule(x, base, MOST_RANKS + 1) is None
    assert fused_schedule(x[:1], base, 8) is None


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda case: {"weight": case.weight[:, :-1]}, {}, ValueError, "x must have 199 columns and y 136, .* got 200"),
        (lambda case: {"weight": case.weight.float()}, {}, TypeError, "base bias must be torch.float32"),
        (lambda case: {"weight": case.weight.float(), "bias": case.bias.float()}, {}, TypeError, "x and y must be"),
        (lambda case: {"weight": case.weight.T.contiguous().T}, {}, ValueError, "base weight must have a last stride"),
        (lambda case: {"weight": case.weight[0]}, {}, ValueError, r"base weight must be \[any, any\]"),
        (lambda case: {"bias": case.bias[:5]}, {}, ValueError, r"base bias must be \[136\]"),
        (lambda case: {"weight": case.weight.to(E4M3)}, {}, TypeError, "base weight must be .* without scales"),
        (lambda case: {"x": case.x.T.contiguous().T}, {}, TypeError, "x have a last stride of 1"),
        (lambda case: {}, {"add_inputs": False}, ValueError, "add_inputs must be True with a base product"),
        (lambda case: {}, {"base": torch.zeros(136, 200)}, TypeError, "base must be .* got Tensor"),
        (lambda case: {}, {"base": (torch.zeros(136, 200),) * 4}, TypeError, "three tensors at most"),
    ],
)
def test_operands_that_do_not_fit(change, options, error, message, device) -> None:
    case = Case(DISTINCT, device)
    for name, value in change(case).items():
        setattr(case, name, value)
    with pytest.raises(error, match=message):
        linear(case.y, case.x, case.a, case.b, case.step, 0.5, **{"base": (case.weight, case.bias)} | options)
    assert bool(case.y.isnan().all()), "nothing was written"


def test_a_base_product_takes_64_rows(device) -> None:
    with pytest.raises(ValueError, match="takes up to 64 rows, got 65"):
        Case([0] * 65, device).run()
