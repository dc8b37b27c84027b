"""Vocabulary-parallel embedding, head and logits: layout of shards, lookup, reordering, soft cap."""

import pytest
import torch

from punica.parallel import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from tests.parallel.thread_ranks import on_threads


def embedding(tp_rank=0, tp_size=1, org=4, total=6, padding=4):
    place = {"tp_rank": tp_rank, "tp_size": tp_size}
    return VocabParallelEmbedding(total, 3, org_num_embeddings=org, padding_size=padding, **place)


@pytest.mark.parametrize(
    ("tp_size", "org", "total", "id_dtype"),
    [(1, 4, 6, torch.int32), (2, 7, 7, torch.int64), (2, 5, 12, torch.int32), (4, 5, 12, torch.int64)],
)
def test_lookup_over_ranks_equals_the_table(tp_size, org, total, id_dtype):
    table = torch.randn(total, 3)
    ids = torch.tensor([[0, total - 1, org - 1], [1, 2, min(org, total - 1)]], dtype=id_dtype)

    def on_rank(rank):
        layer = VocabParallelEmbedding(total, 3, org_num_embeddings=org, padding_size=4)
        layer.weight.data.fill_(99.0)
        layer.weight_loader(layer.weight, table)
        return layer(ids)

    for found in on_threads(tp_size, on_rank):
        torch.testing.assert_close(found, table[ids.long()])


@pytest.mark.parametrize(("org", "given", "rows"), [(4, 5, [1, 2, 3, 4, 5, 0, 0, 0]), (4, 4, [1, 2, 3, 4, 0, 0, 0, 0])])
def test_layout_of_a_shard_and_zero_padding(org, given, rows):
    """With added rows in the checkpoint, or without."""
    layer = embedding(tp_rank=0, tp_size=2, org=org, total=5, padding=8)
    layer.weight.data.fill_(99.0)
    layer.weight_loader(layer.weight, torch.arange(1.0, given + 1).unsqueeze(1).expand(given, 3))
    assert layer.weight[:, 0].tolist() == rows


@pytest.mark.parametrize("bad", [-1, 6])
def test_ids(bad):
    with pytest.raises(ValueError, match=f"got {bad}"):
        embedding()(torch.tensor([0, bad]))
    with pytest.raises(TypeError, match="float32"):
        embedding()(torch.ones(2))
    assert embedding()(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"), [({"org": 7, "total": 6}, "6.* 7"), ({"padding": 0}, "is 0"), ({"tp_size": 3}, "8 .* 3")]
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


@pytest.mark.parametrize(
    ("org", "total", "bias", "tp_size"), [(4, 6, True, 1), (6, 6, False, 1), (3, 3, True, 2), (5, 9, False, 2)]
)
def test_logits_are_in_the_order_of_the_ids(org, total, bias, tp_size):
    table, offset, hidden = torch.randn(total, 3), torch.randn(total), torch.randn(2, 3)

    def on_rank(rank):
        head, processor = ParallelLMHead(total, 3, bias, org_num_embeddings=org, padding_size=4), LogitsProcessor(total)
        head.weight_loader(head.weight, table)
        if bias:
            head.weight_loader(head.bias, offset)
        everywhere = processor(head, hidden)
        processor.use_all_gather = False
        return everywhere, processor(head, hidden)

    expected = hidden @ table.T + (offset if bias else 0)
    for rank, (everywhere, at_root) in enumerate(on_threads(tp_size, on_rank)):
        torch.testing.assert_close(everywhere, expected)
        assert at_root is None if rank else torch.equal(at_root, everywhere)


def test_soft_cap_then_scale_bias_and_logits_as_input():
    head = ParallelLMHead(8, 4, padding_size=8)
    head.weight.data.normal_()
    hidden, bias = torch.randn(3, 4), torch.randn(8)
    plain = hidden @ head.weight.T
    logits = LogitsProcessor(8, org_vocab_size=5, scale=0.5, soft_cap=2.0)(head, hidden)
    torch.testing.assert_close(logits, 0.5 * 2.0 * torch.tanh(plain[:, :5] / 2.0))
    torch.testing.assert_close(LogitsProcessor(8)(head, hidden, bias), plain + bias)
    assert LogitsProcessor(8, logits_as_input=True)(head, plain) is plain
