"""Every linear LoRA class on one rank: base output plus each row's own dense LoRA term; what is refused, and when."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from layer_cases import (
    ALONE,
    IN,
    LINEAR,
    MAX_LORAS,
    MIXED,
    assert_close,
    config_for,
    fill,
    linear_layer,
    lora_term,
    on_devices,
    random_pair,
    rounded,
    under_default_devices,
    use,
    used,
    wrapper_for,
)
from torch import nn

from punica.layers import (
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    from_layer,
)
from punica.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from punica.wrapper import PunicaWrapperCPU
from tests.ops.helpers import E4M3, E5M2

T = len(MIXED)


def layer_of(name, dtype=torch.float32, slots=MIXED, device="cpu", fp8=None, **options):
    """The layer with its adapters, as slots hold them, and a mapping; its base layer alone."""
    layer, adapters = linear_layer(LINEAR[name], config := config_for(dtype, fp8=fp8), device, ALONE, **options)
    layer.set_mapping(use(wrapper_for(config, device), slots))
    return layer, rounded(adapters, fp8), layer.base_layer


@on_devices
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    ("bias", "skip", "return_bias"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_base_plus_lora(name, bias, skip, return_bias, device):
    layer, adapters, base = layer_of(name, bias=bias, skip_bias_add=skip, return_bias=return_bias, device=device)
    x = torch.randn(T, IN, device=device)
    result, expected = layer(x), base(x)
    if return_bias:
        assert result[1] is expected[1]
        assert (result[1] is base.bias) if base.bias is not None and skip else (result[1] is None)
        result, expected = result[0], expected[0]
    assert (layer.weight is base.weight, layer.bias is base.bias) == (True, True)
    assert torch.equal(result[1], expected[1]), "a row without adapter must be the base layer's, bit for bit"
    assert_close(result, expected.cpu().double() + lora_term(x, MIXED, adapters, torch.float32))
    assert_close(layer(x.view(T, 1, IN))[0] if return_bias else layer(x.view(T, 1, IN)), result[:, None])


@on_devices
@pytest.mark.parametrize(
    ("name", "dtype", "fp8"),
    [
        ("replicated", torch.bfloat16, None), ("variable", torch.float16, None), ("qkv", torch.bfloat16, None),
        ("row", torch.float16, None), ("replicated", torch.bfloat16, E4M3), ("merged-as-one", torch.float32, E5M2),
        ("variable", torch.bfloat16, E4M3), ("qkv", torch.float32, E5M2), ("row", torch.bfloat16, E4M3),
    ],
)  # fmt: skip
def test_half_precision_and_fp8(name, dtype, fp8, device):
    layer, adapters, base = layer_of(name, dtype, bias=False, device=device, fp8=fp8)
    x = torch.randn(T, IN, device=device).to(dtype)
    assert layer(x).dtype == dtype
    assert_close(layer(x), base(x).cpu().double() + lora_term(x, MIXED, adapters, torch.float32 if fp8 else dtype))


@under_default_devices
@pytest.mark.parametrize("name", ["replicated", "merged-gathered", "qkv", "row-whole-input"])
def test_a_default_device_changes_nothing(name, default):
    x = torch.randn(T, IN)
    with torch.device(default):
        layer, adapters, base = layer_of(name)
        assert_close(layer(x), base(x) + lora_term(x, MIXED, adapters, torch.float32))


@pytest.mark.parametrize("name", LINEAR)
def test_rows_and_calls_that_are_missing(name):
    layer, _, base = layer_of(name, slots=[])
    assert layer(torch.empty(0, IN)).shape == (0, sum(LINEAR[name].sizes))
    base.quant_method = None
    with pytest.raises(ValueError, match=f"{IN}, .*\\(1, {IN + 1}\\)"):  # before the product
        layer(torch.randn(1, IN + 1))
    layer, x = type(layer)(LINEAR[name].build()), torch.randn(2, IN)
    for call in (lambda: layer(x), lambda: layer.set_lora(0, None, None), lambda: layer.reset_lora(0)):
        with pytest.raises(RuntimeError, match="create_lora_weights"):
            call()
    layer.create_lora_weights(MAX_LORAS, config_for())
    with pytest.raises(RuntimeError, match="set_mapping"):
        layer(x)
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer.create_lora_weights(MAX_LORAS, config_for())


class Gate(ReplicatedLinear):
    """A router that computes in float32, whatever the model's dtype."""

    def forward(self, input_):
        return self._result(torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias))


