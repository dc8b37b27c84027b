"""Calls of a layer: ``wrapper.add_linear`` on a wrapper with a server's slots, whose step has begun.

A server begins a step once for all layers, so that it is not timed here either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from punica.config import LoRAConfig
from punica.layers.dual_stream import DualStream
from punica.metadata import LoRAMapping
from punica.ops.interface import Beside
from punica.wrapper import PunicaWrapperBase

MAX_LORAS = 64
"""Slots in a step's metadata, as in a server, for any number of adapters in the batch."""
MAX_ROWS = 8192
"""Rows in it."""
VOCAB_SIZE = 32000


def begun(
    make: Callable[..., PunicaWrapperBase],
    slots_of_rows: Sequence[int],
    max_loras: int,
    rank: int,
    device: torch.device | str,
    **switches: Any,
) -> PunicaWrapperBase:
    """Build a wrapper for `max_loras` slots of width `rank` by `make`, and begin a step: row t uses slot
    `slots_of_rows[t]`. `switches`: fields of `LoRAConfig`.

    A prompt is a run of rows with one slot to the operator, so that every step is described as decodes.
    """
    config = LoRAConfig(max_lora_rank=rank, max_loras=max_loras, **switches)
    wrapper = make(max(MAX_ROWS, len(slots_of_rows)), max_loras, device, lora_config=config)
    adapters = [slot + 1 for slot in slots_of_rows]
    wrapper.update_metadata(LoRAMapping(adapters, adapters), list(range(1, max_loras + 1)), max_loras, VOCAB_SIZE)
    return wrapper


def beside(
    streams: DualStream | None, x: torch.Tensor, product: Callable[[], object], call: Callable[..., object]
) -> None:
    """Run ``product()`` and a layer's LoRA call, on a second stream if there is one; ``x``: their input."""
    aside = streams.begin(x) if streams is not None else None
    product()
    call(**({} if aside is None else {"beside": Beside(aside)}))
