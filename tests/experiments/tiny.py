"""A Llama with which systems are tested, and their world."""

from functools import cache

from experiments.harness.schema import DType, ModelConf
from experiments.systems.serving import World
from experiments.systems.weights import Limits

TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip


@cache
def tiny_world(max_len: int = 48) -> World:
    return World(TINY, "cpu", Limits(max_batch_size=4, max_len=max_len), rank=8)


def values(readings, statistic=None):
    """Metric -> value, of rows with this statistic (None: all but sample counts, medians before quantiles)."""
    wanted = ("value", "median", "count") if statistic is None else (statistic,)
    return {one.metric: one.value for one in readings if one.statistic in wanted and one.unit != "samples"}
