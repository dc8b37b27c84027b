"""Prefix cache: blocks whose keys and values later requests take instead of computing them.

A full block is registered once it is computed, under everything that its keys and values depend on:

    (the registered block before it, its tokens, weights and salt)  ->  block

Entries are compared, never their hashes alone, so no collision can give a request the block of another. Requests with
the same entry share the block. A registered block without owner waits, free, until a fresh one is needed: the one that
was free longest is evicted first, and of one request the last block before the ones it follows.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

from punica.scheduling.block_manager import BlockManager, Tokens


class PrefixKey(NamedTuple):
    """Dependencies of keys and values beside the tokens.

    ``activation``: the first token computed with the adapter. ``weights``: digest of the adapter's content (not its
    name or id, whose weights may change); empty without adapter. ``salt``: keeps those of others apart.
    """

    activation: int
    weights: bytes
    salt: str

    @classmethod
    def of_base(cls, request: Any, _waits: bool = False) -> "PrefixKey":
        return cls(0, b"", request.request.cache_salt)

    def until(self, end: int) -> "PrefixKey":
        """Return the key of the tokens before ``end``: before the activation that of the base."""
        return PrefixKey(0, b"", self.salt) if end <= self.activation else self


class _Registered(NamedTuple):
    serial: int  # never given again
    entry: tuple[int, tuple[int, ...], PrefixKey]


class PrefixCache(BlockManager):
    """Blocks with reference counts, registered ones found again; ``num_free`` counts the free registered ones.

    ``grain``: hits are a multiple of this number of tokens. Hits and misses are counted in tokens of new owners.
    """

    is_shared = True

    def __init__(self, num_blocks: int, block_size: int, grain: int = 1) -> None:
        super().__init__(num_blocks, block_size)
        self._grain = grain
        self._owners = [0] * num_blocks
        self._serials = itertools.count(1)  # 0: no block before
        self._entries: dict[tuple[int, tuple[int, ...], PrefixKey], int] = {}
        self._registered: dict[int, _Registered] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered blocks without owner, the oldest first
        self._chains: dict[Hashable, tuple[int, int]] = {}  # of each owner: blocks in entries, serial of the last
        self._counts = Counter[str]()
        self._num_evicted = 0
        self._search: tuple[Any, list[int]] = None, []  # the last one: of what, and the blocks found

    def find(self, tokens: Tokens, most: int, key: PrefixKey) -> list[int]:
        # the head of the queue asks before each step: while no block is evicted, the search continues where it ended
        asked, size = (tokens, most, key, self._num_evicted), self.block_size
        found = self._search[1] if asked == self._search[0] else []
        self._search = asked, found
        serial = self._registered[found[-1]].serial if found else 0
        before = key.until(0)
        for end in range((len(found) + 1) * size, most + 1, size):
            block = self._entries.get((serial, tokens(end - size, end), before if end <= key.activation else key))
            if block is None:
                break
            found.append(block)
            serial = self._registered[block].serial
        num_blocks = len(found)
        while num_blocks * size % self._grain:
            num_blocks -= 1
        return found[:num_blocks]

    def num_owned(self, blocks: Sequence[int]) -> int:
        return sum(self._owners[block] > 0 for block in blocks)

    def adopt(self, owner: Hashable, hit: Sequence[int], num_tokens: int) -> None:
        for block in hit:
            if not self._owners[block]:
                del self._idle[block]
                self.num_free -= 1
            self._owners[block] += 1
        self._tables[owner] = [*hit]
        self._chains[owner] = len(hit), self._registered[hit[-1]].serial if hit else 0
        hits = len(hit) * self.block_size
        self._counts.update(num_hit_tokens=hits, num_missed_tokens=num_tokens - hits)

    def register(self, owner: Hashable, tokens: Tokens, num_tokens: int, key: PrefixKey) -> None:
        # blocks that another request computed and registered meanwhile stay the owner's alone
        table, (number, serial), size = self._tables[owner], self._chains[owner], self.block_size
        for index in range(number, num_tokens // size):
            end = (index + 1) * size
            entry = serial, tokens(end - size, end), key.until(end)
            block = self._entries.get(entry)
            if block is None:
                block = table[index]
                self._registered[block] = _Registered(next(self._serials), entry)
                self._entries[entry] = block
            serial = self._registered[block].serial
            self._chains[owner] = index + 1, serial

    def release(self, owner: Hashable) -> None:
        if owner not in self._tables:
            super().release(owner)
        del self._chains[owner]
        for block in reversed(self._tables.pop(owner)):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            self.num_free += 1
            if block in self._registered:
                self._idle[block] = None
            else:
                self._used[block] = 0

    def restore(self, owners: Collection[Hashable]) -> Counter[int]:
        counts = super().restore(owners)
        self._owners = [counts[block] for block in range(self.num_blocks)]
        self._chains = {owner: self._chains[owner] for owner in owners}
        self._entries = {registered.entry: block for block, registered in self._registered.items()}
        self._idle = OrderedDict.fromkeys(block for block in (*self._idle, *self._registered) if not counts[block])
        for block in self._idle:
            self._used[block] = 1
        self._search = None, []
        return counts

    def take_counts(self) -> dict[str, int]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def _next_block(self, table: list[int], needed: int) -> int:
        if 0 not in self._used:
            evicted, _ = self._idle.popitem(last=False)
            self._entries.pop(self._registered.pop(evicted).entry, None)
            self._used[evicted] = 0
            self._num_evicted += 1
            self._counts["num_evicted_blocks"] += 1
        block = super()._next_block(table, needed)
        self._owners[block] = 1
        return block
