"""Every linear LoRA class on one rank: base output plus each row's own dense LoRA term."""

import sys

import pytest
import torch

from punica.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from punica.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from punica.wrapper import PunicaWrapperCPU

IN = 10
SLOTS = [0, -1, 2, 2, 1, 0]
RANKS = {0: 8, 1: 1, 2: 5}

# class, how to build the base layer, output sizes of the slices that have their own A and B
CASES = {
    "replicated": (ReplicatedLinearWithLoRA, lambda **kw: ReplicatedLinear(IN, 7, **kw), (7,)),
    "column": (ColumnParallelLinearWithLoRA, lambda **kw: ColumnParallelLinear(IN, 9, **kw), (9,)),
    "merged-as-one": (ColumnParallelLinearWithLoRA, lambda **kw: MergedColumnParallelLinear(IN, [5, 6], **kw), (11,)),
    "merged": (MergedColumnParallelLinearWithLoRA, lambda **kw: MergedColumnParallelLinear(IN, [5, 6], **kw), (5, 6)),
    "variable": (
        MergedColumnParallelLinearVariableSliceWithLoRA,
        lambda **kw: MergedColumnParallelLinear(IN, [8, 3, 5], **kw),
        (8, 3, 5),
    ),
    "qkv-as-one": (QKVParallelLinearWithLoRA, lambda **kw: QKVParallelLinear(IN, 3, 4, 2, **kw), (24,)),
    "qkv": (MergedQKVParallelLinearWithLoRA, lambda **kw: QKVParallelLinear(IN, 3, 4, 2, **kw), (12, 6, 6)),
    "row": (RowParallelLinearWithLoRA, lambda **kw: RowParallelLinear(IN, 7, **kw), (7,)),
}
case_names = pytest.mark.parametrize("case", CASES)


def randomize(base):
    for parameter in base.parameters():
        parameter.data.normal_()
    return base


def fill(layer, sizes, random_pair, ranks=RANKS):
    """Put an adapter of every rank into its slot; returns them by slot, one pair per slice."""
    adapters = {slot: [random_pair(rank, IN, size) for size in sizes] for slot, rank in ranks.items()}
    for slot, pairs in adapters.items():
        a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        packed = isinstance(layer, MergedColumnParallelLinearWithLoRA)
        layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    return adapters


@case_names
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("skip", [True, False], ids=["skip_bias_add", "add_bias"])
@pytest.mark.parametrize("return_bias", [True, False], ids=["tuple", "tensor"])
def test_base_plus_lora(case, bias, skip, return_bias, lora_config, wrapper_for, lora_term, random_pair):
    cls, build, sizes = CASES[case]
    base = randomize(build(bias=bias, skip_bias_add=skip, return_bias=return_bias))
    layer = cls(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for(SLOTS))
    adapters = fill(layer, sizes, random_pair)
    x = torch.randn(6, IN)
    result, expected = layer(x), base(x)
    if return_bias:
        assert result[1] is expected[1]
        assert (result[1] is base.bias) if bias and skip else (result[1] is None)
        result, expected = result[0], expected[0]
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    assert torch.equal(result[1], expected[1]), "a row without adapter must be the base layer's, bit for bit"
    reference = expected.double() + lora_term(x, SLOTS, adapters, sizes)
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


@case_names
@pytest.mark.parametrize("shape", [(2, 3, IN), (6, 1, IN)], ids=["2x3", "6x1"])
@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
def test_batch_dimensions(case, shape, prefill, lora_config, wrapper_for, lora_term, random_pair):
    cls, build, sizes = CASES[case]
    base = randomize(build(return_bias=False))
    layer = cls(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for(SLOTS, prefill))
    adapters = fill(layer, sizes, random_pair)
    x = torch.randn(shape)
    result = layer(x)
    assert result.shape == (*shape[:-1], sum(sizes))
    reference = base(x).double() + lora_term(x, SLOTS, adapters, sizes)
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


