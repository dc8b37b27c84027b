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


class RowsPlan(NamedTuple):
    """All rows, one by one."""

    launch: Launch
    counts: tuple[int, ...]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        mapping = batch.tensors[0]
        ranks = mapping if lora_ranks is None else lora_ranks
        self.launch(((source, target), tuple(weights), mapping, ranks), (*self.counts, *numbers), aligned)


class SearchPlan(NamedTuple):
    """All tiles that the rows could make, each looking for its segment: for tensors that come without lists."""

    launch: Launch
    counts: tuple[int, ...]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        ranks = batch.tensors[0] if lora_ranks is None else lora_ranks
        self.launch(((source, target), tuple(weights), *batch.tensors, ranks), (*self.counts, *numbers), aligned)


class ListedPlan(NamedTuple):
    """The tiles of the step's list ``height``; with ``per_row`` those of long segments only, and the other rows one by
    one. ``per_tile`` and ``per_row`` are programs; ``head`` and ``tail`` surround the counts of tiles and rows.
    """

    launch: Launch
    height: int
    per_tile: int
    per_row: int
    slices: int
    head: tuple[int, ...]
    tail: tuple[int, ...]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        """The grid is that of the step at hand. In a captured graph it stays so; a later step with more to do than
        that is served too, since programs go on until their list ends.
        """
        order, tiles, rows, totals, counts = batch.work(self.height)
        num_tiles = max(1, counts[2 * self.height + (self.per_row > 0)])
        num_rows = max(1, counts[-1]) if self.per_row else 0
        ranks = order if lora_ranks is None else lora_ranks
        self.launch(
            ((source, target), tuple(weights), order, tiles, rows, totals, ranks),
            (*self.head, num_tiles, num_rows, *self.tail, *numbers),
            aligned,
            (num_tiles * self.per_tile + num_rows * self.per_row, self.slices, 1),
        )
