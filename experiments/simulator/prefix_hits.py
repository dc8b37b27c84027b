"""Hits of a prefix cache on a trace: the library's own cache over prompts one after the other, without a model."""

from collections.abc import Sequence

from experiments.workload.traces import TracedRequest
from punica.scheduling import PrefixCache, PrefixKey


def hit_rate(prompts: Sequence[TracedRequest], adapters: Sequence[int], capacity: int, *, activated: bool) -> float:
    """Return the share of the prompts' full blocks that a cache of ``capacity`` blocks has. ``adapters``: of each
    prompt. ``activated``: their invocation is in the last block of a prompt, which is not full. Prompts beyond the
    capacity find and keep nothing.
    """
    cache, hits, all_blocks = PrefixCache(capacity, 1), 0, 0
    for owner, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        blocks = prompt.blocks
        count = len(blocks)
        all_blocks += count
        if count > capacity:
            continue
        key = PrefixKey(count if activated else 0, str(adapter).encode(), "")

        def tokens(first: int, end: int, blocks: tuple[int, ...] = blocks) -> tuple[int, ...]:
            return blocks[first:end]

        found = cache.find(tokens, count, key)
        cache.adopt(owner, found, count)
        cache.reserve(owner, count)
        cache.register(owner, tokens, count, key)
        cache.release(owner)
        hits += len(found)
    return hits / max(1, all_blocks)
