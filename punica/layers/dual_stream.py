"""In a CUDA graph of a decode step (``LoRAConfig.dual_stream``): the shrink beside the base product, on its own stream.

    current stream   --mark----- base product -----join-- expand into y -->
                         \\                          /
    auxiliary stream      `-------- shrink ---------'

Both products read one ``x`` and are independent until expand adds into ``y``. The base product of a decode step waits
for the memory of its weights, and the shrink hides in it; what is left behind the product is expand, whose weights are
fetched while the product ends. On an H200 that takes 2 of the 5 us that LoRA adds to a projection at one row, and 1.5
of 12 us at 64 rows of 64 adapters (measured on 2026-11-28). In a prefill, or with 128 rows of 128 adapters,
both want all of the GPU and are slower beside one another: 22 us instead of 20 there, 14 instead of 9 for 512 rows of
23 adapters, measured once on 2026-11-22. So up to `MOST_ROWS` rows, and only where a graph is
captured: outside of one, the host's time for the events is more than what they save. Until then the same kernels run on
one stream, so that a graph finds them compiled and loaded.

Where the base product is a plain one of few rows, the layer leaves it to the op, as ``base``: adapters in slots of low
rank are shrunk in its launch (`punica.ops.triton_ops.lora_linear`), and nothing is forked or joined.

The base product must not write ``x``, which the shrink reads meanwhile.

Memory: ``x`` is allocated on the current stream before the mark. The shrink's result belongs to the auxiliary stream,
and is read by expand after the join; whatever takes its memory next does so on the auxiliary stream, behind a later
mark, and so after that expand: each stream that layers run on has an auxiliary stream of its own. The caching allocator
needs no ``record_stream`` for that.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from punica.config import LoRAConfig
from punica.layers.utils import is_being_captured

MOST_ROWS = 64
"""Rows up to which the base product leaves room beside it."""

_claimed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Base layer -> the LoRA layer whose second stream it has."""


class DualStream:
    """Two events of one layer; the auxiliary stream is shared by all layers that run on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark, self._join = torch.cuda.Event(), torch.cuda.Event()

    def begin(self, rows: Tensor) -> Callable[[], AbstractContextManager] | None:
        """The context in which to launch the shrink of ``rows`` [T, in], called before the base product:
        `aside` in a graph, no other stream outside of one, ``None`` for more rows than pay.
        """
        if rows.shape[0] > MOST_ROWS:
            return None
        if not is_being_captured(rows):
            return nullcontext
        self._mark.record(torch.cuda.current_stream(self._device))
        return self.aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run launches inside on the auxiliary stream, behind what the current one had at `begin`; the current
        stream waits for it.

        The streams are joined also when a launch raises. The host waits for neither.
        """
        current = torch.cuda.current_stream(self._device)
        auxiliary = _auxiliary_stream(self._device, current.cuda_stream)
        auxiliary.wait_event(self._mark)
        try:
            with torch.cuda.stream(auxiliary):
                yield
        finally:
            self._join.record(auxiliary)
            current.wait_event(self._join)


def dual_stream_for(lora_layer: Any, lora_config: LoRAConfig) -> DualStream | None:
    """Build the second stream of a LoRA layer; ``None`` where everything stays on the current stream.

    That is without ``dual_stream``, on a CPU, with fully sharded adapters, whose collectives keep their order, and for
    a second LoRA layer over one base layer. Wrappers that do not take ``aside`` leave it unused.
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
def _auxiliary_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """Return the auxiliary stream of a stream, given by its handle."""
    return torch.cuda.Stream(device)
