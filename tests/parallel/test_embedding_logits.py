"""Vocabulary-parallel embedding, head and logits: layout of shards, lookup, reordering, soft cap."""

import pytest
import torch

from punica.parallel import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding, tensor_parallel


def embedding(tp_rank=0, tp_size=1, org=4, total=6, padding=4, dim=3, cls=VocabParallelEmbedding, **options):
    return cls(total, dim, org_num_embeddings=org, padding_size=padding, tp_rank=tp_rank, tp_size=tp_size, **options)


def test_padding_sizes():
    layer = embedding(org=10, total=13, padding=8, tp_rank=1, tp_size=2)
    assert (layer.org_vocab_size, layer.org_vocab_size_padded) == (10, 16)
    assert (layer.num_embeddings, layer.num_embeddings_padded, layer.num_embeddings_per_partition) == (13, 24, 12)
    assert tuple(layer.weight.shape) == (12, 3)
    assert (layer.num_org_embeddings_per_partition, layer.num_added_embeddings_per_partition) == (2, 0)
    shard = layer.shard_indices
    assert (shard.padded_org_vocab_start_index, shard.padded_org_vocab_end_index) == (8, 16)
    assert (shard.org_vocab_start_index, shard.org_vocab_end_index) == (8, 10)
    assert (shard.padded_added_vocab_start_index, shard.padded_added_vocab_end_index) == (14, 18)
    assert (shard.added_vocab_start_index, shard.added_vocab_end_index) == (13, 13)


@pytest.mark.parametrize(
    ("tp_size", "org", "total", "id_dtype"),
    [(1, 4, 6, torch.int32), (2, 7, 7, torch.int64), (2, 5, 12, torch.int32), (4, 5, 12, torch.int64)],
)
def test_lookup_over_ranks_equals_the_table(tp_size, org, total, id_dtype):
    table = torch.randn(total, 3)
    ids = torch.tensor([[0, total - 1, org - 1], [1, 2, min(org, total - 1)]], dtype=id_dtype)
    result = torch.zeros(2, 3, 3)
    for rank in range(tp_size):
        layer = embedding(rank, tp_size, org=org, total=total)
        layer.weight.data.fill_(99.0)
        layer.weight_loader(layer.weight, table)
        result += layer(ids)
    torch.testing.assert_close(result, table[ids.long()])


