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
    """Garbage that is a cycle is destroyed after the capture, however much is allocated in it."""
    seen = []

    @contextmanager
    def graph(graph, **options):
        seen.append((graph, options))
        yield

    class Graph:
        def __del__(self):
            seen.append("destroyed")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with capture("new", pool="one"):
            garbage = Graph()
            garbage.itself = garbage
            del garbage
            _ = [[] for _ in range(1_000)]
            assert seen == [("new", {"pool": "one"})]
        _ = [[] for _ in range(1_000)]
    finally:
        gc.set_threshold(*before)
    assert seen[1:] == ["destroyed"]


@pytest.mark.gpu
def test_an_earlier_graph_in_a_cycle_does_not_break_a_capture():
    """The failure of Figure 11 on an H100: an earlier graph of Hugging Face's model was collected in a capture."""
    x = torch.ones(4, device="cuda")

    class Owner:
        def __init__(self):
            self.itself, self.graph = self, torch.cuda.CUDAGraph()
            with capture(self.graph):
                self.y = x + 1

    before, owner = gc.get_threshold(), Owner()
    gc.set_threshold(1)
    try:
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            del owner
            ys = [x + i for i in range(50)]
        graph.replay()
    finally:
        gc.set_threshold(*before)
    assert torch.equal(ys[-1], x + 49)
