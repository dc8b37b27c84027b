"""Captures of CUDA graphs: no garbage is collected in one."""

import gc
from contextlib import contextmanager

import pytest
import torch

from punica.capture import capture, no_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_afterwards(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        with no_garbage_collection():
            assert not gc.isenabled()
        with pytest.raises(ZeroDivisionError), no_garbage_collection():
            _ = 1 / 0
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_a_capture_collects_no_garbage(monkeypatch):
    seen = []

    @contextmanager
    def graph(graph, **options):
        seen.append((graph, options, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with capture("new", pool="one"):
        assert not gc.isenabled()
    assert seen == [("new", {"pool": "one"}, False)]
