"""The second stream: who gets one, and what a layer puts on it (on a GPU: test_layers_gpu)."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from layer_cases import IN, LINEAR, MIXED, config_for, linear_layer, use, wrapper_for

from punica.layers import dual_stream as module
from punica.layers.dual_stream import dual_stream_for
from punica.parallel.linear import BatchInvariantLinearMethod
from punica.wrapper import PunicaWrapperGPU


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {}, True),
        ("cuda", {"dual_stream": False}, False),
        ("cuda", {"dual_stream": True, "fully_sharded_loras": True}, False),
        ("cpu", {"dual_stream": True}, False),
    ],
    ids=["default", "off", "fully-sharded", "cpu"],
)
def test_who_gets_a_second_stream(device, options, expected, monkeypatch) -> None:
    monkeypatch.setattr(module, "DualStream", lambda device: SimpleNamespace(device=device))
    streams = dual_stream_for(torch.device(device), config_for(torch.float32, **options))
    assert (streams is not None and streams.device == torch.device(device)) == expected


class Recorded:
    """A second stream on the CPU: it notes what happens in which order, and runs it at once."""

    def __init__(self, order: list[str], suited: bool) -> None:
        self.order, self.suited = order, suited

    def begin(self, rows: torch.Tensor):
        self.order.append("begin")
        return self.aside if self.suited else None

    @contextmanager
    def aside(self):
        self.order.append("aside")
        yield
        self.order.append("joined")


@pytest.mark.parametrize(
    ("name", "fp8", "suited"),
    [("replicated", None, True), ("column-gathered", None, False), ("qkv", "float8_e4m3fn", True), ("row", None, True)],
)
def test_it_begins_in_front_of_the_base_product(name, fp8, suited) -> None:
    config = config_for(torch.float32, fp8=fp8)
    layer, _ = linear_layer(LINEAR[name], config)
    wrapper, x, order = wrapper_for(config, "cpu"), torch.randn(len(MIXED), IN), []
    layer.set_mapping(use(wrapper, MIXED))
    expected, base, linear = layer(x), layer._base_output, wrapper.add_linear
    layer._streams = Recorded(order, suited)

    def base_output(*operands):
        order.append("base product")
        return base(*operands)

    def add_linear(y, x, weights, add_inputs, beside):
        with (beside.aside or nullcontext)():
            order.append("shrink")
        return linear(y, x, weights, add_inputs)

    layer._base_output, wrapper.add_linear, wrapper.takes_aside = base_output, add_linear, True
    layer.set_mapping(wrapper)
    torch.testing.assert_close(layer(x), expected)
    beside = ["begin", "base product", "aside", "shrink", "joined"]
    assert order == (beside if suited else ["begin", "base product", "shrink"])
    order.clear()
    use(wrapper, [-1] * len(MIXED))
    layer(x)
    assert "begin" not in order, "a step without adapters has nothing to run beside"
    use(wrapper, MIXED)
    wrapper.takes_aside = False
    layer.set_mapping(wrapper)
    layer(x)
    assert "begin" not in order, "a wrapper that does not know of it"


def test_a_stream_of_its_own_for_decode_steps_that_are_captured(monkeypatch) -> None:
    marks = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=marks.append))
    streams, most = module.DualStream(torch.device("cuda")), module.MOST_ROWS
    for captured in (False, True):
        monkeypatch.setattr(module, "is_being_captured", lambda rows, captured=captured: captured)
        assert streams.begin(torch.empty(most + 1, 1)) is None, "a prefill"
        assert streams.begin(torch.empty(most, 1)) == (streams.aside if captured else nullcontext)
    assert marks == ["current"]


def on_kernels(name):
    """A layer and its wrapper on the kernels (in Triton's interpreter where there is no GPU), and rows."""
    device, config = "cuda" if torch.cuda.is_available() else "cpu", config_for(torch.float16)
    layer, _ = linear_layer(LINEAR[name], config, device)
    wrapper = use(PunicaWrapperGPU(32, 32, device, lora_config=config), MIXED)
    layer.set_mapping(wrapper)
    layer._streams = None
    return layer, wrapper, torch.randn(len(MIXED), IN).half().to(device)


@pytest.mark.parametrize(("name", "bias"), [("replicated", False), ("column", True), ("row-whole-input", True)])
def test_a_plain_product_of_few_rows_is_left_to_the_op(name, bias) -> None:
    layer, wrapper, x = on_kernels(name)
    given, add = [], wrapper.add_linear
    wrapper.add_linear = lambda *call: given.append(call[-1].base) or add(*call)
    vector = torch.randn(layer.output_size, device=x.device).half() if bias else None
    expected = layer.apply(x, vector)
    layer._streams = Recorded([], True)
    torch.testing.assert_close(layer.apply(x, vector), expected, rtol=4e-3, atol=4e-3)
    plain = not layer._uses_base_forward
    assert [len(base) for base in given] == [0, (1 + bias) * plain]
    layer.base_layer.quant_method = BatchInvariantLinearMethod()
    layer._base_output = lambda x, bias: expected.clone()
    layer.apply(x, vector)
    assert given[-1] == (), "no plain product"


def test_a_wrapper_with_a_contract_method_of_its_own_keeps_the_base_product() -> None:
    """The contract's method knows no base product, so the layer makes it."""
    layer, wrapper, x = on_kernels("row")
    expected, calls, own = layer.apply(x), [], wrapper.add_lora_linear
    layer._streams = Recorded([], True)
    wrapper.add_lora_linear = lambda *call, **given: calls.append(call) or own(*call, **given)
    layer.set_mapping(wrapper)
    torch.testing.assert_close(layer.apply(x), expected, rtol=4e-3, atol=4e-3)
    assert len(calls) == 1
