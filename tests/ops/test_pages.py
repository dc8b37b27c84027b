"""Page-locked memory: exact sizes, locked once, unlocked when the last tensor on it is gone."""

import gc
from types import SimpleNamespace

import pytest
import torch

from punica.ops.pages import Pages


@pytest.fixture
def cuda(monkeypatch):
    """What CUDA is asked for, without CUDA."""
    asked: list[tuple] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: asked.append(("lock", address, size)) or 0,
        cudaHostUnregister=lambda address: asked.append(("unlock", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return asked


def test_memory_is_locked_once_and_unlocked_with_its_last_view(cuda) -> None:
    pages = Pages(100_001)
    tensor = pages.tensor()
    assert tensor.shape == (100_001,)
    assert not tensor.any()
    tensor.fill_(7)
    pages.lock(tensor)
    address, view = tensor.data_ptr(), tensor[8:24].view(torch.int32)
    assert cuda == [("lock", address, 100_001)]
    del pages, tensor
    gc.collect()
    assert view.tolist() == [0x07070707] * 4
    assert len(cuda) == 1
    del view
    gc.collect()
    assert cuda[1:] == [("unlock", address)]


def test_memory_that_was_not_locked_is_not_unlocked(cuda) -> None:
    tensor = Pages(64).tensor()
    del tensor
    gc.collect()
    assert cuda == []


def test_no_bytes(cuda) -> None:
    pages = Pages(0)
    pages.lock(pages.tensor())
    assert cuda == []


@pytest.mark.gpu
def test_a_device_reads_it_and_an_error_is_one() -> None:
    pages = Pages(1 << 20)
    tensor = pages.tensor().fill_(3)
    pages.lock(tensor)
    assert tensor.is_pinned()
    assert tensor.to("cuda", non_blocking=True).sum().item() == 3 << 20
    with pytest.raises(torch.cuda.CudaError):
        pages.lock(tensor)  # twice
