"""What each rank keeps and computes, plain and fully sharded: numbered rows, the worked example of two ranks."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_cases import config_for, used
from torch import Tensor

from punica import layers
from punica.layers import (
    ColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithLoRA,
    RowParallelLinearWithShardedLoRA,
)
from punica.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    tensor_parallel,
)
from tests.parallel.thread_ranks import on_threads

ALONE = {"bias": False, "return_bias": False}
column = partial(ColumnParallelLinear, 4, 6, **ALONE)
two = partial(MergedColumnParallelLinear, 4, [2, 4], **ALONE)
three = partial(MergedColumnParallelLinear, 4, [2, 2, 2], **ALONE)
qkv = partial(QKVParallelLinear, 4, 1, 2, 2, **ALONE)
row = partial(RowParallelLinear, 4, 6, **ALONE)
# plain class, base layer, slices of the example's six rows (one: adapted as one matrix), and which of them each of two
# ranks has in its output
COLUMN_KINDS = {
    "column": (layers.ColumnParallelLinearWithLoRA, column, [6], [[0, 1, 2], [3, 4, 5]]),
    "merged-as-one": (layers.ColumnParallelLinearWithLoRA, two, [6], [[0, 2, 3], [1, 4, 5]]),
    "merged": (layers.MergedColumnParallelLinearWithLoRA, two, [2, 4], [[0, 2, 3], [1, 4, 5]]),
    "variable": (layers.MergedColumnParallelLinearVariableSliceWithLoRA, three, [2, 2, 2], [[0, 2, 4], [1, 3, 5]]),
    "qkv-as-one": (layers.QKVParallelLinearWithLoRA, qkv, [6], [[0, 2, 4], [1, 3, 5]]),
    "qkv": (layers.MergedQKVParallelLinearWithLoRA, qkv, [2, 2, 2], [[0, 2, 4], [1, 3, 5]]),
}

X = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
A = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])
B = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
DELTA = torch.tensor([1.0, 1, 3, 2, 4, 4])


def with_example(lora_class: type, base: Any, config: Any, wrapper: Any, slices: list[int] | None = None) -> Any:
    """The layer with its weight zeroed and the example's adapter in slot 2."""
    base.weight.data.zero_()
    layer = lora_class(base)
    layer.create_lora_weights(4, config)
    layer.set_mapping(wrapper)
    if slices is None or len(slices) == 1:
        layer.set_lora(2, A, B)
    else:
        layer.set_lora(2, [A] * len(slices), list(B.split(slices)))
    return layer


@pytest.mark.parametrize(("plain", "build", "slices", "rows"), COLUMN_KINDS.values(), ids=COLUMN_KINDS)
def test_worked_example_of_every_column_kind(plain, build, slices, rows) -> None:
    sharded = getattr(layers, plain.__name__.replace("WithLoRA", "WithShardedLoRA"), None)

    def on_rank(rank: int) -> str:
        for lora_class, shrunk in ((plain, [[1.0, 1, 3, 0]] * 2), (sharded, [[1.0, 1], [3.0, 0]])):
            if lora_class is not None:
                layer = with_example(lora_class, build(), config_for(max_lora_rank=4), used([2]), slices)
                assert all((X @ a[2, 0].T).tolist() == [shrunk[rank]] for a in layer.lora_a_stacked)
                assert layer(X)[0].tolist() == DELTA[rows[rank]].tolist()
        return "done"

    assert on_threads(2, on_rank) == ["done", "done"]


def test_worked_example_of_both_row_kinds() -> None:
    def on_rank(rank: int) -> list[list[list[float]]]:
        x, found = X.chunk(2, dim=-1)[rank], []
        for lora_class in (RowParallelLinearWithLoRA, RowParallelLinearWithShardedLoRA):
            layer = with_example(lora_class, row(), config_for(max_lora_rank=4), used([2]))
            found.append([(x @ layer.lora_a_stacked[0][2, 0].T)[0].tolist(), layer(x)[0].tolist()])
        return found

    delta = DELTA.tolist()
    assert on_threads(2, on_rank) == [[[[1, 2, 3, 0], delta]] * 2, [[[0, -1, 0, 0], delta]] * 2]


def numbered(rows: int) -> Tensor:
    """A matrix whose row i is filled with i."""
    return torch.arange(rows).float().unsqueeze(1).expand(rows, 4)


def labels(part: Tensor) -> list[int]:
    return part[:, 0].int().tolist()


