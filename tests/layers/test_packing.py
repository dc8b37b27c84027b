"""Packed adapters: groups that cover several slices, absent slices, single tensors, impossible groupings."""

import pytest
import torch
from layer_cases import config_for

from punica.layers import (
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    expand_groups,
)
from punica.parallel import MergedColumnParallelLinear, QKVParallelLinear


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


def variable():
    layer = MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinear(5, [8, 4, 4, 6]))
    layer.create_lora_weights(4, config_for())
    return layer


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


@pytest.mark.parametrize(
    ("lora_a", "lora_b", "message"),
    [
        (torch.ones(3, 5), torch.ones(21, 3), r"22 .*\(21, 3\)"),
        (torch.ones(3, 5), torch.ones(22), r"\(22,\)"),
        ([torch.ones(3, 5)] * 2, torch.ones(22, 3), "2 and 4"),
    ],
    ids=["rows", "1-d", "two-a"],
)
def test_bad_single_tensor(lora_a, lora_b, message):
    layer = variable()
    with pytest.raises(ValueError, match=message):
        layer.set_lora(1, lora_a, lora_b)
    assert (layer.lora_ranks == 0).all()


def test_expansion_splits_by_full_sizes_on_every_rank():
    base = QKVParallelLinear(6, 2, 4, 2, tp_rank=3, tp_size=4)
    layer = MergedQKVParallelLinearWithLoRA(base)
    layer.create_lora_weights(4, config_for())
    b = torch.arange(16).float().unsqueeze(1)
    layer.set_lora(0, [torch.ones(1, 6)] * 2, [b[:12], b[12:]])
    assert [stacked[0, 0, :, 0].tolist() for stacked in layer.lora_b_stacked] == [[6, 7], [10, 11], [14, 15]]
