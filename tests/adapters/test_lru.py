"""The least recently used cache with pins, by itself."""

import random

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
    with pytest.raises(ValueError, match=r"cannot pin 'x'.*\['a'\]"):
        cache.pin("x")
    assert cache.unpin("x") is False
    cache.pop("a")
    with pytest.raises(KeyError, match="empty"):
        cache.remove_oldest()


@pytest.mark.parametrize(("capacity", "seed"), [(1, 0), (2, 0), (2, 1), (5, 0)])
def test_random_operations_against_a_list(capacity, seed):
    """The model: a list of [key, value] in order of use, a set of pins."""
    choose = random.Random(100 * capacity + seed)
    cache: LRUCache[int, int] = LRUCache(capacity)
    entries: list[list[int]] = []
    pins: set[int] = set()
    for step in range(400):
        key = choose.randint(1, capacity + 2)
        operation = choose.choice(["put", "put", "get", "pop", "pin", "unpin", "evict"])
        known = next((entry for entry in entries if entry[0] == key), None)
        free = [entry for entry in entries if entry[0] not in pins]
        if operation == "put":
            if known is None and len(entries) == capacity and not free:
                with pytest.raises(RuntimeError, match="pinned"):
                    cache.put(key, step)
            else:
                cache.put(key, step)
                if known is not None:
                    entries.remove(known)
                elif len(entries) == capacity:
                    entries.remove(free[0])
                entries.append([key, step])
        elif operation == "get":
            assert cache.get(key) == (None if known is None else known[1])
            if known is not None:
                entries.append(entries.pop(entries.index(known)))
        elif operation == "pop":
            assert cache.pop(key) == (None if known is None else known[1])
            pins.discard(key)
            entries = [entry for entry in entries if entry is not known]
        elif operation == "pin" and known is not None:
            cache.pin(key)
            pins.add(key)
        elif operation == "unpin":
            assert cache.unpin(key) is (key in pins)
            pins.discard(key)
        elif operation == "evict" and free:
            assert cache.remove_oldest() == tuple(free[0])
            entries.remove(free[0])
        assert cache.items() == [tuple(entry) for entry in entries]
        assert cache.pinned == pins