@pytest.mark.parametrize(
    ("tp_size", "given", "kept"),
    [(2, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]), (4, 5, [[0, 1], [2, 3], [4], []])],
    ids=["even", "short and empty"],
)
@pytest.mark.parametrize(
    ("lora_class", "build"),
    [
        (ColumnParallelLinearWithShardedLoRA, lambda **kw: MergedColumnParallelLinear(4, [4, 8], **kw)),
        (MergedQKVParallelLinearWithShardedLoRA, lambda **kw: QKVParallelLinear(4, 2, 4, 2, **kw)),
    ],
    ids=["merged-as-one", "qkv"],
)
def test_column_kinds_keep_their_ranks_of_a(lora_class, build, tp_size, given, kept) -> None:
    for rank, rows in enumerate(kept):
        layer = lora_class(build(tp_rank=rank, tp_size=tp_size))
        layer.create_lora_weights(4, config_for())
        several = layer.slice_lora_a([numbered(given), None])
        assert labels(layer.slice_lora_a(numbered(given))) == labels(several[0]) == rows
        assert several[1] is None
        a, b = torch.ones(given, 4), [torch.ones(size, given) for size in layer.full_output_sizes]
        packed = len(b) > 1
        layer.set_lora(1, [a] * len(b) if packed else a, b if packed else b[0])
        assert layer.lora_a_ranks.tolist() == [[0, len(rows), 0, 0]] * len(b)
        assert layer.lora_ranks.tolist() == [[0, given, 0, 0]] * len(b)
        for stacked in layer.lora_a_stacked:
            assert tuple(stacked.shape) == (4, 1, 8 // tp_size, 4)
            assert stacked[1, 0].sum(1).tolist() == [4.0] * len(rows) + [0.0] * (8 // tp_size - len(rows))
        parts = layer.slot_parts([(a, own) for own in b])
        assert [part.rank for part in parts] == [len(rows)] * len(b) + [given] * len(b)
        assert all((part.part is None) == (part.rank == 0) for part in parts)


@pytest.mark.parametrize(
    ("tp_size", "rank", "q", "kv", "single"),
    [  # q rows, k and v rows of their own matrices, rows of the single matrix
        pytest.param(1, 0, range(8), range(4), [*range(16)], id="tp1"),
        pytest.param(2, 1, range(4, 8), range(2, 4), [4, 5, 6, 7, 10, 11, 14, 15], id="tp2-1"),
        pytest.param(4, 1, range(2, 4), range(2), [2, 3, 8, 9, 12, 13], id="tp4-1-replica"),
        pytest.param(4, 2, range(4, 6), range(2, 4), [4, 5, 10, 11, 14, 15], id="tp4-2"),
    ],
)
def test_rows_of_b_of_qkv(tp_size, rank, q, kv, single) -> None:
    base = QKVParallelLinear(4, 2, 4, 2, tp_rank=rank, tp_size=tp_size)
    several, one = layers.MergedQKVParallelLinearWithLoRA(base), QKVParallelLinearWithShardedLoRA(base)
    parts = several.slice_lora_b([numbered(8), numbered(4), numbered(4)])
    assert [labels(part) for part in parts] == [list(q), list(kv), list(kv)]
    kv_shard = rank if tp_size < 2 else rank // (tp_size // 2)
    assert (several.output_ids, several.output_sizes) == ((rank, kv_shard, kv_shard), (8, 4, 4))
    assert labels(one.slice_lora_b(numbered(16))) == single


@pytest.mark.parametrize(
    ("lora_class", "base", "message"),
    [
        (ColumnParallelLinearWithShardedLoRA, ColumnParallelLinear(4, 6, tp_rank=0, tp_size=3), "8 .* 3"),
        (RowParallelLinearWithShardedLoRA, RowParallelLinear(8, 6, tp_rank=0, tp_size=4), "6 .* 4"),
    ],
    ids=["column", "row"],
)
def test_sizes_that_do_not_divide_over_the_ranks(lora_class, base, message) -> None:
    layer = lora_class(base)
    with pytest.raises(ValueError, match=message):
        layer.create_lora_weights(4, config_for())
    assert (layer.lora_config, layer.lora_ranks) == (None, None)


@pytest.mark.parametrize("slots", [[-1], []], ids=["no-adapter", "no-rows"])
@pytest.mark.parametrize(
    ("lora_class", "build", "width"),
    [(ColumnParallelLinearWithShardedLoRA, column, 4), (RowParallelLinearWithShardedLoRA, row, 2)],
    ids=["column", "row"],
)
def test_a_step_without_adapters_has_no_collective(lora_class, build, width, slots) -> None:
    base = build(tp_rank=0, tp_size=2)
    layer = with_example(lora_class, base, config_for(max_lora_rank=4), used(slots))
    reduced: list[int] = []
    group = SimpleNamespace(rank=0, world_size=2, all_reduce=lambda tensor: reduced.append(tensor.ndim) or tensor)
    with tensor_parallel(group):
        assert layer(torch.ones(len(slots), width)).tolist() == [[0.0] * base.weight.shape[0]] * len(slots)
    assert reduced == [2] * (width == 2), "the base layer's own"


def test_one_rank_takes_the_plain_path() -> None:
    wrapper, base = used([2]), qkv(tp_rank=0, tp_size=1)
    layer = with_example(QKVParallelLinearWithShardedLoRA, base, config_for(max_lora_rank=4), wrapper)
    wrapper.add_shrink = wrapper.add_expand = None
    layer.set_mapping(wrapper)
    assert layer(X)[0].tolist() == DELTA.tolist()