@case_names
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.bfloat16, 1.6e-2, 1e-2), (torch.float16, 4e-3, 2e-3)])
def test_half_precision(case, dtype, rtol, atol, lora_config, wrapper_for, lora_term, random_pair):
    cls, build, sizes = CASES[case]
    base = randomize(build(return_bias=False, params_dtype=dtype, bias=False))
    layer = cls(base)
    layer.create_lora_weights(4, lora_config(lora_dtype=dtype))
    layer.set_mapping(wrapper_for(SLOTS))
    adapters = {slot: [random_pair(rank, IN, size, dtype) for size in sizes] for slot, rank in RANKS.items()}
    packed = isinstance(layer, MergedColumnParallelLinearWithLoRA)
    for slot, pairs in adapters.items():
        a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    x = torch.randn(6, IN, dtype=dtype)
    result = layer(x)
    assert result.dtype == dtype
    reference = base(x).double() + lora_term(x, SLOTS, adapters, sizes)
    torch.testing.assert_close(result.double(), reference, rtol=rtol, atol=atol)


@case_names
def test_no_rows(case, lora_config, wrapper_for):
    cls, build, sizes = CASES[case]
    layer = cls(build(return_bias=False))
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for([]))
    assert layer(torch.empty(0, IN)).shape == (0, sum(sizes))


@case_names
def test_missing_call_is_named(case, lora_config, wrapper_for):
    cls, build, _ = CASES[case]
    layer = cls(randomize(build()))
    x = torch.randn(2, IN)
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer(x)
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer.set_lora(0, None, None)
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer.reset_lora(0)
    layer.create_lora_weights(4, lora_config())
    with pytest.raises(RuntimeError, match="set_mapping"):
        layer(x)
    with pytest.raises(RuntimeError, match="was called before"):
        layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for([-1, -1]))
    assert torch.equal(layer(x)[0], layer.base_layer(x)[0])


@case_names
def test_wrong_input_width_is_found_before_the_matmul(case, lora_config, wrapper_for):
    cls, build, _ = CASES[case]
    base = build()
    layer = cls(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for([0]))
    base.quant_method = None
    with pytest.raises(ValueError, match=f"last input dimension must be {IN}, got input of shape \\(1, {IN + 1}\\)"):
        layer(torch.randn(1, IN + 1))


class Gate(ReplicatedLinear):
    """A router that computes in float32, whatever the model's dtype."""

    def forward(self, input_):
        return self._result(torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias))


def test_gate_keeps_its_own_forward_and_dtype(lora_config, wrapper_for, lora_term, random_pair):
    base = randomize(Gate(IN, 7, bias=False, params_dtype=torch.bfloat16))
    layer = ReplicatedLinearWithLoRA(base)
    layer.create_lora_weights(4, lora_config(lora_dtype=torch.bfloat16))
    layer.set_mapping(wrapper_for([0, -1, 1]))
    adapters = {slot: [random_pair(4, IN, 7, torch.bfloat16)] for slot in (0, 1)}
    for slot, ((a, b),) in adapters.items():
        layer.set_lora(slot, a, b)
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    result = layer(x)[0]
    assert result.dtype == torch.float32
    reference = base(x)[0].double() + lora_term(x, [0, -1, 1], adapters, (7,))
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


def test_adapters_of_another_dtype_than_the_activations(lora_config, wrapper_for, lora_term, random_pair):
    base = randomize(ColumnParallelLinear(IN, 7, return_bias=False))
    layer = ColumnParallelLinearWithLoRA(base)
    layer.create_lora_weights(4, lora_config(lora_dtype=torch.bfloat16))
    layer.set_mapping(wrapper_for([0, -1]))
    a, b = random_pair(4, IN, 7, torch.bfloat16)
    layer.set_lora(0, a, b)
    x = torch.randn(2, IN)
    result = layer(x)
    assert result.dtype == torch.float32
    reference = base(x).double() + lora_term(x.bfloat16(), [0, -1], {0: [(a, b)]}, (7,))
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


class Doubled(MergedColumnParallelLinear):
    """A merged layer that computes in its own way."""

    def forward(self, input_):
        output, bias = super().forward(input_)
        return 2 * output, bias


