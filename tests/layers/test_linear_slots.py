"""Slots: shapes, what `set_lora` writes, packed groups, FP8; a refused adapter leaves everything as it was."""

import pytest
import torch
from layer_cases import ALONE, IN, LINEAR, config_for, linear_layer, random_pair, used
from torch import nn

from punica.config import LoRAConfig
from punica.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    expand_groups,
    from_layer,
)
from punica.ops.quant import Fp8Matrix, quantize_per_channel
from punica.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tests.ops.helpers import E4M3, E5M2


def made(lora_class, base):
    layer = lora_class(base)
    layer.create_lora_weights(4, config_for())
    return layer


def column():
    return made(ColumnParallelLinearWithLoRA, ColumnParallelLinear(6, 10, return_bias=False))


def merged():
    return made(MergedColumnParallelLinearWithLoRA, MergedColumnParallelLinear(6, [8, 4]))


def variable():
    return made(MergedColumnParallelLinearVariableSliceWithLoRA, MergedColumnParallelLinear(5, [8, 4, 4, 6]))


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
B8, B4, A5 = torch.ones(8, 2), torch.ones(4, 2), torch.ones(3, 5)


@pytest.mark.parametrize(
    ("build", "index", "lora_a", "lora_b", "error", "message"),
    [
        pytest.param(column, 1.0, A, B, TypeError, "index", id="float-index"),
        pytest.param(column, torch.tensor(1), A, B, TypeError, "index must be an int, got Tensor", id="tensor-index"),
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
        pytest.param(variable, 1, A5, torch.ones(21, 3), ValueError, r"22 .*\(21, 3\)", id="single-rows"),
        pytest.param(variable, 1, A5, torch.ones(22), ValueError, r"\(22,\)", id="single-1-d"),
        pytest.param(variable, 1, [A5, A5], torch.ones(22, 3), ValueError, "2 and 4", id="two-a"),
    ],
)
def test_refused_adapter_changes_nothing(build, index, lora_a, lora_b, error, message):
    layer, sizes = build(), {column: [10], merged: [8, 4], variable: [8, 4, 4, 6]}[build]
    a, b = torch.randn(3, layer.input_size), [torch.randn(size, 3) for size in sizes]
    layer.set_lora(1, *(a, b[0]) if build is column else ([a] * len(b), b))
    before = [t.clone() for t in buffers(layer)]
    with pytest.raises(error, match=message):
        layer.set_lora(index, lora_a, lora_b)
    assert all(torch.equal(now, then) for now, then in zip(buffers(layer), before, strict=True))


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
    layer = column()
    layer.set_mapping(used([1, -1]))
    a, b = random_pair(4, 6, 10)
    layer.set_lora(1, torch.nn.Parameter(a), torch.nn.Parameter(b))
    assert not layer.lora_a_stacked[0].requires_grad
    assert torch.equal(layer.lora_b_stacked[0][1, 0, :, :4], b)
    assert layer(torch.randn(2, 6)).shape == (2, 10)


def expand(sizes, rows):
    """Expanded A and B for groups of these rows (None: not adapted), A being the group's index."""
    a = [None if m is None else torch.tensor([[float(i)]]) for i, m in enumerate(rows)]
    b = [None if m is None else torch.randn(m, 2) for m in rows]
    return a, b, *expand_groups(a, b, sizes)


@pytest.mark.parametrize(
    ("sizes", "rows", "owner"),
    [
        pytest.param((8, 4, 4, 6), (16, 6), (0, 0, 0, 1), id="two-groups-for-four"),
        pytest.param((8, 4, 4, 6), (None, 4, 6), (None, None, 1, 2), id="none-covers-two"),
        pytest.param((8, 4, 4, 6), (8, None, 10), (0, None, 2, 2), id="none-in-the-middle"),
        pytest.param((4, 4, 4, 4), (None, 4, None), (None, 1, None, None), id="fewest-slices-first"),
    ],
)
def test_groups_cover_slices(sizes, rows, owner):
    a, b, full_a, full_b = expand(sizes, rows)
    assert len(full_a) == len(full_b) == len(sizes)
    taken = [0] * len(rows)
    for size, index, slice_a, slice_b in zip(sizes, owner, full_a, full_b, strict=True):
        if index is None:
            assert slice_a is None
            assert slice_b is None
        else:
            assert slice_a is a[index]
            assert torch.equal(slice_b, b[index][taken[index] : taken[index] + size])
            taken[index] += size


@pytest.mark.parametrize(
    ("sizes", "rows", "message"),
    [
        pytest.param((8, 4, 4, 6), (16, 5), "slice 3 .group 1 .* 5", id="last-too-short"),
        pytest.param((8, 4, 4, 6), (10, 12), "slice 0 .group 0 .* 10", id="cuts-a-slice"),
        pytest.param((8, 4, 4, 6), (8, 4), "slice 2", id="too-few-rows"),
        pytest.param((8, 4), (None, None, None), "2 slices", id="more-nones-than-slices"),
    ],
)
def test_impossible_grouping(sizes, rows, message):
    with pytest.raises(ValueError, match=message) as info:
        expand(sizes, rows)
    assert str(list(sizes)) in str(info.value)


