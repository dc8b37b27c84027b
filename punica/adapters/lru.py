"""`LRUCache`: a bounded table that makes room by dropping what was used least recently, except what is pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from punica.checks import check_count

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most ``capacity`` entries in order of use.

    Args:
        capacity: at least 1.
        on_remove: called as ``on_remove(key, value)`` after an entry has left, for whatever reason: popped, evicted,
            or its value replaced.

    Pinned entries are never evicted; they can still be popped, which drops the pin. TypeError, ValueError: the
    capacity is not an integer >= 1.
    """

    def __init__(self, capacity: int, on_remove: Callable[[K, V], None] | None = None) -> None:
        self.capacity = check_count("capacity", capacity)
        self._on_remove = on_remove
        self._entries: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._pinned: set[K] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """All entries, the least recently used first; a copy, and no use."""
        return list(self._entries.items())

    @property
    def pinned(self) -> frozenset[K]:
        """The keys that are never evicted."""
        return frozenset(self._pinned)

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value, which is now the most recently used; ``default`` if absent."""
        if key not in self._entries:
            return default
        self.touch(key)
        return self._entries[key]

    def peek(self, key: K, default: V | None = None) -> V | None:
        """The value or ``default``; looking is no use."""
        return self._entries.get(key, default)

    def put(self, key: K, value: V) -> None:
        """Enter a value as the most recently used; a full cache first evicts its oldest unpinned entry.

        A key that is present gets the new value and keeps its pin. RuntimeError, and no change, when all entries are
        pinned.
        """
        if key in self._entries:
            old, self._entries[key] = self._entries[key], value
            self.touch(key)
            self._removed(key, old)
            return
        if len(self._entries) >= self.capacity:
            self.remove_oldest()
        self._entries[key] = value

    def touch(self, key: K) -> None:
        """Mark as the most recently used. KeyError for an absent key."""
        self._entries.move_to_end(key)

    def pop(self, key: K, default: V | None = None) -> V | None:
        """Take an entry out, pinned or not; its value, or ``default`` if absent."""
        if key not in self._entries:
            return default
        value = self._entries.pop(key)
        self._pinned.discard(key)
        self._removed(key, value)
        return value

    def pin(self, key: K) -> None:
        """Keep an entry from being evicted; again is fine. ValueError for an absent key."""
        if key not in self._entries:
            raise ValueError(f"cannot pin {key!r}: the cache has only {list(self._entries)}; put it first")
        self._pinned.add(key)

    def unpin(self, key: K) -> bool:
        """Let an entry be evicted again. ``False`` if it was not pinned."""
        if key not in self._pinned:
            return False
        self._pinned.remove(key)
        return True

    def remove_oldest(self) -> tuple[K, V]:
        """Evict the least recently used entry that is not pinned; its key and value.

        KeyError if the cache is empty, RuntimeError if all entries are pinned.
        """
        if not self._entries:
            raise KeyError("the cache is empty, there is no oldest entry")
        unpinned = [key for key in self._entries if key not in self._pinned]
        if not unpinned:
            raise RuntimeError(f"all {len(self)} entries are pinned: {list(self._entries)}; unpin one of them")
        key = unpinned[0]
        value = self._entries.pop(key)
        self._removed(key, value)
        return key, value

    def _removed(self, key: K, value: V) -> None:
        if self._on_remove is not None:
            self._on_remove(key, value)
