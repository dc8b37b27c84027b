"""Slots: shapes, what `set_lora` writes, and that a refused adapter leaves everything as it was."""

import pytest
import torch
from layer_cases import config_for, random_pair, used
from torch import nn

from punica.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
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


def column(**options):
    layer = ColumnParallelLinearWithLoRA(ColumnParallelLinear(6, 10, **options))
    layer.create_lora_weights(4, config_for())
    return layer


def merged(**options):
    layer = MergedColumnParallelLinearWithLoRA(MergedColumnParallelLinear(6, [8, 4], **options))
    layer.create_lora_weights(4, config_for())
    return layer


def buffers(layer):
    return [*layer.lora_a_stacked, *layer.lora_b_stacked, layer.lora_ranks]


TWO, FOUR = {"tp_rank": 1, "tp_size": 2}, {"tp_rank": 3, "tp_size": 4}


@pytest.mark.parametrize(
    ("base", "packed", "sharded", "a_shapes", "b_shapes"),
    [
        pytest.param(ReplicatedLinear(6, 10), 0, False, [(8, 6)], [(10, 8)], id="replicated"),
        pytest.param(ColumnParallelLinear(6, 10, **TWO), 0, True, [(4, 6)], [(5, 8)], id="column-sharded"),
        pytest.param(
            MergedColumnParallelLinear(6, [8, 4], **TWO), 2, False, [(8, 6)] * 2, [(4, 8), (2, 8)], id="merged"
        ),
        pytest.param(QKVParallelLinear(6, 2, 4, 2, **FOUR), 3, True, [(2, 6)] * 3, [(2, 8)] * 3, id="qkv-sharded"),
        pytest.param(QKVParallelLinear(6, 2, 4, 2, **TWO), 1, False, [(8, 6)], [(8, 8)], id="qkv-as-one"),
        pytest.param(RowParallelLinear(6, 10, **TWO), 0, False, [(8, 3)], [(10, 8)], id="row"),
        pytest.param(RowParallelLinear(6, 10, **TWO), 0, True, [(8, 3)], [(5, 8)], id="row-sharded"),
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_buffers(base, packed, sharded, a_shapes, b_shapes, dtype, size):
    layer = from_layer(base, 4, config_for(dtype, fully_sharded_loras=sharded), ["m"] * packed)
    assert [tuple(t.shape) for t in layer.lora_a_stacked] == [(4, 1, *shape) for shape in a_shapes]
    assert [tuple(t.shape) for t in layer.lora_b_stacked] == [(4, 1, *shape) for shape in b_shapes]
    assert all(t.dtype == dtype for t in buffers(layer)[:-1])
    assert all(t.is_contiguous() for t in (*layer.lora_a_stacked, *(b.mT for b in layer.lora_b_stacked)))
    assert (layer.lora_ranks.dtype, tuple(layer.lora_ranks.shape)) == (torch.int32, (len(a_shapes), 4))
    assert all((t == 0).all() for t in buffers(layer))
    assert layer.slot_bytes == size * sum(rows * cols for rows, cols in (*a_shapes, *b_shapes))


def held(layer, slot, i=0):
    return layer.lora_a_stacked[i][slot, 0], layer.lora_b_stacked[i][slot, 0]


def test_second_adapter_leaves_no_trace_of_the_first():
    layer, empty = column(), column()
    layer.set_lora(3, torch.full((2, 6), 7.0), torch.full((10, 2), 7.0))
    layer.set_lora(1, torch.ones(8, 6), torch.ones(10, 8))
    layer.set_lora(1, torch.full((2, 6), 2.0), torch.full((10, 2), 3.0))
    empty.set_lora(1, torch.full((2, 6), 2.0), torch.full((10, 2), 3.0))
    a, b = held(layer, 1)
    assert (bool((a[:2] == 2).all()), bool((b[:, :2] == 3).all())) == (True, True)
    assert all(torch.equal(*pair) for pair in zip((a, b), held(empty, 1), strict=True))
    assert (layer.lora_ranks.tolist(), layer.filled_slots) == ([[0, 2, 0, 2]], {1, 3})
    layer.reset_lora(1)
    assert (layer.lora_ranks.tolist(), layer.filled_slots) == ([[0, 0, 0, 2]], {3})
    assert not any(bool(part.any()) for slot in (0, 1, 2) for part in held(layer, slot))
    assert bool((held(layer, 3)[1][:, :2] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_transposed_source_of_another_dtype(dtype):
    layer = column()
    a, b = torch.randn(6, 3).to(dtype).T, torch.randn(3, 10).to(dtype).T
    layer.set_lora(0, a, b)
    assert torch.equal(held(layer, 0)[0][:3], a.float())
    assert torch.equal(held(layer, 0)[1][:, :3], b.float())


A, B = torch.ones(2, 6), torch.ones(10, 2)
B8, B4 = torch.ones(8, 2), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("build", "index", "lora_a", "lora_b", "error", "message"),
    [
        pytest.param(column, 1.0, A, B, TypeError, "index", id="float-index"),
        pytest.param(column, 4, A, B, ValueError, r"4\), got 4", id="index-too-large"),
        pytest.param(column, 1, [A], [B], TypeError, "list", id="list-for-tensor"),
        pytest.param(merged, 1, A, B, TypeError, "Tensor", id="tensor-for-list"),
        pytest.param(merged, 1, [A, A], [B8], ValueError, "2 and 1", id="unequal-lists"),
        pytest.param(merged, 1, [A] * 3, [B8, B4, B4], ValueError, "2 slices", id="too-many"),
        pytest.param(merged, 1, [A, 3], [B8, B4], TypeError, "slice 1: lora_a .* int", id="not-a-tensor"),
        pytest.param(column, 1, A[0], B, ValueError, r"lora_a .*\(6,\)", id="1-d"),
        pytest.param(column, 1, A.int(), B, TypeError, "int32", id="int-a"),
        pytest.param(column, 1, A, B.to(torch.float8_e4m3fn), TypeError, "float8", id="fp8-b"),
        pytest.param(column, 1, torch.ones(3, 6), B, ValueError, "rank 3 .* rank 2", id="rank-mismatch"),
        pytest.param(column, 1, torch.ones(9, 6), torch.ones(10, 9), ValueError, "rank 9 .* 8", id="rank"),
        pytest.param(column, 1, torch.ones(2, 5), B, ValueError, "6 .* 5", id="in-size"),
        pytest.param(column, 1, A, torch.ones(5, 2), ValueError, "slice 0: lora_b .* 10 .* 5", id="out"),
        pytest.param(merged, 1, [A, A], [B8, B8], ValueError, "slice 1: lora_b .* 4 .* 8", id="slice-out"),
        pytest.param(merged, 1, [A, None], [B8, B4], ValueError, "slice 1: lora_a is None", id="half-none"),
        pytest.param(column, 1, A, B.to("meta"), TypeError, "lora_b .* meta", id="meta"),
        pytest.param(column, 1, A, B.to_sparse(), TypeError, r"lora_b .*sparse", id="sparse"),
    ],
)
def test_refused_adapter_changes_nothing(build, index, lora_a, lora_b, error, message):
    layer = build()
    if build is merged:
        layer.set_lora(1, [torch.randn(3, 6)] * 2, [torch.randn(8, 3), torch.randn(4, 3)])
    else:
        layer.set_lora(1, torch.randn(3, 6), torch.randn(10, 3))
    before = [t.clone() for t in buffers(layer)]
    with pytest.raises(error, match=message):
        layer.set_lora(index, lora_a, lora_b)
    assert all(torch.equal(now, then) for now, then in zip(buffers(layer), before, strict=True))


def test_full_sizes_are_asked_for_on_every_rank():
    row = RowParallelLinearWithLoRA(RowParallelLinear(8, 10, **TWO))
    row.create_lora_weights(4, config_for())
    with pytest.raises(ValueError, match=r"8 .* 4"):
        row.set_lora(0, torch.ones(2, 4), torch.ones(10, 2))
    qkv = MergedQKVParallelLinearWithLoRA(QKVParallelLinear(8, 2, 4, 2, **FOUR))
    qkv.create_lora_weights(4, config_for())
    a = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"slice 1: lora_b .* 4 .* 8"):
        qkv.set_lora(0, [a, a, a], [torch.ones(8, 2)] * 3)


def test_bad_creation():
    layer = ColumnParallelLinearWithLoRA(ColumnParallelLinear(6, 10))
    for given, dtype, error, value in ((0, torch.float32, ValueError, "is 0"), (4, "auto", TypeError, "auto")):
        with pytest.raises(error, match=value):
            layer.create_lora_weights(given, config_for(dtype))
    layer.create_lora_weights(4, config_for())


@pytest.mark.parametrize("name", ["weight_packed", "qweight", None])
def test_device_and_weight_of_a_quantised_base(name):
    base = ColumnParallelLinear(6, 10)
    packed = nn.Parameter(torch.zeros(5, 6, device="meta"))
    del base.weight
    if name is None:
        with pytest.raises(ValueError, match="unsupported base layer ColumnParallelLinear"):
            ColumnParallelLinearWithLoRA(base)
        return
    setattr(base, name, packed)
    layer = ColumnParallelLinearWithLoRA(base)
    assert layer.device == torch.device("meta")
    assert layer.weight is packed


def test_parameters_in_training_fill_a_slot_like_any_tensor():
    """As they come out of a PEFT model that is still being trained: the slot must not become part of its graph."""
    layer = ColumnParallelLinearWithLoRA(ColumnParallelLinear(6, 7, return_bias=False))
    layer.create_lora_weights(4, config_for())
    layer.set_mapping(used([1, -1]))
    a, b = random_pair(4, 6, 7)
    layer.set_lora(1, torch.nn.Parameter(a), torch.nn.Parameter(b))
    assert not layer.lora_a_stacked[0].requires_grad
    assert torch.equal(layer.lora_b_stacked[0][1, 0, :, :4], b)
    assert layer(torch.randn(2, 6)).shape == (2, 7)
