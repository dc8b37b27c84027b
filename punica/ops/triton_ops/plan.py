"""How a planned kernel meets a step: which of the step's tensors it reads, and how many programs that makes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.triton_ops.launch import Launch
from punica.ops.triton_ops.tensor_batch import TensorBatch

Batch = LoRABatch | TensorBatch


class KernelPlan(Protocol):
    """A launch of one kernel of an op."""

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        """Launch. ``numbers`` follow the counts."""


class FixedPlan(NamedTuple):
    """Rows one by one, or tiles that search the segments of tensors without lists: a grid that follows from shapes."""

    launch: Launch
    counts: tuple[int, int, int, int]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        mapping, order, counts, starts, ids = batch.tensors
        step = (mapping, order, ids, counts, starts) if self.counts[3] else (mapping, None, None, None, None)
        self.launch(((source, target), tuple(weights), *step, lora_ranks), (*self.counts, *numbers), aligned)


class ListedPlan(NamedTuple):
    """The tiles of the step's list ``height``; with ``per_row`` those of long segments only, and the other rows one by
    one. ``per_tile`` and ``per_row`` are programs; ``sizes``: rows and slots.
    """

    launch: Launch
    height: int
    per_tile: int
    per_row: int
    slices: int
    sizes: tuple[int, int]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        """Launch with the grid of the step at hand. In a captured graph it stays so; a later step with more to do is
        served too, since the kernel's loop is persistent.
        """
        order, tiles, rows, totals, counts = batch.work(self.height)
        num_tiles = max(1, counts[2 * self.height + (self.per_row > 0)])
        num_rows = max(1, counts[-1]) if self.per_row else 0
        self.launch(
            ((source, target), tuple(weights), None, order, tiles, rows, totals, lora_ranks),
            (*self.sizes, num_tiles, num_rows, *numbers),
            aligned,
            (num_tiles * self.per_tile + num_rows * self.per_row, self.slices, 1),
        )
