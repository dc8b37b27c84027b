"""Plan of a kernel on a step: its launch, the tensors of the step that it reads, and the storage of its operands."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from punica.metadata import HEIGHTS, StepShape
from punica.ops.triton_ops.device import max_tiles
from punica.ops.triton_ops.fp8_device import Quant, operands, quant_of
from punica.ops.triton_ops.launch import Launch, block_at_least
from punica.ops.weights import Form, Stack


class Batch(Protocol):
    """A step as kernels read it: a `punica.metadata.LoRABatch`, or its tensors (`punica.vllm.ops.dense`).

    ``tensors``: mapping, sorted rows, counts, starts and ids; ``max_segments``: most entries of the ids in use;
    ``no_lora``: nothing is to be done; ``form``: what decides whether the tensors are legal; ``listed``: `tiles` has
    lists of tiles.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def max_segments(self) -> int: ...
    @property
    def no_lora(self) -> bool: ...
    @property
    def form(self) -> tuple: ...
    @property
    def shape(self) -> StepShape: ...
    @property
    def listed(self) -> bool: ...
    def tiles(self, height: int) -> tuple[Any, ...]:
        """Return sorted rows, records of tiles of `HEIGHTS[height]` rows, and their number on the device and here."""

    def check_rows(self, rows: int, slots: int = 1 << 62) -> None:
        """Raise ValueError unless ``rows`` rows hold those of the step, and ``slots`` slots its adapters."""

    def check_tensors(self, rows: int, device: torch.device) -> None:
        """Raise TypeError, ValueError: tensors that kernels on ``device`` cannot read for so many rows."""


def operands_of(stack: Stack, x_scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the weights as one argument of a kernel: of FP8 followed by their scales and the activations'."""
    if not stack.operands:
        stack.operands = operands(stack.tensors, stack.scales, None) if stack.form.is_fp8 else stack.tensors
    return stack.operands if x_scale is None else (*stack.operands[:-1], x_scale)


def shrink_quant(form: Form, x_dtype: torch.dtype, x_strides: tuple[int, int] | None = None) -> Quant:
    """Return the storage of A and x in a shrink; ``x_strides``: of the activations' scales along rows and groups."""
    stored = form.stored
    return quant_of(form, x_dtype, [stored.rank] * len(stored.widths), stored.widths[0], x_strides)


class KernelPlan(NamedTuple):
    """A launch on rows one by one, on the tiles of a step's list, or on tiles that search the segments.

    counts: rows and slots; of a search also tiles and segments, else 0. height: number of the list (None: without one),
    whose tiles have ``per_tile`` programs for each of the ``slices``.
    """

    launch: Launch
    counts: tuple[int, int, int, int]
    height: int | None = None
    per_tile: int = 0
    slices: int = 1

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        """Launch; ``numbers`` follow the counts. A list's grid is the step's; replayed, it serves larger ones too."""
        launch, sizes, height, per_tile, slices = self
        if height is None:
            mapping, order, counts, starts, ids = batch.tensors
            step = (mapping, order, ids, counts, starts) if sizes[3] else (mapping, None, None, None, None)
            launch(((source, target), tuple(weights), *step, lora_ranks), (*sizes, *numbers), aligned)
            return
        order, tiles, totals, number = batch.tiles(height)
        number = max(1, number)
        tensors = ((source, target), tuple(weights), None, order, tiles, totals, None, lora_ranks)
        launch(tensors, (sizes[0], sizes[1], number, 0, *numbers), aligned, (number * per_tile, slices, 1))


def plan_tiles(
    launch: Callable[[Any, int], Launch], tile: Any, batch: Batch, sizes: tuple[int, int], per_tile: int,
    slices: int = 1, bare: int = 0,
) -> KernelPlan:  # fmt: skip
    """Plan tiles of a step's list, else a search with ``bare`` tiles more. launch: of a tile; sizes: rows and slots."""
    if batch.listed and not bare and tile.block_m in HEIGHTS:
        height = HEIGHTS.index(tile.block_m)
        return KernelPlan(
            launch(tile._replace(mode="list", height=height), 0), (*sizes, 0, 0), height, per_tile, slices
        )
    tile = tile._replace(mode="search", segments=block_at_least(batch.tensors[4].numel()))
    tiles = max_tiles(sizes[0], batch.max_segments, tile.block_m)
    return KernelPlan(launch(tile, (tiles + bare) * per_tile), (*sizes, tiles, batch.max_segments))
