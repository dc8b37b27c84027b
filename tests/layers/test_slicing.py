"""Which rows and columns each rank keeps: matrices with numbered rows, and the worked example of two ranks."""

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


def numbered(rows, first=0):
    """B whose row i is filled with ``first + i``."""
    return torch.arange(first, first + rows).float().unsqueeze(1).expand(rows, 2)


def labels(part):
    return part[:, 0].int().tolist()


@pytest.mark.parametrize(("tp_size", "rank", "rows"), [(1, 0, range(8)), (2, 1, range(4, 8)), (4, 2, range(4, 6))])
def test_column(tp_size, rank, rows):
    layer = ColumnParallelLinearWithLoRA(ColumnParallelLinear(6, 8, tp_rank=rank, tp_size=tp_size))
    a, b = torch.randn(2, 6), numbered(8)
    assert layer.slice_lora_a(a) is a
    assert labels(layer.slice_lora_b(b)) == list(rows)
    assert layer.output_slices == (8 // tp_size,)
    assert layer.is_merged_col_linear is False


@pytest.mark.parametrize(
    ("tp_size", "rank", "gate", "up"),
    [(1, 0, [0, 1, 2, 3], [4, 5, 6, 7]), (2, 0, [0, 1], [4, 5]), (2, 1, [2, 3], [6, 7]), (4, 3, [3], [7])],
)
def test_merged_as_two_and_as_one(tp_size, rank, gate, up):
    base = MergedColumnParallelLinear(6, [4, 4], tp_rank=rank, tp_size=tp_size)
    b = numbered(8)
    two = MergedColumnParallelLinearWithLoRA(base)
    assert [labels(part) for part in two.slice_lora_b([b[:4], b[4:]])] == [gate, up]
    assert two.slice_lora_b([None, b[4:]])[0] is None
    assert two.output_ids == (rank, rank)
    assert two.output_sizes == (4, 4)
    one = ColumnParallelLinearWithLoRA(base)
    assert labels(one.slice_lora_b(b)) == gate + up
    assert one.is_merged_col_linear is True


@pytest.mark.parametrize(
    ("rank", "rows"), [(0, [[0, 1, 2, 3], [8, 9], [12, 13, 14]]), (1, [[4, 5, 6, 7], [10, 11], [15, 16, 17]])]
)
def test_variable_slices(rank, rows):
    base = MergedColumnParallelLinear(6, [8, 4, 6], tp_rank=rank, tp_size=2)
    layer = MergedColumnParallelLinearVariableSliceWithLoRA(base)
    parts = layer.slice_lora_b(list(numbered(18).split([8, 4, 6])))
    assert [labels(part) for part in parts] == rows
    assert layer.output_slices == (4, 2, 3)
    assert layer.n_slices == 3


QKV_ROWS = [
    # tp, rank, q rows, k and v rows of their own matrices, rows of the single matrix
    pytest.param(1, 0, range(8), range(4), [*range(16)], id="tp1"),
    pytest.param(2, 0, range(4), range(2), [0, 1, 2, 3, 8, 9, 12, 13], id="tp2-0"),
    pytest.param(2, 1, range(4, 8), range(2, 4), [4, 5, 6, 7, 10, 11, 14, 15], id="tp2-1"),
    pytest.param(4, 0, range(2), range(2), [0, 1, 8, 9, 12, 13], id="tp4-0"),
    pytest.param(4, 1, range(2, 4), range(2), [2, 3, 8, 9, 12, 13], id="tp4-1-replica"),
    pytest.param(4, 2, range(4, 6), range(2, 4), [4, 5, 10, 11, 14, 15], id="tp4-2"),
    pytest.param(4, 3, range(6, 8), range(2, 4), [6, 7, 10, 11, 14, 15], id="tp4-3-replica"),
]


@pytest.mark.parametrize(("tp_size", "rank", "q", "kv", "single"), QKV_ROWS)
def test_qkv(tp_size, rank, q, kv, single):
    base = QKVParallelLinear(6, 2, 4, 2, tp_rank=rank, tp_size=tp_size)
    three = MergedQKVParallelLinearWithLoRA(base)
    parts = three.slice_lora_b([numbered(8), numbered(4), numbered(4)])
    assert [labels(part) for part in parts] == [list(q), list(kv), list(kv)]
    kv_shard = rank if tp_size < 2 else rank // (tp_size // 2)
    assert three.output_ids == (rank, kv_shard, kv_shard)
    assert three.output_sizes == (8, 4, 4)
    assert three.output_slices == (len(q), len(kv), len(kv))
    one = QKVParallelLinearWithLoRA(base)
    assert labels(one.slice_lora_b(numbered(16))) == single
    assert (one.q_shard_id, one.kv_shard_id) == (rank, kv_shard)
    assert (one.q_proj_total_size, one.kv_proj_total_size) == (8, 4)
    assert (one.q_proj_shard_size, one.kv_proj_shard_size) == (len(q), len(kv))
    assert one.output_slices == (len(single),)


@pytest.mark.parametrize(("tp_size", "rank", "columns"), [(1, 0, range(8)), (2, 1, range(4, 8)), (4, 2, range(4, 6))])
def test_row(tp_size, rank, columns):
    layer = RowParallelLinearWithLoRA(RowParallelLinear(8, 6, tp_rank=rank, tp_size=tp_size))
    a, b = numbered(8).T, torch.randn(6, 2)
    assert layer.slice_lora_a(a)[0].int().tolist() == list(columns)
    assert layer.slice_lora_b(b) is b
    assert (layer.input_size, layer.output_size) == (8 // tp_size, 6)


def test_replicated_is_whole_on_every_rank():
    layer = ReplicatedLinearWithLoRA(ReplicatedLinear(8, 6, tp_rank=1, tp_size=2))
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    assert layer.slice_lora_a(a) is a
    assert layer.slice_lora_b(b) is b


X = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
A = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])
B = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])


