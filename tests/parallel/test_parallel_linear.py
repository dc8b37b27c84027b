"""Linear base layers: shards together equal the dense layer, loaders take full checkpoints; their dense product."""

from collections.abc import Callable

import pytest
import torch

from punica.ops.quant import dequantize, quantize_per_channel
from punica.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    matmul,
)


def dense(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def load(layer, weight, bias=None, shard_id=None):
    layer.weight_loader(layer.weight, weight, shard_id)
    if bias is not None:
        layer.weight_loader(layer.bias, bias, shard_id)
    return layer


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [True, False], ids=["fused-checkpoint", "slice-by-slice"])
def test_merged_holds_a_piece_of_every_matrix(stacked):
    sizes, x = [8, 4, 12], torch.randn(3, 5)
    weights, biases = [torch.randn(size, 5) for size in sizes], [torch.randn(size) for size in sizes]
    for rank in range(4):
        layer = MergedColumnParallelLinear(5, sizes, tp_rank=rank, tp_size=4)
        assert (layer.output_sizes, layer.output_partition_sizes) == (sizes, [2, 1, 3])
        if stacked:
            load(layer, torch.cat(weights), torch.cat(biases))
        else:
            for i in (2, 0, 1):
                load(layer, weights[i], biases[i], shard_id=i)
        own = [dense(x, w, b).chunk(4, dim=-1)[rank] for w, b in zip(weights, biases, strict=True)]
        assert_close(layer(x)[0], torch.cat(own, dim=-1))


@pytest.mark.parametrize(("tp_size", "stacked"), [(1, True), (2, False), (4, True), (4, False)])
def test_qkv_heads(tp_size, stacked):
    head, heads, kv_heads, hidden = 2, 4, 2, 6
    matrices = {"q": torch.randn(8, hidden), "k": torch.randn(4, hidden), "v": torch.randn(4, hidden)}
    x = torch.randn(3, hidden)
    for rank in range(tp_size):
        layer = QKVParallelLinear(hidden, head, heads, kv_heads, bias=False, tp_rank=rank, tp_size=tp_size)
        if stacked:
            load(layer, torch.cat(list(matrices.values())))
        else:
            for shard_id in ("v", "q", "k"):
                load(layer, matrices[shard_id], shard_id=shard_id)
        shards = []
        for name, matrix in matrices.items():
            count = tp_size if name == "q" else min(tp_size, kv_heads)
            shards.append(dense(x, matrix).chunk(count, dim=-1)[rank * count // tp_size])
        assert_close(layer(x)[0], torch.cat(shards, dim=-1))


@pytest.mark.parametrize("cls", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(
    ("bias", "skip", "return_bias"),
    [(True, True, True), (True, False, True), (True, True, False), (False, True, True)],
    ids=["skipped and returned", "added", "skipped", "none"],
)
def test_bias_handling(cls, bias, skip, return_bias):
    layer = cls(4, 6, bias=bias, skip_bias_add=skip, return_bias=return_bias, params_dtype=torch.float64)
    weight, offset, x = torch.randn(6, 4), torch.randn(6), torch.randn(3, 4).double()
    load(layer, weight, offset if bias else None)
    result = layer(x)
    output, returned = result if return_bias else (result, None)
    torch.testing.assert_close(output, dense(x, weight, offset if bias and not skip else None))
    if bias and skip and return_bias:
        assert returned is layer.bias
    else:
        assert returned is None


def test_parameters_are_frozen_and_annotated():
    layer = ColumnParallelLinear(4, 6, params_dtype=torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert not layer.weight.requires_grad
    assert (layer.weight.input_dim, layer.weight.output_dim) == (1, 0)


TWO_OF = {"tp_rank": 0, "tp_size": 2}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ColumnParallelLinear(4, 6, tp_rank=0, tp_size=4), "6 .* 4"),
        (lambda: RowParallelLinear(6, 4, tp_rank=0, tp_size=4), "6 .* 4"),
        (lambda: MergedColumnParallelLinear(4, [8, 0]), r"output_sizes\[1\] is 0"),
        (lambda: MergedColumnParallelLinear(4, []), "output_sizes"),
        (lambda: ColumnParallelLinear(4, 6, output_sizes=[2, 3]), "output_size=6"),
        (lambda: ReplicatedLinear(0, 6), "input_size is 0"),
        (lambda: QKVParallelLinear(4, 2, 6, 3, **TWO_OF), "3 .* 2"),
        (lambda: QKVParallelLinear(4, 2, 12, 4, tp_rank=0, tp_size=6), "6 .* 4"),
        (lambda: ColumnParallelLinear(4, 4, tp_rank=2, tp_size=2), "=2, tp_size=2"),
        (lambda: RowParallelLinear(4, 4, reduce_results=False, **TWO_OF), "bias"),
    ],
    ids=["column", "row", "zero", "empty", "sum", "no-input", "kv", "kv-replicas", "rank", "row-bias"],
)
def test_bad_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("layer", "name", "shape", "shard_id", "message"),
    [
        (ReplicatedLinear(4, 6), "weight", (4, 6), None, r"\(6, 4\), .*\(4, 6\)"),
        (ReplicatedLinear(4, 6), "weight", (6, 4), 0, "shard_id"),
        (ColumnParallelLinear(4, 6, **TWO_OF), "weight", (3, 4), None, r"\(6, 4\)"),
        (ColumnParallelLinear(4, 6), "bias", (6, 1), None, r"\(6,\), .*\(6, 1\)"),
        (MergedColumnParallelLinear(4, [2, 6]), "weight", (2, 4), 1, r"\(6, 4\)"),
        (MergedColumnParallelLinear(4, [2, 6]), "weight", (6, 4), 2, r"\[0, 1\], got 2"),
        (QKVParallelLinear(4, 2, 4, 2), "weight", (8, 4), "k", r"\(4, 4\), .*\(8, 4\)"),
        (QKVParallelLinear(4, 2, 4, 2), "weight", (8, 4), 0, "'q', 'k', 'v'"),
        (RowParallelLinear(4, 6, tp_rank=1, tp_size=2), "weight", (6, 2), None, r"\(6, 4\)"),
    ],
    ids=["replicated", "replicated-id", "part", "bias", "merged", "merged-id", "qkv", "qkv-id", "row"],
)
def test_wrong_checkpoint_leaves_the_parameter_alone(layer, name, shape, shard_id, message):
    parameter = getattr(layer, name)
    parameter.data.fill_(3.0)
    with pytest.raises(ValueError, match=message):
        layer.weight_loader(parameter, torch.ones(shape), shard_id)
    assert (parameter == 3.0).all()


