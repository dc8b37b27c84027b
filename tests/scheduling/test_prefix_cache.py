"""The prefix cache without a model: what is shared, found again, evicted, and never confused."""

import random
from copy import copy

import pytest

from punica.scheduling import PrefixCache, PrefixKey

BASE = PrefixKey(0, b"", "")
HASH = 2**61 - 1  # hashes of ints are taken modulo this number: i and i + HASH collide


def compute(cache: PrefixCache, owner: str, tokens: list[int], key: PrefixKey = BASE) -> int:
    """Join, compute and register; return the tokens that were hit."""
    hit = cache.find(slices(tokens), len(tokens) - 1, key)
    cache.adopt(owner, hit, len(tokens))
    assert cache.reserve(owner, len(tokens))
    cache.register(owner, slices(tokens), len(tokens), key)
    return len(hit) * cache.block_size


def slices(tokens: list[int]):
    return lambda first, end: tuple(tokens[first:end])


def test_a_prefix_is_shared_and_the_last_token_is_computed() -> None:
    cache, tokens = PrefixCache(10, 4), list(range(12))
    assert compute(cache, "a", tokens) == 0
    assert compute(cache, "b", tokens) == 8, "of 12 tokens the last has to be computed"
    assert compute(cache, "c", [*tokens, 12]) == 12
    assert compute(cache, "d", [*tokens[:6], 99, 99, 99]) == 4
    assert cache.block_table("a") == cache.block_table("c")[:3]
    assert cache.num_free == 10 - 3 - 1 - 1 - 2
    assert cache.take_counts() == {"num_hit_tokens": 8 + 12 + 4, "num_missed_tokens": 12 + 4 + 1 + 5}
    assert cache.take_counts() == {}


def test_tokens_of_equal_hash_are_no_hit() -> None:
    tokens, other = [1, 2, 3, 4, 5], [1 + HASH, 2, 3, 4 + HASH, 5]
    assert hash(tuple(tokens)) == hash(tuple(other))
    cache = PrefixCache(10, 4)
    compute(cache, "a", tokens)
    assert compute(cache, "b", other) == 0
    assert compute(cache, "c", tokens) == compute(cache, "d", other) == 4
    assert cache.block_table("a")[0] != cache.block_table("b")[0]


def test_what_keys_and_values_depend_on_beside_tokens() -> None:
    cache, tokens = PrefixCache(40, 4), list(range(13))
    keys = [PrefixKey(0, b"x", ""), PrefixKey(0, b"y", ""), PrefixKey(0, b"", "salt"), PrefixKey(0, b"x", "salt")]
    assert [compute(cache, str(number), tokens, key) for number, key in enumerate((BASE, *keys))] == [0] * 5
    assert [compute(cache, f"again {number}", tokens, key) for number, key in enumerate(keys)] == [12] * 4


@pytest.mark.parametrize(("activation", "hit"), [(3, 0), (4, 4), (11, 8), (12, 12)])
def test_blocks_wholly_before_the_activation_are_the_base_s(activation, hit) -> None:
    cache, tokens = PrefixCache(40, 4), list(range(13))
    compute(cache, "base", tokens)
    assert compute(cache, "x", tokens, PrefixKey(activation, b"x", "")) == hit
    assert compute(cache, "y", tokens, PrefixKey(activation, b"y", "")) == hit
    assert compute(cache, "later", tokens, PrefixKey(activation - 1, b"x", "")) <= hit
    assert compute(cache, "x again", tokens, PrefixKey(activation, b"x", "")) == 12


def test_the_end_of_the_prefix_that_was_free_longest_is_evicted_first() -> None:
    cache = PrefixCache(4, 2)
    for name, start in (("a", 0), ("b", 10)):
        compute(cache, name, [start, start + 1, start + 2, start + 3])
        cache.release(name)
    assert cache.num_free == 4
    assert cache.reserve("plain", 2)
    assert cache.take_counts()["num_evicted_blocks"] == 1
    assert len(cache.find(slices([0, 1, 2, 3, 4]), 4, BASE)) == 1, "the last block of a is gone"
    assert len(cache.find(slices([10, 11, 12, 13, 14]), 4, BASE)) == 2
    assert cache.reserve("plain", 8)
    assert cache.find(slices([10, 11, 12, 13, 14]), 4, BASE) == []
    assert not cache.reserve("more", 1)
    with pytest.raises(RuntimeError, match="owns no blocks"):
        cache.release("a")


def test_a_block_that_was_computed_twice_is_registered_once() -> None:
    cache, tokens = PrefixCache(10, 2), [1, 2, 3, 4, 5]
    for name in ("a", "b"):
        cache.adopt(name, (), 5)
        assert cache.reserve(name, 5)
    for name in ("a", "b"):
        cache.register(name, slices(tokens), 5, BASE)
    first = cache.block_table("a")[:2]
    assert cache.find(slices(tokens), 4, BASE) == list(first)
    cache.release("b")
    assert cache.find(slices(tokens), 4, BASE) == list(first)
    assert cache.num_free == 7


def test_the_head_of_the_queue_is_searched_for_once() -> None:
    cache, tokens = PrefixCache(10, 4), list(range(13))
    compute(cache, "a", tokens[:9])
    read = []

    def asks(first, end):
        read.append(end)
        return tuple(tokens[first:end])

    assert [len(cache.find(asks, 12, BASE)) for _ in range(3)] == [2, 2, 2]
    assert read == [4, 8, 12, 12, 12]
    compute(cache, "b", tokens)
    assert len(cache.find(asks, 12, BASE)) == 3, "registered since"
    assert len(cache.find(asks, 12, PrefixKey(0, b"x", ""))) == 0


def test_hits_are_a_multiple_of_the_grain() -> None:
    cache, tokens = PrefixCache(20, 4, grain=8), list(range(30))
    compute(cache, "a", tokens)
    assert [compute(cache, f"{n}", tokens[:n]) for n in (8, 9, 16, 17, 24, 30)] == [0, 8, 8, 16, 16, 24]


@pytest.mark.parametrize("seed", range(5))
def test_random_life(seed) -> None:
    """A block found again holds what was written for these tokens and this key, whatever was evicted meanwhile."""
    chance = random.Random(seed)
    cache, content, live = PrefixCache(17, 2), {}, {}
    for step in range(400):
        if step % 20 == 0:  # the head of a queue, which asks again and again
            head = [chance.randrange(2) for _ in range(12)]
            asks = slices(head)
        assert cache.find(asks, 11, BASE) == copy(cache).find(slices(head), 11, BASE)
        if live and (chance.random() < 0.45 or len(live) > 4):
            cache.release(name := chance.choice(list(live)))
            del live[name]
        else:
            tokens, key = (
                [chance.randrange(2) for _ in range(chance.randint(1, 9))],
                PrefixKey(0, chance.choice((b"", b"x")), ""),
            )
            hit = copy(cache).find(slices(tokens), len(tokens) - 1, key)
            if cache.blocks_for(len(tokens)) - cache.num_owned(hit) > cache.num_free:
                continue
            cache.adopt(step, hit, len(tokens))
            assert cache.reserve(step, len(tokens))
            live[step] = tokens, key
            for index, block in enumerate(cache.block_table(step)):
                wanted = tokens[: 2 * index + 2], key
                if index < len(hit):
                    assert content[block] == wanted
                content[block] = wanted
            cache.register(step, slices(tokens), len(tokens), key)
        owned = {block for name in live for block in cache.block_table(name)}
        assert cache.num_free == 17 - len(owned)
    assert cache.take_counts()["num_hit_tokens"] > 100
