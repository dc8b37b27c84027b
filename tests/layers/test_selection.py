"""Which class `from_layer` picks for every base layer, number of packed modules, sharding and tp (L6)."""

import pytest
import torch
from torch import nn

from punica import layers
from punica.layers import (
    LORA_CLASSES,
    ColumnParallelLinearWithLoRA,
    from_layer,
    register_layer_class,
    resolve_layer_class,
)
from punica.layers.utils import _fully_sharded_can_replace, _not_fully_sharded_can_replace
from punica.parallel import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)


class MyReplicated(ReplicatedLinear):
    pass


class MyColumn(ColumnParallelLinear):
    pass


class MyMerged(MergedColumnParallelLinear):
    pass


class MyQKV(QKVParallelLinear):
    pass


class MyRow(RowParallelLinear):
    pass


def build(cls, tp_size, sizes=2):
    place = {"tp_rank": 0, "tp_size": tp_size}
    if issubclass(cls, MergedColumnParallelLinear):
        return cls(8, [4] * sizes, **place)
    if issubclass(cls, QKVParallelLinear):
        return cls(8, 2, 4, 2, **place)
    return cls(8, 8, **place)


# base class, number of merged sizes, packed modules, (class at tp 1, class at tp 2)
NOT_SHARDED = [
    (ReplicatedLinear, 2, 0, "ReplicatedLinearWithLoRA"),
    (MyReplicated, 2, 3, "ReplicatedLinearWithLoRA"),
    (ColumnParallelLinear, 2, 0, "ColumnParallelLinearWithLoRA"),
    (ColumnParallelLinear, 2, 2, "ColumnParallelLinearWithLoRA"),
    (MyColumn, 2, 0, None),
    (MergedColumnParallelLinear, 2, 0, None),
    (MergedColumnParallelLinear, 2, 1, "ColumnParallelLinearWithLoRA"),
    (MyMerged, 2, 1, "ColumnParallelLinearWithLoRA"),
    (MergedColumnParallelLinear, 2, 2, "MergedColumnParallelLinearWithLoRA"),
    (MergedColumnParallelLinear, 4, 2, "MergedColumnParallelLinearWithLoRA"),
    (MyMerged, 2, 2, ("MergedColumnParallelLinearWithLoRA", None)),
    (MergedColumnParallelLinear, 3, 3, "MergedColumnParallelLinearVariableSliceWithLoRA"),
    (MyMerged, 4, 4, "MergedColumnParallelLinearVariableSliceWithLoRA"),
    (MergedColumnParallelLinear, 3, 0, "MergedColumnParallelLinearVariableSliceWithLoRA"),
    (MyMerged, 3, 1, "MergedColumnParallelLinearVariableSliceWithLoRA"),
    (QKVParallelLinear, 2, 1, "QKVParallelLinearWithLoRA"),
    (QKVParallelLinear, 2, 3, "MergedQKVParallelLinearWithLoRA"),
    (QKVParallelLinear, 2, 0, None),
    (QKVParallelLinear, 2, 2, None),
    (MyQKV, 2, 1, None),
    (MyQKV, 2, 3, None),
    (RowParallelLinear, 2, 0, "RowParallelLinearWithLoRA"),
    (RowParallelLinear, 2, 1, "RowParallelLinearWithLoRA"),
    (MyRow, 2, 0, None),
]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("cls", "sizes", "packed", "expected"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}-packed{row[2]}") for row in NOT_SHARDED],
)
def test_not_fully_sharded(cls, sizes, packed, expected, tp_size, lora_config):
    base = build(cls, tp_size, sizes)
    wanted = expected[tp_size - 1] if isinstance(expected, tuple) else expected
    result = from_layer(base, 4, lora_config(), ["m"] * packed)
    if wanted is None:
        assert result is base
    else:
        assert type(result) is getattr(layers, wanted)
        assert result.base_layer is base
        assert len(result.lora_a_stacked) == len(result.output_slices) == result.n_slices


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("cls", [ReplicatedLinear, MyReplicated])
def test_replicated_is_the_same_when_fully_sharded(cls, tp_size, lora_config):
    result = from_layer(build(cls, tp_size), 4, lora_config(fully_sharded_loras=True), [])
    assert type(result) is layers.ReplicatedLinearWithLoRA