class Doubled(MergedColumnParallelLinear):
    def forward(self, input_):
        return 2 * super().forward(input_)


@pytest.mark.parametrize(
    ("base_class", "sizes", "packed", "dtype"),
    [
        (Gate, [7], 0, torch.bfloat16),
        (ColumnParallelLinear, [7], 0, torch.float32),
        (Doubled, [3, 4], 1, torch.float32),
        (Doubled, [3, 4], 2, torch.float32),
    ],
)
def test_adapters_of_another_dtype_than_the_output(base_class, sizes, packed, dtype):
    """A base forward of its own, perhaps in float32, and activations in float32."""
    width = sizes if base_class is Doubled else 7
    base = base_class(IN, width, False, return_bias=False, params_dtype=dtype)
    base.weight.data.normal_()
    layer = from_layer(base, MAX_LORAS, config_for(torch.bfloat16), ["m"] * packed)
    layer.set_mapping(used([0, -1, 1]))
    adapters = {slot: [random_pair(4, IN, size) for size in (sizes if packed == 2 else [7])] for slot in (0, 1)}
    for slot, pairs in adapters.items():
        fill(layer, slot, pairs)
    x = torch.randn(3, IN).bfloat16().to(dtype)
    result = layer(x)
    assert result.dtype == torch.float32
    assert_close(result, base(x).double() + lora_term(x, [0, -1, 1], adapters, torch.bfloat16))


def test_a_wrapper_of_the_contract_alone():
    """What it is given, and that the tensor it returns is honoured."""
    add = Mock(side_effect=lambda y, *_, **keywords: y + 1)
    layer = MergedQKVParallelLinearWithLoRA(QKVParallelLinear(IN, 3, 4, 2, return_bias=False))
    layer.base_layer.weight.data.normal_()
    layer.create_lora_weights(4, config_for())
    layer.set_mapping(SimpleNamespace(add_lora_linear=add))
    x = torch.randn(2, 3, IN)
    assert torch.equal(layer(x), layer.base_layer(x) + 1)
    (y, rows, a, b, scale, output_slices), kwargs = add.call_args
    assert (y.shape, rows.shape) == ((6, 24), (6, IN))
    assert a is layer.lora_a_stacked, "a wrapper may remember what it checked"
    assert b is layer.lora_b_stacked
    assert (scale, output_slices) == (1.0, (12, 6, 6))
    assert list(kwargs) == ["lora_ranks"]
    assert kwargs["lora_ranks"] is layer.lora_ranks


def test_a_contract_method_of_a_subclass_is_called():
    class Own(PunicaWrapperCPU):
        def add_lora_linear(self, *call, **keywords):
            calls.append(keywords)

    calls, layer = [], RowParallelLinearWithLoRA(RowParallelLinear(IN, 7))
    layer.create_lora_weights(4, config_for())
    layer.set_mapping(Own(8, 8, "cpu", max_loras=4))
    layer(torch.randn(2, IN))
    assert [list(keywords) for keywords in calls] == [["lora_ranks"]]


@pytest.mark.parametrize("base_class", [ColumnParallelLinear, ReplicatedLinear])
def test_a_linear_layer_where_gradients_are_needed(base_class):
    layer = from_layer(base_class(IN, 5, return_bias=False), MAX_LORAS, config_for(), [])
    layer.requires_grad_(False).set_mapping(used([0, -1, 0]))
    layer.base_layer.weight.normal_()
    layer.set_lora(0, *random_pair(4, IN, 5))
    x = torch.randn(3, IN)
    with torch.no_grad():
        expected = layer(x)
    assert torch.equal(layer(x), expected), "nothing needs a gradient"
    for needs in (x.clone().requires_grad_(), x):
        layer.requires_grad_(needs is x)
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            layer(needs)
        with torch.inference_mode():
            assert torch.equal(layer(needs), expected)


@pytest.mark.parametrize(
    ("layer", "instead"), [(nn.Linear(3, 2), "ReplicatedLinear"), (nn.Embedding(3, 2), "VocabParallelEmbedding")]
)
def test_what_no_class_wraps_is_named_once(layer, instead):
    with pytest.warns(UserWarning, match=instead):
        assert from_layer(layer, 2, config_for(), []) is layer
