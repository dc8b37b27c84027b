"""Plans of single kernels: the tensors of a step that a kernel reads, and its grid."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from punica.metadata import StepShape
from punica.ops.triton_ops.fp8_device import WIDE, Quant, check_group_k, operands, quant_of
from punica.ops.triton_ops.launch import Launch
from punica.ops.weights import Form, Stack


class Batch(Protocol):
    """A step as kernels read it: a `punica.metadata.LoRABatch`, or its tensors (`flat.tensor_batch.TensorBatch`).

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
        """Sorted rows, records of tiles of `HEIGHTS[height]` rows, numbers of tiles on the device and on the host."""

    def check_rows(self, rows: int) -> None:
        """ValueError unless ``rows`` rows hold those of the step."""

    def check_tensors(self, rows: int, device: torch.device) -> None:
        """TypeError, ValueError: tensors that kernels on ``device`` cannot read for so many rows."""


def operands_of(stack: Stack, x_scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Weights as one argument of a kernel: of FP8 followed by their scales and the activations'."""
    if not stack.operands:
        stack.operands = operands(stack.tensors, stack.scales, None) if stack.form.is_fp8 else stack.tensors
    return stack.operands if x_scale is None else (*stack.operands[:-1], x_scale)


def shrink_quant(form: Form, x_dtype: torch.dtype, x_strides: tuple[int, int] | None = None) -> Quant:
    """Storage of A and x in a shrink; ``x_strides``: of the activations' scales along rows and groups."""
    stored, k = form.stored, form.stored.widths[0]
    return _quant(form, x_dtype, [stored.rank] * len(stored.widths), k, x_strides)


def expand_quant(form: Form, x_dtype: torch.dtype, x_strides: tuple[int, int] | None = None) -> Quant:
    """The same of B and x in an expand."""
    return _quant(form, x_dtype, form.stored.widths, form.stored.rank, x_strides)


def _quant(
    form: Form, x_dtype: torch.dtype, channels: Sequence[int], k: int, x_strides: tuple[int, int] | None
) -> Quant:
    if form.scales is None:
        return WIDE
    check_group_k(form.scheme, k)
    return quant_of(form.stored, x_dtype, form.scales, form.scheme, channels, k, x_strides)


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
    """The tiles of the step's list ``height``. ``per_tile``: programs; ``sizes``: rows and slots."""

    launch: Launch
    height: int
    per_tile: int
    slices: int
    sizes: tuple[int, int]

    def run(
        self, source: Tensor, weights: Sequence[Tensor], target: Tensor, batch: Batch, lora_ranks: Tensor | None,
        aligned: bool, *numbers: float,
    ) -> None:  # fmt: skip
        """Launch with the grid of the step at hand. In a captured graph it stays so; a later step with more to do is
        served too, since the kernel's loop is persistent.
        """
        order, tiles, totals, number = batch.tiles(self.height)
        number = max(1, number)
        self.launch(
            ((source, target), tuple(weights), None, order, tiles, totals, None, lora_ranks),
            (*self.sizes, number, 0, *numbers),
            aligned,
            (number * self.per_tile, self.slices, 1),
        )
