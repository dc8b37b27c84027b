"""In a CUDA graph of a decode step (``LoRAConfig.dual_stream``): the shrink beside the base product, on its own stream.

    current stream   --mark----- base product -----join-- expand into y -->
                         \\                          /
    auxiliary stream      `-------- shrink ---------'

Both products read one ``x`` and are independent until expand adds into ``y``. A decode step's base product waits for
the memory of its weights, and the shrink hides in it: on an H200 2 of the 5 us that LoRA adds to a projection at one
row, and 1.5 of 12 us at 64 rows of 64 adapters (2026-11-28). With more rows both want all of the GPU: 22 us instead of
20 in a prefill. So up to `MOST_ROWS` rows, and only in a captured graph: else the host's time for the events is more
than what they save. Outside, the same kernels run on one stream. A plain base product of few rows is left to the op, as
``base``: low ranks are shrunk in its launch (`punica.ops.triton_ops.lora_linear`), without a fork.

Memory: ``x`` is allocated on the current stream before the mark, and the base product must not write it. The shrink's
result belongs to the auxiliary stream; whatever takes its memory next does so on that stream, behind a later mark, and
so after the expand that reads it: each stream that layers run on has an auxiliary stream of its own. The caching
allocator needs no ``record_stream``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.utils import is_being_captured

MOST_ROWS = 64
"""Rows up to which the base product leaves room beside it."""


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
        """Run launches inside on the auxiliary stream, behind what the current one had at `begin`; the current stream
        waits for it, also after an error. The host waits for neither.
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


def dual_stream_for(device: torch.device, lora_config: LoRAConfig) -> DualStream | None:
    """Build the second stream of a layer; ``None`` without ``dual_stream``, on a CPU, and with fully sharded adapters,
    whose collectives keep their order. Wrappers that do not take ``aside`` leave it unused.
    """
    wanted = getattr(lora_config, "dual_stream", False) and not lora_config.fully_sharded_loras
    return DualStream(device) if wanted and device.type == "cuda" else None


@functools.cache
def _auxiliary_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
