"""Bytes that one tensor-parallel rank reads in a decode step, which bound the ratios of Figure 12. No torch.

Of an adapter, plain layers keep one factor whole on every rank: A of those cut by columns (q, k, v, gate, up), B of
those cut by rows (o, down). Fully sharded layers cut both.
"""

from experiments.harness.schema import ModelConf


def adapter_share(model: ModelConf, tp_size: int, fully_sharded: bool) -> float:
    """Part of an adapter's elements (seven projections, any LoRA rank) that one tensor-parallel rank reads."""
    hidden, inner, kv = model.hidden_size, model.intermediate_size, _kv_width(model)
    column_a, column_b, kv_b = 5 * hidden, hidden + 2 * inner, 2 * kv
    row_a, row_b = hidden + inner, 2 * hidden
    whole = column_a + column_b + kv_b + row_a + row_b
    kv_ranks = min(tp_size, model.num_key_value_heads)  # beyond, ranks share a head
    cut = (column_b + row_a) / tp_size + kv_b / kv_ranks
    repeated = (column_a + row_b) / (tp_size if fully_sharded else 1)
    return (cut + repeated) / whole


def bytes_ratio(
    model: ModelConf, rank: int, tp_size: int, fully_sharded: bool, requests: float, context: float
) -> float:
    """Bytes of a backbone-only decode step over those with one adapter of `rank` per request, on one rank: the ratio of
    throughputs, Distinct over backbone-only Identical, of memory-bound steps.

    Read are the weights without the embedding, keys and values of `context` tokens of each request, and every adapter.
    """
    weights = (model.backbone_parameters() - model.vocab_size * model.hidden_size) / tp_size
    cached = requests * context * model.kv_elements() / min(tp_size, model.num_key_value_heads)
    adapters = requests * model.lora_parameters(rank) * adapter_share(model, tp_size, fully_sharded)
    return (weights + cached) / (weights + cached + adapters)


def _kv_width(model: ModelConf) -> int:
    return model.hidden_size // model.num_attention_heads * model.num_key_value_heads
