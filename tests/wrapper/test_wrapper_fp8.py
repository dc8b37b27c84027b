"""FP8 through the wrapper, on a CPU and on the kernels (interpreted without a GPU)."""

from typing import Any

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU
from tests.ops.helpers import E4M3, E5M2, Fp8Stack, captured, fp8, products, real_rows

IDS, TABLE = [7, 0, 3, 7, 3], [3, None, 7]
SLOTS = [2, -1, 0, 2, 0]
WIDTHS = (48, 20)
CHANNEL = {"per_channel_quant": True}
BACKENDS = {"cpu": PunicaWrapperCPU, "kernels": PunicaWrapperGPU}
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(params=BACKENDS)
def wrapper(request: pytest.FixtureRequest) -> Any:
    device = "cuda" if request.param == "kernels" and HAS_GPU else "cpu"
    wrapper = BACKENDS[request.param](8, 8, device, lora_config=LoRAConfig(max_loras=3, debug_checks=True))
    wrapper.update_metadata(LoRAMapping(tuple(IDS), tuple(IDS)), TABLE, 4, 100)
    return wrapper


def stacks(mode: dict[str, Any], device: torch.device, dtype: Any = E4M3) -> tuple[list[Fp8Stack], list[Fp8Stack]]:
    a = [Fp8Stack.random(3, 16, 64, mode, dtype, str(device)) for _ in WIDTHS]
    return a, [Fp8Stack.random(3, n, 16, mode, dtype, str(device)) for n in WIDTHS]


def stored(stacks: list[Fp8Stack]) -> tuple[torch.Tensor, ...]:
    return tuple(stack.stored for stack in stacks)


def scales(stacks: list[Fp8Stack]) -> list[torch.Tensor]:
    return [stack.scale for stack in stacks]


def expected(a: list[Fp8Stack], b: list[Fp8Stack], rows: torch.Tensor, scale: float) -> torch.Tensor:
    low = [products(rows, stack.real(), SLOTS, scale) for stack in a]
    return torch.cat([products(h, stack.real(), SLOTS) for h, stack in zip(low, b, strict=True)], 1)