def test_layout_of_a_shard_and_zero_padding():
    layer = embedding(tp_rank=0, tp_size=2, org=4, total=5, padding=8)
    layer.weight.data.fill_(99.0)
    layer.weight_loader(layer.weight, torch.arange(1, 6).float().unsqueeze(1).expand(5, 3))
    assert layer.weight[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_checkpoint_without_added_rows():
    layer = embedding()
    layer.weight_loader(layer.weight, torch.ones(4, 3))
    assert layer.weight[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("bad", [-1, 6])
def test_ids(bad):
    with pytest.raises(ValueError, match=f"got {bad}"):
        embedding()(torch.tensor([0, bad]))
    with pytest.raises(TypeError, match="float32"):
        embedding()(torch.ones(2))
    assert embedding()(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"org": 7, "total": 6}, "at most num_embeddings=6, got 7", id="org-larger"),
        pytest.param({"padding": 0}, "padding_size is 0, must be >= 1", id="padding"),
        pytest.param({"tp_size": 3}, "8 is not divisible by 3", id="tp"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(ValueError, match=message):
        embedding(**options)


@pytest.mark.parametrize(("shape", "shard_id"), [((5, 3), None), ((6, 2), None), ((6,), None), ((6, 3), 0)])
def test_wrong_checkpoint_leaves_the_table_alone(shape, shard_id):
    layer = embedding()
    layer.weight.data.fill_(3.0)
    with pytest.raises(ValueError, match="must"):
        layer.weight_loader(layer.weight, torch.ones(shape), shard_id)
    assert (layer.weight == 3.0).all()


@pytest.mark.parametrize(
    ("org", "total", "padding", "tp_size", "expected"),
    [
        pytest.param(4, 6, 4, 2, [0, 1, 4, 5, 2, 3, 6, 7], id="example"),
        pytest.param(4, 4, 4, 2, [0, 1, 2, 3], id="nothing-added"),
        pytest.param(3, 4, 4, 2, [0, 1, 4, 2, 3, 5, 6, 7], id="padded-original"),
        pytest.param(4, 7, 4, 2, [0, 1, 4, 5, 2, 3, 6, 7], id="added-on-both"),
        pytest.param(4, 6, 4, 1, None, id="one-rank"),
    ],
)
def test_sharded_to_full_mapping(org, total, padding, tp_size, expected):
    assert embedding(0, tp_size, org=org, total=total, padding=padding).get_sharded_to_full_mapping() == expected


def test_head_has_no_forward():
    with pytest.raises(RuntimeError):
        ParallelLMHead(8, 4)(torch.zeros(1, dtype=torch.int64))


class AllShards:
    """A group for one process: what every rank computes is known beforehand, so gathering is a concatenation."""

    world_size = 2

    def __init__(self, rank, parts):
        self.rank = rank
        self.parts = parts

    def all_reduce(self, tensor):
        return sum(self.parts)

    def all_gather(self, tensor, dim):
        return torch.cat(self.parts, dim)

    def gather(self, tensor, dst, dim):
        return self.all_gather(tensor, dim) if self.rank == dst else None


@pytest.mark.parametrize(
    ("org", "total", "bias", "tp_size"), [(4, 6, True, 1), (6, 6, False, 1), (3, 3, True, 2), (5, 9, False, 2)]
)
def test_logits_are_in_the_order_of_the_ids(org, total, bias, tp_size):
    table, offset, hidden = torch.randn(total, 3), torch.randn(total), torch.randn(2, 3)
    heads = [embedding(rank, tp_size, org=org, total=total, cls=ParallelLMHead, bias=bias) for rank in range(tp_size)]
    for head in heads:
        head.weight_loader(head.weight, table)
        if bias:
            head.weight_loader(head.bias, offset)
    processor = LogitsProcessor(total)
    expected = hidden @ table.T + (offset if bias else 0)
    if tp_size == 1:
        logits = processor(heads[0], hidden)
    else:
        parts = [head.quant_method.apply(head, hidden, head.bias) for head in heads]
        with tensor_parallel(AllShards(0, parts)):
            logits = processor(heads[0], hidden)
        processor.use_all_gather = False
        with tensor_parallel(AllShards(1, parts)):
            assert processor(heads[1], hidden) is None
    torch.testing.assert_close(logits, expected)


def test_soft_cap_then_scale():
    head = ParallelLMHead(8, 4, padding_size=8)
    head.weight.data.normal_()
    hidden = torch.randn(3, 4)
    logits = LogitsProcessor(8, org_vocab_size=5, scale=0.5, soft_cap=2.0)(head, hidden)
    torch.testing.assert_close(logits, 0.5 * 2.0 * torch.tanh((hidden @ head.weight.T)[:, :5] / 2.0))


def test_embedding_bias_and_logits_as_input():
    head = ParallelLMHead(8, 4, padding_size=8)
    head.weight.data.normal_()
    hidden, bias = torch.randn(3, 4), torch.randn(8)
    torch.testing.assert_close(LogitsProcessor(8)(head, hidden, bias), hidden @ head.weight.T + bias)
    logits = torch.randn(3, 8)
    assert LogitsProcessor(8, logits_as_input=True)(head, logits) is logits


def test_forward_calls_its_own_get_logits():
    class Borrowing(LogitsProcessor):
        def _get_logits(self, hidden_states, lm_head, embedding_bias=None):
            return hidden_states + 1

    assert Borrowing(8, scale=3.0)(ParallelLMHead(8, 4), torch.ones(2, 8)).tolist() == [[6.0] * 8] * 2
