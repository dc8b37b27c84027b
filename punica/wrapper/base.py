"""What every LoRA layer calls: the abstract wrapper, and the base that owns the metadata of a step.

`PunicaWrapperBase` holds the integers of the step (`StepMetadata`) and checks every call; a backend supplies two
products, `_shrink` and `_expand`.

Notation: T tokens and S sampled rows in the step, L slots, n slices packed in one layer (q/k/v), rank r. "x @ A" means
``x @ A[slot]^T``. The slot of a row is -1 when it has no adapter: `add_shrink` and every expand then leave the row
untouched, whether they accumulate or overwrite.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from punica.metadata import LoRAMapping
from punica.wrapper import operands as op
from punica.wrapper.moe import MoEMethods
from punica.wrapper.step import StepMetadata


class PunicaWrapperABC(ABC):
    """The six methods that a layer may call. Here they work in place and return None; a platform that cannot update in
    place returns the result instead, and layers honour it."""

    @abstractmethod
    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: Sequence[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Set the adapters of the next step; called once per model invocation."""

    @abstractmethod
    def add_shrink(
        self, y: op.Slices, x: torch.Tensor, lora_a_stacked: op.Weights, scale: float, **kwargs: Any
    ) -> torch.Tensor | None:
        """``y[i] += scale * (x @ A_i)`` for every slice i."""

    @abstractmethod
    def add_expand(
        self,
        y: torch.Tensor,
        x: op.Slices,
        lora_b_stacked: op.Weights,
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """``y[:, o_i : o_i + output_slices[i]] (+)= x[i] @ B_i`` with ``o_0 = offset_start``."""

    @abstractmethod
    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> torch.Tensor | None:
        """``y (+)= x @ B`` for rows x ``[T, r]`` already gathered from embedding A."""

    @abstractmethod
    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: op.Weights,
        lora_b_stacked: op.Weights,
        scale: float,
        output_slices: Sequence[int],
        *,
        buffer: op.Slices | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """``y[:, o_i : ...] (+)= scale * (x @ A_i) @ B_i`` for every slice i."""

    @abstractmethod
    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: op.Slices | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """``y[:, :V] += scale * (x @ A) @ B`` with the slots of the sampled rows."""


class PunicaWrapperBase(StepMetadata, MoEMethods, PunicaWrapperABC):
    """The checked ``add_*`` methods, on the metadata of the step and on top of a backend's `_shrink` and `_expand`.

    Constructed as `StepMetadata`. Every check precedes the first write. TypeError: a wrong type or dtype, an unknown
    keyword. ValueError: a wrong shape, range, stride or device, or fewer rows than the mapping has. RuntimeError: no
    metadata yet. ``T' = 0`` rows are legal and do nothing.
    """

    def add_shrink(
        self, y: op.Slices, x: torch.Tensor, lora_a_stacked: op.Weights, scale: float, **kwargs: Any
    ) -> None:
        """``y[i][t] += scale * (x[t] @ A_i[slot_t]^T)`` for every slice i.

        y: ``[n, T', r]`` or n tensors ``[T', r]``, any floating dtype (float32 keeps the precision). x: ``[T', in]`` or
        higher rank, dtype of A. A: n x ``[L, (1,) r, in]``. T' >= T, rows past T are padding. ``lora_ranks``: int32
        ``[n, L]``, each adapter's true rank (None: r).
        """
        op.check_keywords("add_shrink", kwargs, ("lora_ranks",))
        if self._nothing_to_do(sampled=False):
            return
        weights = op.stacked("lora_a_stacked", lora_a_stacked, same_shape=True)
        ranks = op.check_ranks(kwargs.get("lora_ranks"), weights)
        op.check_scale(scale)
        x = op.shrink_input(x, weights)
        op.check_low_rank("y", y, weights, x.shape[0], weights[0].shape[-2])
        if self._live_rows(x.shape[0], sampled=False):
            for _, part, group, group_ranks in op.slice_groups(y, weights, ranks):
                self._shrink(part, x, group, scale, accumulate=True, lora_ranks=group_ranks, sampled=False)

    def add_expand(
        self,
        y: torch.Tensor,
        x: op.Slices,
        lora_b_stacked: op.Weights,
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y[t, o_i : o_i + output_slices[i]] (+)= x[i][t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, slices in a row.

        y: ``[T', W]`` or higher rank that can be viewed so. x: ``[n, T', r]`` or n tensors ``[T', r]``, float32 or the
        dtype of B. B: n x ``[L, (1,) output_slices[i], r]``. ``add_inputs=False`` overwrites. ``lora_ranks`` as in
        `add_shrink`.
        """
        op.check_keywords("add_expand", kwargs, ("lora_ranks",))
        if self._nothing_to_do(sampled=False):
            return
        weights = op.stacked("lora_b_stacked", lora_b_stacked, same_shape=False)
        ranks = op.check_ranks(kwargs.get("lora_ranks"), weights)
        op.check_bool("add_inputs", add_inputs)
        y = op.expand_output(y, weights)
        op.check_columns(output_slices, weights, offset_start, y.shape[1])
        allowed = (torch.float32, weights[0].dtype)
        op.check_low_rank("x", x, weights, y.shape[0], weights[0].shape[-1], allowed)
        if self._live_rows(y.shape[0], sampled=False):
            self._expand_slices(y, x, weights, offset_start, add_inputs, ranks, sampled=False)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y[t] (+)= x[t] @ B[slot_t]^T``: x ``[T', r]`` are the rows already gathered from embedding A."""
        op.check_keywords("add_lora_embedding", kwargs, ("lora_ranks",))
        if self._nothing_to_do(sampled=False):
            return
        weights = op.stacked("lora_b_stacked", (lora_b_stacked,), same_shape=True)
        op.check_dtype("x", x, (torch.float32, lora_b_stacked.dtype))
        rows = op.flattened("x", x).unsqueeze(0)
        self.add_expand(y, rows, weights, (lora_b_stacked.shape[-2],), 0, add_inputs, **kwargs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: op.Weights,
        lora_b_stacked: op.Weights,
        scale: float,
        output_slices: Sequence[int],
        *,
        buffer: op.Slices | None = None,
        **kwargs: Any,
    ) -> None:
        """``y[t, o_i : ...] (+)= scale * (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``.

        Shapes as in `add_shrink` and `add_expand`; the intermediate ``[n, T', r]`` is float32 whatever the model dtype.
        ``buffer`` (CPU only): n float32 tensors ``[T', r]`` that are zeroed and then hold the intermediate. Keywords:
        ``add_inputs`` (default True), ``lora_ranks``. A and B must have one rank: rank-sharded weights go through
        `add_shrink`, a collective, `add_expand`. A step without any adapter writes nothing at all.
        """
        op.check_keywords("add_lora_linear", kwargs, ("add_inputs", "lora_ranks"))
        self._check_buffer(buffer)
        if self._nothing_to_do(sampled=False):
            return
        weights_a = op.stacked("lora_a_stacked", lora_a_stacked, same_shape=True)
        weights_b = op.stacked("lora_b_stacked", lora_b_stacked, same_shape=False)
        add_inputs = op.check_bool("add_inputs", kwargs.get("add_inputs", True))
        ranks = op.check_ranks(kwargs.get("lora_ranks"), weights_b)
        y = op.expand_output(y, weights_b)
        op.check_columns(output_slices, weights_b, 0, y.shape[1])
        self._product(y, x, weights_a, weights_b, scale, buffer, add_inputs, ranks, sampled=False)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: op.Slices | None = None,
        **kwargs: Any,
    ) -> None:
        """``y[s, :V] += scale * (x[s] @ A[slot_s]^T) @ B[slot_s]^T`` with the slots of the S sampled rows.

        x: ``[S', hidden]``; y: ``[S', V']`` with V' >= V = ``B.shape[-2]``, the columns from V on stay as they are.
        A, B: one tensor each, ``[L, (1,) r, hidden]`` and ``[L, (1,) V, r]``. ``buffer`` as in `add_lora_linear`.
        """
        op.check_keywords("add_lora_logits", kwargs, ("lora_ranks",))
        self._check_buffer(buffer)
        if self._nothing_to_do(sampled=True):
            return
        weights_a = op.stacked("lora_a_stacked", (lora_a_stacked,), same_shape=True)
        weights_b = op.stacked("lora_b_stacked", (lora_b_stacked,), same_shape=True)
        ranks = op.check_ranks(kwargs.get("lora_ranks"), weights_b)
        y = op.expand_output(y, weights_b)
        op.check_columns((lora_b_stacked.shape[-2],), weights_b, 0, y.shape[1])
        if isinstance(buffer, torch.Tensor) and buffer.ndim == 2:
            buffer = buffer.unsqueeze(0)
        self._product(y, x, weights_a, weights_b, scale, buffer, True, ranks, sampled=True)

    def _nothing_to_do(self, *, sampled: bool) -> bool:
        """Whether no row of the step has an adapter; RuntimeError before the first `update_metadata`."""
        self._current()
        return self._no_sampled_lora if sampled else self.no_lora

    def _live_rows(self, rows: int, *, sampled: bool) -> int:
        """Check that ``rows`` covers the mapping; returns it (0 = nothing to do)."""
        what, mapped = ("sampled rows", 1) if sampled else ("tokens", 0)
        mapped = self._current().lengths[mapped]
        if rows and not mapped <= rows <= self.max_num_batched_tokens:
            raise ValueError(
                f"got {rows} rows, expected at least the {mapped} {what} of the mapping and at most "
                f"max_num_batched_tokens={self.max_num_batched_tokens}; call update_metadata for this batch"
            )
        return rows

    def _check_buffer(self, buffer: op.Slices | None) -> None:
        """A backend that makes its own intermediate refuses one here."""

    def _product(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights_a: op.Weights,
        weights_b: op.Weights,
        scale: float,
        buffer: op.Slices | None,
        add_inputs: bool,
        lora_ranks: torch.Tensor | None,
        *,
        sampled: bool,
    ) -> None:
        """Shrink into a float32 intermediate, then expand; the remaining checks come first."""
        op.check_scale(scale)
        x = op.shrink_input(x, weights_a)
        op.check_pair(weights_a, weights_b)
        rows, rank = y.shape[0], weights_b[0].shape[-1]
        if x.shape[0] != rows:
            raise ValueError(f"x has {x.shape[0]} rows and y has {rows}; they must be equal")
        if buffer is not None:
            op.check_low_rank("buffer", buffer, weights_b, rows, rank, (torch.float32,))
        if self._live_rows(rows, sampled=sampled):
            self._linear(y, x, weights_a, weights_b, scale, buffer, add_inputs, lora_ranks, sampled=sampled)

    def _linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights_a: op.Weights,
        weights_b: op.Weights,
        scale: float,
        buffer: op.Slices | None,
        add_inputs: bool,
        lora_ranks: torch.Tensor | None,
        *,
        sampled: bool,
    ) -> None:
        """What a backend does for `_product`, all arguments checked: here shrink, then expand."""
        if buffer is None:
            shape = (len(weights_b), y.shape[0], weights_b[0].shape[-1])
            buffer = torch.empty(shape, dtype=torch.float32, device=x.device)
        else:
            for part in buffer:
                part.zero_()
        for first, part, group, _ in op.slice_groups(buffer, weights_a, None):
            ranks = None if lora_ranks is None else lora_ranks[first : first + len(group)]
            self._shrink(part, x, group, scale, accumulate=False, lora_ranks=ranks, sampled=sampled)
        self._expand_slices(y, buffer, weights_b, 0, add_inputs, lora_ranks, sampled=sampled)

    def _expand_slices(
        self,
        y: torch.Tensor,
        x: op.Slices,
        weights: op.Weights,
        offset_start: int,
        add_inputs: bool,
        lora_ranks: torch.Tensor | None,
        *,
        sampled: bool,
    ) -> None:
        for first, part, group, ranks in op.slice_groups(x, weights, lora_ranks):
            start = offset_start + sum(weight.shape[-2] for weight in weights[:first])
            self._expand(y, part, group, start, add_inputs, lora_ranks=ranks, sampled=sampled)

    def _shrink(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: op.Weights,
        scale: float,
        *,
        accumulate: bool,
        lora_ranks: torch.Tensor | None,
        sampled: bool,
    ) -> None:
        """Backend: ``y[i] (+)= scale * (x @ A_i)`` into y ``[n, T', r]``, by the slots of sampled rows or tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no shrink; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: op.Weights,
        offset_start: int,
        add_inputs: bool,
        *,
        lora_ranks: torch.Tensor | None,
        sampled: bool,
    ) -> None:
        """Backend: slices of y ``[T', W]`` ``(+)= x[i] @ B_i`` from x ``[n, T', r]``."""
        raise NotImplementedError(f"{type(self).__name__} has no expand; use PunicaWrapperCPU or PunicaWrapperGPU")