def assert_near(y: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    size = float(wanted.abs().max())
    torch.testing.assert_close(y.cpu().double() / size, wanted / size, rtol=share, atol=share)


@pytest.mark.parametrize(
    ("nested", "dtype", "w8a8"),
    [
        (False, torch.bfloat16, False),
        (True, torch.float32, False),
        (False, E4M3, True),
        (True, torch.bfloat16, True),
    ],
    ids=["bfloat16", "nested, float32", "w8a8, x fp8", "w8a8, nested, x real"],
)
def test_linear(nested, dtype, w8a8, wrapper):
    mode = {"group_k": 16, "group_n": 16} if nested else CHANNEL
    a, b = stacks(mode, wrapper.device)
    x, a_scale = torch.randn(5, 64).to(wrapper.device, dtype), None
    if dtype == E4M3:
        x, a_scale = fp8((5, 64), E4M3).to(wrapper.device), torch.rand(5, device=wrapper.device) + 0.1
    y = torch.zeros(5, 68, dtype=torch.float32 if w8a8 else dtype, device=wrapper.device)
    quant_args: dict[str, Any] = {"use_fp8_w8a8": w8a8} | ({"shrink": mode, "expand": mode} if nested else mode)
    given = {"lora_a_scale": scales(a), "lora_b_scale": scales(b), "a_scale": a_scale, "quant_args": quant_args}
    wrapper.add_lora_linear(y, x, stored(a), stored(b), 0.5, WIDTHS, **given)
    assert_near(y, expected(a, b, real_rows(x, a_scale, {}), 0.5), 5e-2 if w8a8 else 1e-2)
    assert (y[1] == 0).all()


def test_shrink_and_expand_apart(wrapper):
    """One set of keywords serves both; both accumulate."""
    a, b = stacks(CHANNEL, wrapper.device, E5M2)
    x, y = torch.randn(5, 64, device=wrapper.device), torch.ones(5, 70, device=wrapper.device)
    h = tuple(torch.ones(2, 5, 16, device=wrapper.device))
    given = {"lora_a_scale": scales(a), "lora_b_scale": scales(b), "quant_args": CHANNEL}
    wrapper.add_shrink(h, x, stored(a), 0.5, **given)
    for i, stack in enumerate(a):
        assert_near(h[i], 1 + products(x, stack.real(), SLOTS, 0.5), 1e-3)
    wrapper.add_expand(y, h, stored(b), WIDTHS, 2, **given)
    delta = [products(h[i], s.real(), SLOTS) for i, s in enumerate(b)]
    assert_near(y[:, 2:], 1 + torch.cat(delta, 1), 1e-3)
    assert (y[:, :2] == 1).all()


BAD: dict[str, tuple[dict[str, Any], type, str]] = {
    "no scales of A": ({"lora_a_scale": None}, TypeError, "lora_a_scale is missing"),
    "no scales, w8a8": (
        {"lora_b_scale": None, "quant_args": {"use_fp8_w8a8": True, **CHANNEL}}, ValueError, "lora_b_scale is missing",
    ),
    "nothing of FP8": ({"lora_a_scale": None, "lora_b_scale": None, "quant_args": None}, TypeError, "float8_e4m3fn"),
    "an unknown key": ({"quant_args": {"group": 3}}, TypeError, "group"),
    "quant_args of another type": ({"quant_args": [1]}, TypeError, "mapping"),
    "w8a8 for one product": (
        {"quant_args": {"shrink": {"use_fp8_w8a8": True, **CHANNEL}, "expand": CHANNEL}}, ValueError, "differs",
    ),
    "a_scale of a real x": ({"a_scale": torch.ones(5)}, ValueError, "a_scale is given"),
    "a_scale of an x that is quantised here": (
        {"a_scale": torch.ones(5), "quant_args": {"use_fp8_w8a8": True, **CHANNEL}}, ValueError, "leave a_scale out",
    ),
    "another scheme": ({"quant_args": {}}, ValueError, "per tensor"),
    "NaN in a scale": ({"lora_a_scale": [torch.full((3, 16), float("nan"))] * 2}, ValueError, "finite"),
    "an unknown keyword": ({"b_scale": 1}, TypeError, "b_scale"),
}  # fmt: skip


@pytest.mark.skipif(HAS_GPU, reason="checked on the CPU")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, wrapper):
    changes, error, message = BAD[name]
    a, b = stacks(CHANNEL, wrapper.device)
    given = {"lora_a_scale": scales(a), "lora_b_scale": scales(b), "quant_args": CHANNEL} | changes
    y = torch.ones(5, 68)
    with pytest.raises(error, match=message):
        wrapper.add_lora_linear(y, torch.randn(5, 64), stored(a), stored(b), 0.5, WIDTHS, **given)
    assert (y == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("w8a8", [False, True], ids=["weight-only", "w8a8"])
def test_a_captured_graph_follows_the_step(w8a8):
    wrapper = PunicaWrapperGPU(8, 8, "cuda", max_loras=3)
    a, b = stacks(CHANNEL, torch.device("cuda"))
    x, y = torch.randn(5, 64, device="cuda").half(), torch.zeros(5, 68, device="cuda").half()
    quant_args = {"use_fp8_w8a8": w8a8, **CHANNEL}
    given = {"lora_a_scale": scales(a), "lora_b_scale": scales(b), "quant_args": quant_args}

    def run() -> None:
        wrapper.add_lora_linear(y, x, stored(a), stored(b), 1.0, WIDTHS, **given)

    wrapper.update_metadata(LoRAMapping(tuple(IDS), tuple(IDS)), TABLE, 4, 100)
    graph, _ = captured(run)
    for ids in (IDS, [3, 3, 3, 0, 7], [7] * 5, [0] * 5):
        wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids)), TABLE, 4, 100)
        y.zero_()
        graph.replay()
        replayed = y.clone()
        y.zero_()
        run()
        torch.testing.assert_close(replayed, y, rtol=2e-2, atol=2e-2)
