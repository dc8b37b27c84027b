"""`LRUCache`: a bounded dict that evicts the least recently used entry that is not pinned."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from punica.checks import check_count

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A least recently used cache of at most `capacity` >= 1 entries, or sizes of entries together, with pins.

    `on_remove(key, value)` is called after an entry was popped or evicted, or its value replaced. Pinned entries are
    never evicted; a pop drops the pin. While `uses`, a count, stays the same, so does the order of use.
    """

    def __init__(self, capacity: int, on_remove: Callable[[K, V], None] | None = None) -> None:
        self.capacity = check_count("capacity", capacity)
        self._on_remove = on_remove or (lambda key, value: None)
        self._entries: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._sizes: dict[K, int] = {}
        self._pinned: set[K] = set()
        self.size = self.uses = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """Copy of all entries, the least recently used first; does not affect the order."""
        return list(self._entries.items())

    @property
    def pinned(self) -> frozenset[K]:
        return frozenset(self._pinned)

    def get(self, key: K, default: V | None = None) -> V | None:
        """Return the value, now the most recently used; `default` if absent."""
        if key in self._entries:
            self.touch(key)
        return self._entries.get(key, default)

    def peek(self, key: K, default: V | None = None) -> V | None:
        """Return the value or `default`, without affecting the order of use."""
        return self._entries.get(key, default)

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Enter a value as the most recently used, evicting the oldest unpinned entries of a full cache. A present key
        keeps its pin. RuntimeError, and no change: pinned entries leave too little room. ValueError: ``size`` is above
        the capacity, or a present key's is another.
        """
        if key in self._entries:
            if size != self._sizes[key]:
                raise ValueError(f"{key!r} has size {self._sizes[key]}, got {size}; pop it first")
            old, self._entries[key] = self._entries[key], value
            self.touch(key)
            self._on_remove(key, old)
            return
        if size > self.capacity:
            raise ValueError(f"{key!r} has size {size}, the cache holds {self.capacity}")
        pinned = [key for key in self._entries if key in self._pinned]
        if sum(map(self._sizes.__getitem__, pinned)) + size > self.capacity:
            raise RuntimeError(f"all {len(pinned)} entries are pinned: {pinned}; unpin one of them")
        while self.size + size > self.capacity:
            self.remove_oldest()
        self._entries[key], self._sizes[key] = value, size
        self.size += size
        self.uses += 1

    def touch(self, key: K) -> None:
        """Mark as the most recently used. KeyError for an absent key."""
        self._entries.move_to_end(key)
        self.uses += 1

    def pop(self, key: K, default: V | None = None) -> V | None:
        """Remove an entry, pinned or not, and return its value; `default` if absent."""
        if key not in self._entries:
            return default
        value = self._entries.pop(key)
        self.size -= self._sizes.pop(key)
        self._pinned.discard(key)
        self.uses += 1
        self._on_remove(key, value)
        return value

    def pin(self, key: K) -> None:
        """Keep an entry from being evicted; again is fine. ValueError for an absent key."""
        if key not in self._entries:
            raise ValueError(f"cannot pin {key!r}: the cache has only {list(self._entries)}; put it first")
        self._pinned.add(key)

    def unpin(self, key: K) -> bool:
        """Drop a pin. `False` if there was none."""
        was_pinned = key in self._pinned
        self._pinned.discard(key)
        return was_pinned

    def remove_oldest(self) -> tuple[K, V]:
        """Evict the least recently used unpinned entry and return it. KeyError: empty. RuntimeError: all are pinned."""
        if not self._entries:
            raise KeyError("the cache is empty, there is no oldest entry")
        for key, value in self._entries.items():
            if key not in self._pinned:
                self.pop(key)
                return key, value
        raise RuntimeError(f"all {len(self)} entries are pinned: {list(self._entries)}; unpin one of them")
