"""Ownership of the blocks of the KV cache, whose tensors belong to the engine.

The cache is cut into blocks of ``block_size`` tokens (the paper's pages). A request owns ``ceil(tokens / block_size)``
blocks: at most ``block_size - 1`` token places per request are unused, and blocks are never moved.

Attention reads consecutive blocks in place, and gathers scattered ones. So an owner gets the block after its last one
if that is free. A new owner starts in the middle of the largest gap: it and its left neighbour can both grow.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar

from punica.checks import check_count

Tokens = Callable[[int, int], tuple[int, ...]]
"""Tokens ``[first, end)`` of a request."""

_FREE_RUN = re.compile(rb"\x00+")


class BlockManager:
    """Allocator of ``num_blocks`` blocks of ``block_size`` tokens.

    ``reserve`` grants all blocks asked for or none: when blocks run out, the scheduler preempts a request. The methods
    from ``find`` to ``take_counts`` do something in a :class:`PrefixCache` only.

    ``is_shared``: blocks are found again by their tokens, so a request keeps its own until its last token is read.
    """

    is_shared: ClassVar[bool] = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = check_count("num_blocks", num_blocks)
        self.block_size = check_count("block_size", block_size)
        self._used = bytearray(num_blocks)  # 1 where a block has an owner
        self._tables: dict[Hashable, list[int]] = {}
        self.num_free = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, owner: Hashable) -> tuple[int, ...]:
        """Return the blocks of an owner, if any: token ``i`` is in ``block_table[i // block_size]``."""
        return tuple(self._tables.get(owner, ()))

    def missing(self, owner: Hashable, num_tokens: int) -> int:
        return max(0, self.blocks_for(num_tokens) - len(self._tables.get(owner, ())))

    def reserve(self, owner: Hashable, num_tokens: int) -> bool:
        """Grow the owner's block table to ``num_tokens`` tokens; False, without change, if too few blocks are free."""
        table = self._tables.get(owner, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > self.num_free:
            return False
        if missing > 0:
            self._tables[owner] = table
            for left in range(missing, 0, -1):
                table.append(self._next_block(table, left))
                self._used[table[-1]] = 1
            self.num_free -= missing
        return True

    def release(self, owner: Hashable) -> None:
        """Free all blocks of the owner; RuntimeError when it owns none (they would be freed twice)."""
        if owner not in self._tables:
            raise RuntimeError(f"{owner!r} owns no blocks; release is called once per owner")
        table = self._tables.pop(owner)
        for block in table:
            self._used[block] = 0
        self.num_free += len(table)

    def restore(self, owners: Collection[Hashable]) -> Counter[int]:
        """Free all blocks but those of ``owners``, after an error anywhere; return how many own each."""
        self._tables = {owner: self._tables[owner] for owner in owners}
        counts = Counter(block for table in self._tables.values() for block in table)
        self._used = bytearray(block in counts for block in range(self.num_blocks))
        self.num_free = self.num_blocks - len(counts)
        return counts

    def find(self, tokens: Tokens, most: int, key: Any) -> list[int]:
        """Return the registered blocks of a request's first tokens, at most ``most`` of them."""
        return []

    def num_owned(self, blocks: Sequence[int]) -> int:
        """Count those of these blocks that have an owner, so that another one takes no free block."""
        return 0

    def adopt(self, owner: Hashable, hit: Sequence[int], num_tokens: int) -> None:
        """Begin the table of a new owner, of ``num_tokens`` tokens, with registered blocks."""

    def register(self, owner: Hashable, tokens: Tokens, num_tokens: int, key: Any) -> None:
        """Register the full blocks of an owner's first ``num_tokens`` tokens, which are computed."""

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call, by field of ``StepStatistics``."""
        return {}

    def _next_block(self, table: list[int], needed: int) -> int:
        """Return the block after the last one, else one in the largest gap, whose spare room its neighbour shares."""
        if table and table[-1] + 1 < self.num_blocks and not self._used[table[-1] + 1]:
            return table[-1] + 1
        start, end = max((gap.span() for gap in _FREE_RUN.finditer(self._used)), key=lambda gap: gap[1] - gap[0])
        return start if start == 0 else start + max(0, end - start - needed) // 2
