"""Optional on CUDA (``LoRAConfig.dual_stream``): a linear layer's LoRA term beside the base product, on its own stream.

    current stream   --fork----- base product -----join-- y += term -->
                         \\                          /
    auxiliary stream      `-- zero, shrink, expand -'

The two products read one ``x`` and are independent until the sum. In decode each of them is too small to fill a large
GPU by itself; in prefill they only compete. The term needs a buffer of its own, zeroed, because rows without adapter
are never written by the LoRA kernels; the sum is one more kernel. So this pays only where the LoRA kernels are slow
enough to be worth hiding. On an H200 they are not: a decoder layer of Llama-2 7B in a CUDA graph takes the same or
longer with two streams than with one, at every batch size from 1 to 512. It is off by default.

Memory: whatever both streams touch (``x``, the buffer) is allocated on the current stream before the fork, so the
auxiliary stream starts after any earlier use of that memory, and given back after the join, so any later use on the
current stream comes after the auxiliary stream is done. The caching allocator needs no ``record_stream`` for that.
Allocations of the LoRA kernels themselves belong to the auxiliary stream alone. Fork and join are event waits, so a
CUDA graph can capture them.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from punica.config import LoRAConfig

Here = TypeVar("Here")
Beside = TypeVar("Beside")

_claimed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Base layer -> the LoRA layer whose second stream it has."""


class DualStream:
    """Two events of one layer, and the auxiliary stream that all layers of a device share."""

    def __init__(self, device: torch.device) -> None:
        self._auxiliary = _auxiliary_stream(device)
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()

    def run(self, here: Callable[[], Here], beside: Callable[[], Beside]) -> tuple[Here, Beside]:
        """Issue ``here`` on the current stream and ``beside`` on the auxiliary one; the current stream waits for both.

        The host waits for neither. The streams are joined also when one of the two raises, since the memory that
        ``beside`` was given goes back to the current stream then.
        """
        current = torch.cuda.current_stream(self._auxiliary.device)
        self._fork.record(current)
        self._auxiliary.wait_event(self._fork)
        try:
            on_current = here()
            with torch.cuda.stream(self._auxiliary):
                on_auxiliary = beside()
        finally:
            self._join.record(self._auxiliary)
            current.wait_event(self._join)
        return on_current, on_auxiliary


def dual_stream_for(lora_layer: Any, lora_config: LoRAConfig) -> DualStream | None:
    """The second stream of a LoRA layer, ``None`` where everything stays on the current stream.

    That is: without ``dual_stream``, on a CPU, with fully sharded adapters (the collective between shrink and expand
    must keep its place among the others), and for a second LoRA layer over the same base layer.
    """
    wanted = getattr(lora_config, "dual_stream", False) and not lora_config.fully_sharded_loras
    if not wanted or lora_layer.device.type != "cuda":
        return None
    owner = _claimed.get(lora_layer.base_layer)
    if owner is not None and owner() is not None:
        return None
    _claimed[lora_layer.base_layer] = weakref.ref(lora_layer)
    return DualStream(lora_layer.device)


@functools.cache
def _auxiliary_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
