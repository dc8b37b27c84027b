"""Who owns which page of the KV cache. Pure Python: the tensors are in :mod:`punica.engine.kv_cache`.

The cache is cut into pages of ``page_size`` tokens. A request owns ``ceil(tokens / page_size)`` pages and takes the
next one when the last is full, so at most ``page_size - 1`` token places per request are unused, and nothing needs to
be moved when it leaves.

Any page would do, but attention reads a run of consecutive pages in place and has to gather scattered ones. The pool
therefore hands out the page behind an owner's last one when that is free, and starts a new owner in the middle of the
largest gap, where both it and its left neighbour have room to grow.
"""

import re
from collections.abc import Hashable

from punica.checks import check_count

_FREE_RUN = re.compile(rb"\x00+")


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, all free at first.

    ``reserve`` either gives an owner room for all the tokens asked for, or changes nothing and says so: running out
    of pages is a normal event that the scheduler answers by preempting a request.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = check_count("num_pages", num_pages)
        self.page_size = check_count("page_size", page_size)
        self._used = bytearray(num_pages)  # 1 where a page has an owner
        self._tables: dict[Hashable, list[int]] = {}
        self.num_free = num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def table(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's pages in token order: token ``i`` is in ``table[i // page_size]``. Empty for an unknown owner."""
        return tuple(self._tables.get(owner, ()))

    def owners(self) -> tuple[Hashable, ...]:
        """Everyone who owns at least one page."""
        return tuple(self._tables)

    def reserve(self, owner: Hashable, num_tokens: int) -> bool:
        """Grow the owner's table until it holds ``num_tokens`` tokens. False, and no change, when too few pages are
        free.
        """
        missing = self.pages_for(num_tokens) - len(self._tables.get(owner, ()))
        if missing > self.num_free:
            return False
        if missing > 0:
            table = self._tables.setdefault(owner, [])
            for left in range(missing, 0, -1):
                table.append(self._next_page(table, left))
                self._used[table[-1]] = 1
            self.num_free -= missing
        return True

    def release(self, owner: Hashable) -> None:
        """Free all pages of the owner; RuntimeError when it owns none (they would be freed twice)."""
        if owner not in self._tables:
            raise RuntimeError(f"{owner!r} owns no pages; release is called once per owner")
        table = self._tables.pop(owner)
        for page in table:
            self._used[page] = 0
        self.num_free += len(table)

    def _next_page(self, table: list[int], needed: int) -> int:
        """The page behind the last one, else one in the largest gap, leaving half of the spare room to the left
        neighbour.
        """
        if table and table[-1] + 1 < self.num_pages and not self._used[table[-1] + 1]:
            return table[-1] + 1
        start, end = max((gap.span() for gap in _FREE_RUN.finditer(self._used)), key=lambda gap: gap[1] - gap[0])
        return start if start == 0 else start + max(0, end - start - needed) // 2
