"""Capture of CUDA graphs with Python's garbage collection off."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, Python collects no garbage by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Capture what runs inside into ``graph``, without garbage collections, which may destroy earlier graphs."""
    with no_garbage_collection(), torch.cuda.graph(graph, **options):
        yield
