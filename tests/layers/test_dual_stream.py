"""The second stream: who gets one, and that its sum is that of the single stream (on a GPU: test_layers_gpu)."""

from types import SimpleNamespace

import pytest
import torch
from layer_cases import IN, LINEAR, MIXED, config_for, linear_layer, use, wrapper_for

from punica.layers import dual_stream as module
from punica.layers.dual_stream import dual_stream_for
from punica.parallel import ReplicatedLinear


class Over:
    """As much of a LoRA layer over a base layer as the question needs."""

    def __init__(self, base: ReplicatedLinear, device: str) -> None:
        self.base_layer, self.device = base, torch.device(device)


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {"dual_stream": True}, True),
        ("cuda", {}, False),
        ("cuda", {"dual_stream": True, "fully_sharded_loras": True}, False),
        ("cpu", {"dual_stream": True}, False),
        ("meta", {"dual_stream": True}, False),
    ],
    ids=["asked-for", "off", "fully-sharded", "cpu", "meta"],
)
def test_who_gets_a_second_stream(device, options, expected, monkeypatch) -> None:
    monkeypatch.setattr(module, "DualStream", lambda device: SimpleNamespace(device=device))
    base, config = ReplicatedLinear(4, 4), config_for(torch.float32, **options)
    first = Over(base, device)
    streams = dual_stream_for(first, config)
    assert (streams is not None) == expected
    if expected:
        assert streams.device == torch.device(device)
        assert dual_stream_for(Over(base, device), config) is None, "a second layer over the same base layer"
        assert dual_stream_for(Over(ReplicatedLinear(4, 4), device), config) is not None
        del first
        assert dual_stream_for(Over(base, device), config) is not None, "the first layer is gone"


def test_a_refused_layer_leaves_the_base_layer_to_the_next(monkeypatch) -> None:
    monkeypatch.setattr(module, "DualStream", SimpleNamespace)
    base = ReplicatedLinear(4, 4)
    assert dual_stream_for(Over(base, "cpu"), config_for(torch.float32, dual_stream=True)) is None
    monkeypatch.setattr(module, "DualStream", lambda device: device)
    assert dual_stream_for(Over(base, "cuda"), config_for(torch.float32, dual_stream=True)) is not None


class InTurn:
    """Both products one after the other on the CPU."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, here, beside):
        self.runs += 1
        return here(), beside()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LINEAR)
def test_the_sum_is_that_of_one_stream(name, dtype) -> None:
    config = config_for(dtype, dual_stream=True)
    layer, _ = linear_layer(LINEAR[name], config)
    wrapper, x = wrapper_for(config, "cpu"), torch.randn(len(MIXED), IN, dtype=dtype)
    layer.set_mapping(wrapper)
    use(wrapper, MIXED)
    expected = layer(x)
    layer._streams = streams = InTurn()
    if dtype == torch.float32:  # a product that adds to y may begin its sums with it
        torch.testing.assert_close(layer(x), expected)
    else:
        assert torch.equal(layer(x), expected), "the term is kept in float32, so even the rounding is the same"
    torch.testing.assert_close(layer(x.view(1, len(MIXED), IN))[0], expected)  # 3-D: another base product
    assert streams.runs == 2
    use(wrapper, [-1] * len(MIXED))
    layer(x)
    assert streams.runs == 2, "a step without adapters has nothing to run beside"
