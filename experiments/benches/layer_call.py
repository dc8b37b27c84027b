"""Calls of a layer: ``wrapper.add_linear`` on a wrapper with a server's slots, whose step has begun.

A server begins a step once for all layers, so that it is not timed here either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from punica.config import LoRAConfig
from punica.layers.dual_stream import DualStream
from punica.measure.timing import Call
from punica.metadata import LoRAMapping
from punica.ops.interface import Beside
from punica.ops.weights import LoRAWeights
from punica.wrapper import PunicaWrapperBase, get_punica_wrapper

if TYPE_CHECKING:
    from experiments.benches.operators import Problem

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


def step_of(batch: Problem) -> PunicaWrapperBase:
    """Return the wrapper of `batch`, at its defaults, whose step has begun. Batches whose rows use the same slots share
    it, as layers do.
    """
    return _step(tuple(batch.slots.tolist()), *batch.a.shape[:2], batch.x.device)


@lru_cache(maxsize=64)
def _step(slots_of_rows: tuple[int, ...], slots: int, rank: int, device: torch.device) -> PunicaWrapperBase:
    return begun(get_punica_wrapper, slots_of_rows, slots, rank, device)


def weights_of(batch: Problem) -> LoRAWeights:
    """Return the weights of `batch` as a layer holds them, with the table of true ranks."""
    slots, rank, _ = batch.a.shape
    ranks = batch.ranks
    if ranks is None:
        ranks = torch.full((1, slots), rank, dtype=torch.int32, device=batch.x.device)
    return LoRAWeights.of((batch.a,), (batch.stored_b,), ranks)


def layer_calls(batches: Sequence[Problem]) -> list[Call]:
    """Prepare a layer's call on each of `batches`."""
    return [partial(step_of(batch).add_linear, batch.y, batch.x, weights_of(batch)) for batch in batches]


def behind_products(products: Sequence[Call], batches: Sequence[Problem]) -> list[Call]:
    """Prepare base product and LoRA call of a layer for each of `batches`, on two streams on a GPU."""
    x = batches[0].x
    streams = DualStream(x.device) if x.is_cuda else None

    return [partial(beside, streams, x, *pair) for pair in zip(products, layer_calls(batches), strict=True)]


def beside(
    streams: DualStream | None, x: torch.Tensor, product: Callable[[], object], call: Callable[..., object]
) -> None:
    """Run ``product()`` and a layer's LoRA call, on a second stream if there is one; ``x``: their input."""
    aside = streams.begin(x) if streams is not None else None
    product()
    call(**({} if aside is None else {"beside": Beside(aside)}))