def test_wrong_input_width():
    row = RowParallelLinear(4, 6, input_is_parallel=False, **TWO_OF)
    for layer, width in ((ColumnParallelLinear(4, 6), 6), (RowParallelLinear(4, 6, **TWO_OF), 4), (row, 2)):
        with pytest.raises(ValueError, match=str(width)):
            layer(torch.randn(2, width))


@pytest.mark.parametrize("rows", [0, 1, 33], ids=lambda rows: f"rows{rows}")
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_equals_float64(rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight, b = torch.randn(rows, 70).to(dtype), torch.randn(45, 70).to(dtype), torch.randn(45).to(dtype)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    found = matmul.linear(x, weight, b if bias else None)
    assert found.shape == (rows, 45)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype != torch.bfloat16 else 2e-1
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=tolerance)


def test_strided_rows_and_leading_dimensions() -> None:
    wide, weight = torch.randn(6, 200), torch.randn(9, 100)
    strided = wide[::2, :100]
    torch.testing.assert_close(matmul.linear(strided, weight), strided.contiguous() @ weight.T, atol=1e-4, rtol=1e-4)
    cube = torch.randn(2, 3, 100)
    torch.testing.assert_close(matmul.linear(cube, weight), cube @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "weight", "bias"])
def test_gradients_are_those_of_the_product(which: int, shape: tuple[int, ...]) -> None:
    def gradient(product: Callable[..., torch.Tensor]) -> torch.Tensor:
        operands[which].grad = None
        product(*operands).square().sum().backward()
        return operands[which].grad

    operands = [torch.randn(*shape), torch.randn(5, 8), torch.randn(5)]
    operands[which].requires_grad_()
    torch.testing.assert_close(gradient(matmul.linear), gradient(torch.nn.functional.linear))
    if which == 0:
        values, scale = quantize_per_channel(operands[1])
        operands[1] = dequantize(values, scale)
        found = gradient(lambda x, _, bias: matmul.fp8_linear(x, values, scale, bias))
        torch.testing.assert_close(found, gradient(torch.nn.functional.linear))


def test_falls_back_where_torch_lacks_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "onednn_linear", lambda: None)
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    assert torch.equal(matmul.linear(x, weight), torch.nn.functional.linear(x, weight))