@pytest.mark.parametrize("several", ["neither", "a", "b"])
def test_single_tensors_for_many_slices(several):
    layer, a, b = variable(), [torch.randn(3, 5) for _ in range(4)], torch.randn(22, 3)
    a = a if several == "a" else a[:1] * 4
    layer.set_lora(1, a if several == "a" else a[0], [b[:16], b[16:]] if several == "b" else b)
    assert all(torch.equal(held[1, 0, :3], given) for held, given in zip(layer.lora_a_stacked, a, strict=True))
    assert torch.equal(torch.cat([held[1, 0, :, :3] for held in layer.lora_b_stacked]), b)
    assert layer.lora_ranks[:, 1].tolist() == [3, 3, 3, 3]
    layer.set_lora(1, a[0], [torch.randn(8, 3), None, None, torch.randn(6, 3)])
    assert layer.lora_ranks[:, 1].tolist() == [3, 0, 0, 3]
    assert (layer.lora_a_stacked[1] == 0).all()


def test_expansion_splits_by_full_sizes_on_every_rank():
    base = QKVParallelLinear(6, 2, 4, 2, tp_rank=3, tp_size=4)
    layer = made(MergedQKVParallelLinearWithLoRA, base)
    b = torch.arange(16).float().unsqueeze(1)
    layer.set_lora(0, [torch.ones(1, 6)] * 2, [b[:12], b[12:]])
    assert [stacked[0, 0, :, 0].tolist() for stacked in layer.lora_b_stacked] == [[6, 7], [10, 11], [14, 15]]


def test_slots_are_about_half_as_large():
    """0.57 of 16 bits with one float32 scale per channel, for a square layer and rank 16 (0.5 + 4 / (2 * 2 * 16))."""
    sizes = []
    for fp8 in (None, E4M3):
        config = LoRAConfig(16, 1, lora_dtype=torch.float16, fp8=fp8)
        layer = from_layer(ReplicatedLinear(1024, 1024, params_dtype=torch.float16), 1, config, [])
        sizes.append(layer.slot_bytes)
    assert sizes[0] == 2 * 16 * 1024 * 2
    assert sizes[1] / sizes[0] == pytest.approx(0.5625, abs=1e-3)


@pytest.mark.parametrize("kind", ["tensor", "fp8", "other fp8"])
def test_set_lora_takes_tensors_and_fp8(kind):
    config = config_for(torch.float32, fp8=E4M3)
    layer, _ = linear_layer(LINEAR["replicated"], config, place=ALONE)
    a, b = random_pair(3, IN, 12)
    form = E5M2 if kind == "other fp8" else E4M3
    given = (a, b) if kind == "tensor" else (Fp8Matrix.of(a, form), Fp8Matrix.of(b, form))
    layer.set_lora(1, *given)
    sources = (a, b) if kind == "tensor" else tuple(matrix.real() for matrix in given)
    (a_values, a_scale), (b_values, b_scale) = (quantize_per_channel(w) for w in sources)
    assert torch.equal(layer.lora_a_stacked[0][1, 0, :3].float(), a_values.float())
    assert torch.equal(layer.lora_b_stacked[0][1, 0, :, :3].float(), b_values.float())
    assert torch.equal(layer.lora_a_scale[0][1, 0, :3], a_scale)
    assert torch.equal(layer.lora_b_scale[0][1, 0], b_scale)
    assert (layer.lora_a_scale[0][1, 0, 3:] == 0).all()
    assert layer.lora_ranks[0, 1] == 3
    layer.reset_lora(1)
    for part in layer.slot_parts():
        assert (part.matrix(1).float() == 0).all()


def test_fp8_in_slots_of_16_bits_and_groups_of_packed_fp8():
    """Slots of 16 bits hold what FP8 stands for. One B over several slices: its scales are split as it is."""
    a, b = random_pair(4, IN, 24)
    whole = Fp8Matrix.of(b, E4M3)
    layer, plain = (
        linear_layer(LINEAR["variable"], config_for(torch.bfloat16, fp8=fp8), place=ALONE)[0] for fp8 in (E4M3, None)
    )
    for one in (layer, plain):
        one.set_lora(0, Fp8Matrix.of(a, E4M3), whole)
    assert torch.equal(torch.cat([scale[0, 0] for scale in layer.lora_b_scale]), whole.scale)
    held, real = (torch.cat([stacked[0, 0, :, :4].float() for stacked in one.lora_b_stacked]) for one in (layer, plain))
    assert torch.equal(held, whole.values.float())
    assert torch.equal(real, whole.real().bfloat16().float())
    assert torch.equal(plain.lora_a_stacked[0][0, 0, :4], Fp8Matrix.of(a, E4M3).real().bfloat16())