@pytest.mark.parametrize("cls", [MergedColumnParallelLinear, MyMerged])
def test_merged_on_one_rank_is_the_same_when_fully_sharded(cls, lora_config):
    result = from_layer(build(cls, 1), 4, lora_config(fully_sharded_loras=True), ["gate", "up"])
    assert type(result) is layers.MergedColumnParallelLinearWithLoRA


@pytest.mark.parametrize(
    ("cls", "sizes", "packed"),
    [
        (MergedColumnParallelLinear, 3, 3),
        (MergedColumnParallelLinear, 3, 1),
        (MyMerged, 2, 2),
    ],
)
def test_no_class_when_fully_sharded(cls, sizes, packed, lora_config):
    base = build(cls, 2, sizes)
    assert from_layer(base, 4, lora_config(fully_sharded_loras=True), ["m"] * packed) is base


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), LogitsProcessor(8), nn.Identity()], ids=["nn.Linear", "logits", "identity"]
)
@pytest.mark.parametrize("packed", [0, 1, 2, 3])
def test_unsuitable_layer_is_returned_and_no_test_raises(layer, packed, lora_config):
    for sharded in (False, True):
        config = lora_config(fully_sharded_loras=sharded)
        assert from_layer(layer, 4, config, ["m"] * packed) is layer


@pytest.mark.parametrize("cls", LORA_CLASSES)
def test_keywords_are_required(cls, lora_config):
    layer = ReplicatedLinear(4, 4)
    with pytest.raises(TypeError, match="lora_config"):
        cls.can_replace_layer(source_layer=layer, packed_modules_list=[])
    with pytest.raises(TypeError, match="positional"):
        cls.can_replace_layer(layer, lora_config(), [])


class Sharded(ColumnParallelLinearWithLoRA):
    """How a fully sharded class reuses its parent's test."""

    @classmethod
    @_fully_sharded_can_replace
    def can_replace_layer(cls, **layer):
        return super().can_replace_layer(**layer, decorate=False)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("base", [ColumnParallelLinear(4, 4), RowParallelLinear(4, 4)], ids=["column", "row"])
def test_decorators(sharded, base, lora_config):
    arguments = {
        "source_layer": base,
        "lora_config": lora_config(fully_sharded_loras=sharded),
        "packed_modules_list": [],
    }
    suits = isinstance(base, ColumnParallelLinear)
    assert Sharded.can_replace_layer(**arguments) is (suits and sharded)
    assert ColumnParallelLinearWithLoRA.can_replace_layer(**arguments) is (suits and not sharded)
    assert ColumnParallelLinearWithLoRA.can_replace_layer(**arguments, decorate=False) is suits


def test_decorators_keep_the_docstring():
    def can_replace(cls, **layer):
        """Why."""
        return True

    assert _not_fully_sharded_can_replace(can_replace).__doc__ == "Why."


def test_registered_replacement_stands_for_the_class(lora_config):
    register_layer_class("ColumnParallelLinear", MyColumn)
    try:
        assert resolve_layer_class(ColumnParallelLinear) is MyColumn
        assert type(from_layer(MyColumn(4, 4), 4, lora_config(), [])) is ColumnParallelLinearWithLoRA
        original = ColumnParallelLinear(4, 4)
        assert from_layer(original, 4, lora_config(), []) is original
    finally:
        register_layer_class("ColumnParallelLinear", ColumnParallelLinear)
    assert type(from_layer(ColumnParallelLinear(4, 4), 4, lora_config(), [])) is ColumnParallelLinearWithLoRA


@pytest.mark.parametrize("bad", [3, torch.Tensor, "MyColumn"])
def test_only_modules_can_be_registered(bad):
    with pytest.raises(TypeError, match=r"nn\.Module class"):
        register_layer_class("ColumnParallelLinear", bad)
    assert resolve_layer_class(ColumnParallelLinear) is ColumnParallelLinear
