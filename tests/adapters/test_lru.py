"""The least recently used cache with pins, by itself."""

import pytest

from punica.adapters import LRUCache


def filled(*keys: str, capacity: int = 3) -> LRUCache[str, int]:
    cache: LRUCache[str, int] = LRUCache(capacity)
    for i, key in enumerate(keys):
        cache.put(key, i)
    return cache


def order(cache: LRUCache) -> str:
    return "".join(key for key, _ in cache.items())


def test_an_entry_without_room_changes_nothing():
    cache = filled("a", "b", "c")
    cache.pin("b")
    cache.pin("c")
    for size, error, words in ((4, ValueError, "size 4.* 3"), (2, RuntimeError, r"all 2 .*\['b', 'c'\]")):
        with pytest.raises(error, match=words):
            cache.put("d", 1, size=size)
    with pytest.raises(ValueError, match="'a' has size 1, got 3"):
        cache.put("a", 1, size=3)
    assert (order(cache), cache.size) == ("abc", 3)
    cache.put("d", 1)
    assert order(cache) == "bcd"


def test_callback_sees_every_entry_that_left():
    left: list[tuple[str, int, bool]] = []
    cache: LRUCache[str, int] = LRUCache(2, lambda key, value: left.append((key, value, key in cache)))
    for i, key in enumerate("abc"):
        cache.put(key, i)
    cache.put("c", 7)  # replaced: the key stays, the value leaves
    cache.pop("b")
    cache.pop("b")
    cache.remove_oldest()
    assert left == [("a", 0, False), ("c", 2, True), ("b", 1, False), ("c", 7, False)]


def test_absent_keys_and_an_empty_cache():
    cache = filled("a")
    with pytest.raises(KeyError):
        cache.touch("x")
    assert (cache.get("x"), cache.pop("x"), cache.peek("x", 7)) == (None, None, 7)
    with pytest.raises(ValueError, match=r"cannot pin 'x'.*\['a'\]"):
        cache.pin("x")
    assert cache.unpin("x") is False
    cache.pop("a")
    with pytest.raises(KeyError, match="empty"):
        cache.remove_oldest()