def lora_only(layer, wrapper, config):
    """The layer with its weight zeroed and the example's adapter in slot 2."""
    layer.base_layer.weight.data.zero_()
    layer.create_lora_weights(4, config)
    layer.set_mapping(wrapper)
    layer.set_lora(2, A, B)
    return layer


@pytest.mark.parametrize(
    ("rank", "tp_size", "delta"), [(0, 1, [1, 1, 3, 2, 4, 4]), (0, 2, [1, 1, 3]), (1, 2, [2, 4, 4])]
)
def test_worked_example_column(rank, tp_size, delta, lora_config, wrapper_for):
    base = ColumnParallelLinear(4, 6, bias=False, return_bias=False, tp_rank=rank, tp_size=tp_size)
    layer = lora_only(ColumnParallelLinearWithLoRA(base), wrapper_for([2]), lora_config(max_lora_rank=4))
    assert layer(X)[0].tolist() == delta


@pytest.mark.parametrize(
    ("rank", "tp_size", "h", "delta"),
    [
        (0, 1, [1, 1, 3], [1, 1, 3, 2, 4, 4]),
        (0, 2, [1, 2, 3], [1, 2, 3, 3, 5, 4]),
        (1, 2, [0, -1, 0], [0, -1, 0, -1, -1, 0]),
    ],
)
@pytest.mark.parametrize("input_is_parallel", [True, False])
def test_worked_example_row(rank, tp_size, h, delta, input_is_parallel, lora_config, wrapper_for):
    base = RowParallelLinear(
        4, 6, bias=False, return_bias=False, input_is_parallel=input_is_parallel, tp_rank=rank, tp_size=tp_size
    )
    layer = lora_only(RowParallelLinearWithLoRA(base), wrapper_for([2]), lora_config(max_lora_rank=4))
    own = X.chunk(tp_size, dim=-1)[rank]
    assert (own @ layer.lora_a_stacked[0][2, 0, :3].T)[0].tolist() == h
    assert layer(own if input_is_parallel else X)[0].tolist() == delta


@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_of_a_layer_together_equal_the_whole(tp_size, lora_config, wrapper_for, random_pair):
    """Column shards concatenate, row shards add up, with LoRA and bias included."""
    slots, x = [0, -1, 1, 1], torch.randn(4, 8)
    weight, bias = torch.randn(12, 8), torch.randn(12)
    adapters = {slot: random_pair(rank, 8, 12) for slot, rank in ((0, 8), (1, 5))}

    def run(lora_class, base_class, rank, size):
        base = base_class(8, 12, return_bias=False, tp_rank=rank, tp_size=size)
        base.weight_loader(base.weight, weight)
        base.weight_loader(base.bias, bias)
        layer = lora_class(base)
        layer.create_lora_weights(4, lora_config())
        layer.set_mapping(wrapper_for(slots))
        for slot, pair in adapters.items():
            layer.set_lora(slot, *pair)
        return layer(x.chunk(size, dim=-1)[rank] if base_class is RowParallelLinear else x)

    ranks = range(tp_size)
    whole = run(ColumnParallelLinearWithLoRA, ColumnParallelLinear, 0, 1)
    columns = [run(ColumnParallelLinearWithLoRA, ColumnParallelLinear, rank, tp_size) for rank in ranks]
    torch.testing.assert_close(torch.cat(columns, dim=-1), whole, rtol=1e-4, atol=1e-4)
    partial = [run(RowParallelLinearWithLoRA, RowParallelLinear, rank, tp_size) for rank in ranks]
    torch.testing.assert_close(sum(partial), whole, rtol=1e-4, atol=1e-4)
