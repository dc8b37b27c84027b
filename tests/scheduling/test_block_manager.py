"""The block manager: every block has at most one owner, nothing leaks, and neighbours stay together where they can."""

import pytest

from punica.scheduling import BlockManager


def test_blocks_for() -> None:
    assert [BlockManager(10, 16).blocks_for(tokens) for tokens in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 3]


def test_reserve_grows_by_whole_blocks_or_changes_nothing() -> None:
    manager = BlockManager(4, 16)
    assert manager.reserve("a", 16)
    assert manager.block_table("a") == (0,)
    assert manager.reserve("a", 10)  # already there
    assert manager.reserve("a", 17)
    for owner, tokens in (("b", 33), ("a", 65)):
        assert not manager.reserve(owner, tokens)
        assert (manager.block_table("a"), manager.block_table("b"), manager.num_free) == ((0, 1), (), 2)
    assert manager.reserve("b", 32)


def test_release_frees_and_twice_is_an_error() -> None:
    manager = BlockManager(3, 4)
    manager.reserve("a", 12)
    manager.release("a")
    assert (manager.num_free, manager.block_table("a")) == (3, ())
    with pytest.raises(RuntimeError, match="'a' owns no blocks"):
        manager.release("a")
    assert manager.num_free == 3


def test_requests_with_room_get_consecutive_blocks() -> None:
    """A cache sized for 8 requests of 8 blocks: all grow to full length in place, block by block in turn."""
    manager = BlockManager(64, 16)
    for tokens in range(1, 129):
        for owner in range(8):
            assert manager.reserve(owner, tokens)
    for owner in range(8):
        table = manager.block_table(owner)
        assert table == tuple(range(table[0], table[0] + 8))


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)], ids=["no blocks", "empty blocks"])
def test_sizes_below_one(blocks, size) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockManager(blocks, size)
