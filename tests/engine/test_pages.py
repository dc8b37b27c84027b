"""The page pool: every page has at most one owner, nothing leaks, and neighbours stay together where they can."""

import random

import pytest

from punica.engine.pages import PagePool


def check_invariants(pool: PagePool) -> None:
    owned = [page for owner in pool.owners() for page in pool.table(owner)]
    assert len(owned) == len(set(owned))  # no page twice
    assert all(0 <= page < pool.num_pages for page in owned)
    assert pool.num_free + len(owned) == pool.num_pages  # no page lost


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (33, 3)])
def test_pages_for(tokens, pages) -> None:
    assert PagePool(10, 16).pages_for(tokens) == pages


def test_reserve_grows_by_whole_pages() -> None:
    pool = PagePool(4, 16)
    assert pool.reserve("a", 16)
    assert pool.table("a") == (0,)
    assert pool.reserve("a", 10)  # already there
    assert pool.reserve("a", 17)
    assert pool.table("a") == (0, 1)
    assert pool.num_free == 2


def test_out_of_pages_changes_nothing_and_says_so() -> None:
    pool = PagePool(3, 4)
    assert pool.reserve("a", 8)
    before = pool.table("a")
    assert not pool.reserve("b", 5)
    assert not pool.reserve("a", 17)
    assert pool.table("a") == before
    assert pool.owners() == ("a",)
    assert pool.num_free == 1
    assert pool.reserve("b", 4)  # one page is left
    check_invariants(pool)


def test_release_frees_and_twice_is_an_error() -> None:
    pool = PagePool(3, 4)
    pool.reserve("a", 12)
    pool.release("a")
    assert pool.num_free == 3
    assert pool.table("a") == ()
    with pytest.raises(RuntimeError, match="'a' owns no pages"):
        pool.release("a")
    assert pool.num_free == 3


def test_requests_with_room_get_consecutive_pages() -> None:
    """A pool sized for 8 requests of 8 pages: all grow to full length in place, page by page in turn."""
    pool = PagePool(64, 16)
    for tokens in range(1, 129):
        for owner in range(8):
            assert pool.reserve(owner, tokens)
    for owner in range(8):
        table = pool.table(owner)
        assert table == tuple(range(table[0], table[0] + 8))


@pytest.mark.parametrize("seed", range(5))
def test_random_life_keeps_the_invariants(seed) -> None:
    chance = random.Random(seed)
    pool, lengths = PagePool(23, 4), {}
    for step in range(400):
        if lengths and chance.random() < 0.25:
            owner = chance.choice(list(lengths))
            pool.release(owner)
            del lengths[owner]
        else:
            owner = chance.choice([*lengths, step])
            wanted = lengths.get(owner, 0) + chance.randint(1, 9)
            fits = pool.pages_for(wanted) - len(pool.table(owner)) <= pool.num_free
            assert pool.reserve(owner, wanted) == fits
            if fits:
                lengths[owner] = wanted
        check_invariants(pool)
        for owner, length in lengths.items():
            assert len(pool.table(owner)) == pool.pages_for(length)
    for owner in list(lengths):
        pool.release(owner)
    assert pool.num_free == 23


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0)], ids=["no pages", "empty pages"])
def test_sizes_below_one(pages, size) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        PagePool(pages, size)