@pytest.mark.parametrize("cls", [MergedColumnParallelLinearWithLoRA, ColumnParallelLinearWithLoRA])
def test_merged_subclass_keeps_its_own_forward(cls, lora_config, wrapper_for):
    base = randomize(Doubled(IN, [5, 6]))
    layer = cls(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for([-1, -1]))
    x = torch.randn(2, IN)
    assert torch.equal(layer(x)[0], base(x)[0])


def test_a_returned_tensor_is_honoured(lora_config):
    class OutOfPlace:
        def add_lora_linear(self, y, x, a, b, scale, output_slices, **kwargs):
            return y + 1

    base = randomize(RowParallelLinear(IN, 7, return_bias=False))
    layer = RowParallelLinearWithLoRA(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(OutOfPlace())
    x = torch.randn(2, 3, IN)
    assert torch.equal(layer(x), base(x) + 1)


def test_what_the_wrapper_is_given(lora_config):
    calls = []

    class Recorder:
        def add_lora_linear(self, *args, **kwargs):
            calls.append((args, kwargs))

    layer = MergedQKVParallelLinearWithLoRA(QKVParallelLinear(IN, 3, 4, 2))
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(Recorder())
    layer(torch.randn(2, 3, IN))
    layer(torch.randn(6, IN))
    for (y, x, a, b, scale, output_slices), kwargs in calls:
        assert (y.shape, x.shape) == ((6, 24), (6, IN))
        assert a is layer.lora_a_stacked, "a wrapper may remember what it checked"
        assert b is layer.lora_b_stacked
        assert (scale, output_slices) == (1.0, (12, 6, 6))
        assert list(kwargs) == ["lora_ranks"]
        assert kwargs["lora_ranks"] is layer.lora_ranks
    assert len(calls) == 2


@case_names
def test_one_function_lies_between_forward_and_the_wrapper(case, lora_config):
    """Each further one costs every layer of every step host time."""
    callers = []

    class Recorder(PunicaWrapperCPU):
        def add_linear(self, *args, **kwargs):
            frame = sys._getframe(1)
            while frame.f_code.co_name != "_call_impl":
                callers.append(frame.f_code.co_name)
                frame = frame.f_back

    cls, build, _ = CASES[case]
    layer = cls(build())
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(Recorder(8, 8, "cpu", max_loras=4))
    layer(torch.randn(6, IN))
    assert callers == ["apply", "forward"]


@pytest.mark.parametrize("reduce_results", [True, False])
@pytest.mark.parametrize("input_is_parallel", [True, False])
def test_row_flags(input_is_parallel, reduce_results, lora_config, wrapper_for, lora_term, random_pair):
    base = randomize(RowParallelLinear(IN, 7, input_is_parallel=input_is_parallel, reduce_results=reduce_results))
    layer = RowParallelLinearWithLoRA(base)
    layer.create_lora_weights(4, lora_config())
    layer.set_mapping(wrapper_for(SLOTS))
    adapters = fill(layer, (7,), random_pair)
    x = torch.randn(6, IN)
    reference = base(x)[0].double() + lora_term(x, SLOTS, adapters, (7,))
    torch.testing.assert_close(layer(x)[0].double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_contract_method_of_ones_own_is_called(where, lora_config, monkeypatch):
    """In a subclass of the library's wrappers, or in place of the method of one object."""

    def add_lora_linear(*call, **keywords):
        calls.append(keywords)

    class Own(PunicaWrapperCPU):
        pass

    calls, layer = [], RowParallelLinearWithLoRA(RowParallelLinear(IN, 7))
    layer.create_lora_weights(4, lora_config())
    wrapper = Own(8, 8, "cpu", max_loras=4)
    monkeypatch.setattr(Own if where == "class" else wrapper, "add_lora_linear", add_lora_linear)
    layer.set_mapping(wrapper)
    layer(torch.randn(2, IN))
    assert [list(keywords) for keywords in calls] == [["lora_ranks"]]
