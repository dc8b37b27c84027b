"""Who owns which block of the KV cache. The tensors behind the blocks belong to the engine.

The cache is cut into blocks of ``block_size`` tokens (the paper's pages). A request owns ``ceil(tokens / block_size)``
blocks and takes the next one when the last is full, so at most ``block_size - 1`` token places per request are unused,
and nothing needs to be moved when it leaves.

Any block would do, but attention reads a run of consecutive blocks in place and has to gather scattered ones. The
manager therefore hands out the block behind an owner's last one when that is free, and starts a new owner in the middle
of the largest gap, where both it and its left neighbour have room to grow.
"""

import re
from collections.abc import Hashable

from punica.checks import check_count

_FREE_RUN = re.compile(rb"\x00+")


class BlockManager:
    """``num_blocks`` blocks of ``block_size`` tokens, all free at first.

    ``reserve`` either gives an owner room for all the tokens asked for, or changes nothing and says so: running out
    of blocks is a normal event that the scheduler answers by preempting a request.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = check_count("num_blocks", num_blocks)
        self.block_size = check_count("block_size", block_size)
        self._used = bytearray(num_blocks)  # 1 where a block has an owner
        self._tables: dict[Hashable, list[int]] = {}
        self.num_free = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's blocks in token order: token ``i`` is in ``block_table[i // block_size]``.

        Empty for an unknown owner.
        """
        return tuple(self._tables.get(owner, ()))

    def owners(self) -> tuple[Hashable, ...]:
        """Everyone who owns at least one block."""
        return tuple(self._tables)

    def reserve(self, owner: Hashable, num_tokens: int) -> bool:
        """Grow the owner's block table until it holds ``num_tokens`` tokens.

        False, and no change, when too few blocks are free.
        """
        missing = self.blocks_for(num_tokens) - len(self._tables.get(owner, ()))
        if missing > self.num_free:
            return False
        if missing > 0:
            table = self._tables.setdefault(owner, [])
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

    def _next_block(self, table: list[int], needed: int) -> int:
        """The block behind the last one, else one in the largest gap.

        There, half of the spare room is left to the left neighbour.
        """
        if table and table[-1] + 1 < self.num_blocks and not self._used[table[-1] + 1]:
            return table[-1] + 1
        start, end = max((gap.span() for gap in _FREE_RUN.finditer(self._used)), key=lambda gap: gap[1] - gap[0])
        return start if start == 0 else start + max(0, end - start - needed) // 2
