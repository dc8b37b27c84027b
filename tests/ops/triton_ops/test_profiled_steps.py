"""Profiled steps: the launches of unprofiled ones, with the op's name beside them."""

from collections.abc import Callable

import pytest
import torch
from step_calls import expand, linear, shrink
from test_gemm_and_shrink import DISTINCT, Case
from torch.profiler import ProfilerActivity, profile

from punica.ops.quant import quantize_per_channel
from punica.ops.scales import Scheme
from punica.ops.triton_ops import moe_align
from punica.ops.triton_ops.launch import Launch
from punica.ops.triton_ops.moe_ops import fused
from tests.ops import moe_cases


def with_base(case: Case) -> None:
    case.run()


def without_base(case: Case) -> None:
    linear(case.y.zero_(), case.x, case.a, case.b, case.step, 0.5)


def in_fp8(case: Case) -> None:
    (a, a_scale), (b, b_scale) = (quantize_per_channel(one) for one in (case.a[0], case.b[0]))
    scheme = Scheme(per_channel_quant=True)
    given = {"lora_a_scale": [a_scale], "lora_b_scale": [b_scale], "shrink": scheme, "expand": scheme}
    linear(case.y.zero_(), case.x, [a], [b], case.step, 0.5, **given)


def apart(case: Case) -> None:
    h = torch.empty(len(case.a), case.tokens, case.rank, device=case.device)
    shrink(case.x, case.a, h, case.step, 0.5)
    expand(h, case.b, case.y.zero_(), case.step)


CALLS = {
    with_base: ["punica::lora_linear"],
    without_base: ["punica::lora_linear"],
    in_fp8: ["punica::lora_linear"],
    apart: ["punica::lora_shrink", "punica::lora_expand"],
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Kernel, grid and constants of every launch."""
    seen: list[tuple] = []
    run = Launch.__call__

    def noted(launch: Launch, tensors: tuple, counts: tuple, aligned: bool, grid: tuple | None = None) -> None:
        seen.append((launch.kernel.__name__, grid or launch.grid, launch.tail))
        run(launch, tensors, counts, aligned, grid)

    monkeypatch.setattr(Launch, "__call__", noted)
    return seen


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_profiled_calls_launch_what_others_launch(call: Callable[[Case], None], launches: list, device: str) -> None:
    case = Case(DISTINCT, device)
    call(case)
    unwatched, expected = list(launches), case.y.clone()
    launches.clear()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call(case)
    assert launches == unwatched
    assert launches
    assert torch.equal(case.y, expected)
    assert [event.name for event in trace.events() if event.name.startswith("punica::")] == CALLS[call]


def served(world: moe_cases.World) -> torch.Tensor:
    given = world.given(moe_align.moe_lora_align_block_size)
    fused(given, world.case.rank, world.case.top_k, world.switches)
    return given.output


@pytest.mark.parametrize("case", [moe_cases.CASES["plain"], moe_cases.FP8_CASES["per channel"]], ids=["16 bits", "fp8"])
def test_profiled_experts_launch_what_others_launch(case: moe_cases.Case, launches: list, device: str) -> None:
    world = moe_cases.World(case, device)
    expected, unwatched = served(world), list(launches)
    launches.clear()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        again = served(world)
    assert launches == unwatched
    assert len(launches) > 1  # the grouping's and the products'
    assert torch.equal(again, expected)
    names = [event.name for event in trace.events() if event.name.startswith("punica::")]
    assert names == ["punica::moe_lora_align_block_size", "punica::fused_moe_lora"]
