"""Which class `from_layer` picks for every base layer, number of packed modules, sharding and tp."""

import pytest
import torch
from layer_cases import config_for
from torch import nn

from punica import layers
from punica.layers import (
    LORA_CLASSES,
    ColumnParallelLinearWithLoRA,
    from_layer,
    from_layer_logits_processor,
    register_layer_class,
    resolve_layer_class,
)
from punica.parallel import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

MyReplicated, MyColumn, MyMerged, MyQKV, MyRow, MyEmbedding, MyHead = (
    type(f"My{base.__name__}", (base,), {})
    for base in (ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear,
                 RowParallelLinear, VocabParallelEmbedding, ParallelLMHead)
)  # fmt: skip


def build(cls, tp_size, sizes=2):
    place = {"tp_rank": 0, "tp_size": tp_size}
    if issubclass(cls, MergedColumnParallelLinear):
        return cls(8, [4] * sizes, **place)
    if issubclass(cls, QKVParallelLinear):
        return cls(8, 2, 4, 2, **place)
    if issubclass(cls, VocabParallelEmbedding):
        return cls(8, 6, padding_size=4, **place)
    return cls(8, 8, **place)


# base class, number of merged sizes, packed modules: class when not fully sharded at tp 1 and at tp 2, fully sharded at
# tp 1 and at tp 2 (without the ending WithLoRA or WithShardedLoRA, "S:" for the latter; None: the layer stays)
COLUMN, MERGED, ROW = "ColumnParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear"
VARIABLE, QKV, MERGED_QKV = f"{MERGED}VariableSlice", "QKVParallelLinear", "MergedQKVParallelLinear"
REPLICATED, EMBEDDING = "ReplicatedLinear", "VocabParallelEmbedding"
TABLE = [
    *[(cls, 2, n, [REPLICATED] * 4) for cls, n in ((ReplicatedLinear, 0), (MyReplicated, 3))],
    *[(ColumnParallelLinear, 2, n, [COLUMN, COLUMN, f"S:{COLUMN}", f"S:{COLUMN}"]) for n in (0, 2)],
    (MyColumn, 2, 0, [None] * 4),
    *[(cls, 2, 0, [None] * 4) for cls in (MergedColumnParallelLinear, MyMerged)],
    *[(cls, n, 1, [COLUMN, COLUMN, f"S:{COLUMN}", f"S:{COLUMN}"]) for cls in (MergedColumnParallelLinear, MyMerged)
      for n in (1, 2)],
    *[(MergedColumnParallelLinear, n, 2, [MERGED, MERGED, MERGED, f"S:{MERGED}"]) for n in (2, 3)],
    *[(MyMerged, n, 2, [MERGED, None, MERGED, None]) for n in (2, 3)],
    *[(cls, n, n, [VARIABLE, VARIABLE, None, None]) for cls in (MergedColumnParallelLinear, MyMerged) for n in (3, 4)],
    *[(cls, 3, n, [VARIABLE, VARIABLE, None, None]) for cls in (MergedColumnParallelLinear, MyMerged) for n in (0, 1)],
    (QKVParallelLinear, 2, 1, [QKV, QKV, f"S:{QKV}", f"S:{QKV}"]),
    (QKVParallelLinear, 2, 3, [MERGED_QKV, MERGED_QKV, f"S:{MERGED_QKV}", f"S:{MERGED_QKV}"]),
    *[(QKVParallelLinear, 2, n, [None] * 4) for n in (0, 2)],
    *[(MyQKV, 2, n, [None] * 4) for n in (1, 3)],
    *[(RowParallelLinear, 2, n, [ROW, ROW, f"S:{ROW}", f"S:{ROW}"]) for n in (0, 2)],
    (MyRow, 2, 0, [None] * 4),
    *[(cls, 2, n, [EMBEDDING] * 4) for cls in (VocabParallelEmbedding, MyEmbedding) for n in (0, 1)],
    *[(cls, 2, n, [None] * 4) for cls in (ParallelLMHead, MyHead) for n in (0, 1)],
    (nn.Identity, 2, 0, [None] * 4),
]  # fmt: skip


def named(name):
    if name is None:
        return None
    kind = "WithShardedLoRA" if name.startswith("S:") else "WithLoRA"
    return getattr(layers, name.removeprefix("S:") + kind)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    ("cls", "sizes", "packed", "expected"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}-packed{row[2]}") for row in TABLE],
)
def test_every_cell_of_the_table(cls, sizes, packed, expected, sharded, tp_size):
    base, config = build(cls, tp_size, sizes), config_for(fully_sharded_loras=sharded)
    wanted = named(expected[2 * sharded + tp_size - 1])
    result = from_layer(base, 4, config, ["m"] * packed)
    willing = [
        lora_class
        for lora_class in LORA_CLASSES
        if lora_class.can_replace_layer(
            source_layer=base, lora_config=config, packed_modules_list=["m"] * packed, model_config=None
        )
    ]
    assert willing == ([] if wanted is None else [wanted]), "exactly one class, so that the order is no trap"
    if wanted is None:
        assert result is base
    else:
        assert type(result) is wanted
        assert result.base_layer is base
        assert result.lora_ranks.shape == (result.n_slices, 4)


def test_logits_processor_has_its_own_function():
    processor, head = LogitsProcessor(8), ParallelLMHead(8, 6, params_dtype=torch.bfloat16, padding_size=4)
    layer = from_layer_logits_processor(processor, head, 4, config_for())
    assert type(layer) is layers.LogitsProcessorWithLoRA
    assert (layer.base_layer, layer.max_loras) == (processor, 4)
    assert (layer.hidden_size, layer.dtype, layer.device) == (6, torch.bfloat16, head.weight.device)
    assert from_layer(processor, 4, config_for(), []) is processor


def test_registered_replacement_stands_for_the_class():
    register_layer_class("ColumnParallelLinear", MyColumn)
    try:
        assert resolve_layer_class(ColumnParallelLinear) is MyColumn
        assert type(from_layer(MyColumn(4, 4), 4, config_for(), [])) is ColumnParallelLinearWithLoRA
        original = ColumnParallelLinear(4, 4)
        assert from_layer(original, 4, config_for(), []) is original
    finally:
        register_layer_class("ColumnParallelLinear", ColumnParallelLinear)
    with pytest.raises(TypeError):
        register_layer_class("ColumnParallelLinear", torch.Tensor)
    assert type(from_layer(ColumnParallelLinear(4, 4), 4, config_for(), [])) is ColumnParallelLinearWithLoRA
