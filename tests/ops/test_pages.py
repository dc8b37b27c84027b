"""Memory that is free for the next adapter when the last tensor on it is gone; page-locked, it is locked once."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from punica.ops import pages as module
from punica.ops.pages import LockedPages, Pages


@pytest.fixture
def locked(monkeypatch) -> list[tuple[int, int]]:
    """Addresses and bytes that CUDA is asked to lock, without CUDA."""
    asked: list[tuple[int, int]] = []
    lock = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: asked.append((address, size)) or 0,
        cudaHostUnregister=lambda address: asked.append((address, 0)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: lock)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(module, "_free", {})
    return asked


def test_pages_are_used_again_when_the_last_view_of_them_is_gone(locked) -> None:
    first = LockedPages.of(100_001)
    tensor = first.tensor(100_001)
    assert tensor.shape == (100_001,)
    tensor.fill_(7)
    first.lock()
    first.lock()
    assert locked == [(tensor.data_ptr(), first.size)]
    view = tensor[8:24].view(torch.int32)
    del tensor
    gc.collect()
    assert LockedPages.of(100_001) is not first
    assert view.tolist() == [0x07070707] * 4
    del view
    gc.collect()
    assert LockedPages.of(100_002) is first
    assert LockedPages.of(100_002) is not first


def test_pages_that_were_not_locked_are_given_to_the_system(locked) -> None:
    first = LockedPages.of(64)
    first.tensor(64)
    gc.collect()
    assert LockedPages.of(64) is not first
    assert locked == []


@pytest.mark.parametrize("kind", [Pages, LockedPages])
def test_the_oldest_free_pages_make_room_for_those_of_another_size(locked, monkeypatch, kind) -> None:
    """Of one size alone nothing could be kept after the sizes in use have changed."""
    monkeypatch.setattr(kind, "most_free", 300_000)

    def use(*sizes: int) -> list[Pages]:
        found = [kind.of(size) for size in sizes]
        tensors = [pages.tensor(pages.size) for pages in found]
        for pages in found:
            if kind is LockedPages:
                pages.lock()
        while tensors:  # the first is free first
            del tensors[0]
        return found

    large = use(80_000, 80_000, 80_000)
    small = use(50_000, 50_000)
    assert list(module._free) == [*large[1:], *small]
    assert (Pages if kind is LockedPages else LockedPages).of(50_000) not in small, "each kind has its own"
    assert [kind.of(50_000), kind.of(50_000)] == small[::-1]
    use(400_000)
    assert list(module._free) == large[1:], "pages that are too large to be kept drive others out"
    unlocked = [size for _, size in locked].count(0)
    assert unlocked == (2 if kind is LockedPages else 0), "the oldest, and those that are too large"


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 100_000, 80_000_001])
def test_no_more_than_an_eighth_and_a_page_is_wasted(size: int, locked) -> None:
    pages = LockedPages.of(size)
    assert size <= pages.size <= size * 9 // 8 + mmap.PAGESIZE
    assert pages.tensor(size).shape == (size,)


@pytest.mark.gpu
def test_a_device_reads_it() -> None:
    pages = LockedPages.of(1 << 20)
    tensor = pages.tensor(1 << 20).fill_(3)
    pages.lock()
    assert tensor.is_pinned()
    assert tensor.to("cuda", non_blocking=True).sum().item() == 3 << 20
