"""What every LoRA layer calls: the abstract wrapper, and the base that owns the metadata of a step.

`PunicaWrapperBase` holds the step (`StepMetadata`) and turns what a layer hands over into rows; a backend supplies
three operators that take the step, `_shrink`, `_expand` and `_linear`, which check their operands.

Notation: T tokens and S sampled rows in the step, L slots, n slices packed in one layer (q/k/v), rank r. "x @ A" means
``x @ A[slot]^T``. The slot of a row is -1 when it has no adapter: `add_shrink` and every expand then leave the row
untouched, whether they accumulate or overwrite.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from punica.metadata import LoRAMapping
from punica.ops.checks import (
    FLOATS,
    check_bool,
    check_dtype,
    check_input,
    check_keywords,
    check_output,
    check_scale,
    check_slices,
    describe_weights,
    described_parts,
)
from punica.ops.quant import FP8_DTYPES
from punica.wrapper.fp8 import FP8_KEYWORDS, Fp8Keywords
from punica.wrapper.moe import MoEMethods
from punica.wrapper.step import StepMetadata

Slices = torch.Tensor | Sequence[torch.Tensor]
Weights = tuple[torch.Tensor, ...]


class PunicaWrapperABC(ABC):
    """The six methods that a layer may call. Here they work in place and return None; a platform that cannot update in
    place returns the result instead, and layers honour it.

    ``takes_aside``: whether `add_lora_linear` takes ``aside`` and ``base``, with which a layer has shrink and base
    product made beside one another (`punica.layers.dual_stream`). With ``base`` nothing was written to ``y`` before.
    """

    takes_aside: bool = False

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
        self, y: Slices, x: torch.Tensor, lora_a_stacked: Weights, scale: float, **kwargs: Any
    ) -> torch.Tensor | None:
        """``y[i] += scale * (x @ A_i)`` for every slice i."""

    @abstractmethod
    def add_expand(
        self,
        y: torch.Tensor,
        x: Slices,
        lora_b_stacked: Weights,
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
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Weights, lora_b_stacked: Weights,
        scale: float,
        output_slices: Sequence[int],
        *, buffer: Slices | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
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
        buffer: Slices | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """``y[:, :V] += scale * (x @ A) @ B`` with the slots of the sampled rows."""


class PunicaWrapperBase(StepMetadata, MoEMethods, PunicaWrapperABC):
    """The ``add_*`` methods on the current step, on top of a backend's operators.

    Constructed as `StepMetadata`. Every check precedes the first write. TypeError: a wrong type or dtype, an unknown
    keyword. ValueError: a wrong shape, range, stride or device, or fewer rows than the mapping has. RuntimeError: no
    metadata yet. ``T' = 0`` rows are legal and do nothing.
    """

    def add_shrink(self, y: Slices, x: torch.Tensor, lora_a_stacked: Weights, scale: float, **kwargs: Any) -> None:
        """``y[i][t] += scale * (x[t] @ A_i[slot_t]^T)`` for every slice i.

        y: ``[n, T', r]`` or n tensors ``[T', r]``, any floating dtype (float32 keeps the precision). x: ``[T', in]`` or
        higher rank, dtype of A. A: n x ``[L, (1,) r, in]``. T' >= T, rows past T are padding. ``lora_ranks``: int32
        ``[n, L]``, each adapter's true rank (None: r). A in FP8 needs the keywords of `punica.wrapper.fp8`; x then is
        any floating dtype, or FP8 with ``a_scale``.
        """
        check_keywords("add_shrink", kwargs, ("lora_ranks", *FP8_KEYWORDS))
        batch, fp8 = self._step(), Fp8Keywords.of(kwargs)
        if batch.no_lora:
            return
        x = flattened("x", x)
        if not x.shape[0]:
            return
        if fp8 is not None:
            self._look_at(fp8)
            ranks = kwargs.get("lora_ranks")
            sums = stacked("y", y, lora_a_stacked, -2, ranks)
            self._shrink_fp8(x, lora_a_stacked, sums, batch, scale, accumulate=True, lora_ranks=ranks, **fp8.of_shrink)
            for part, result in zip(() if sums is y else y, sums, strict=sums is not y):
                part.copy_(result)
            return
        if not isinstance(y, torch.Tensor):
            check_input("x", x, describe_weights("lora_a_stacked", lora_a_stacked, -2), "lora_a_stacked")
            check_scale("scale", scale)
            batch.check_rows(x.shape[0])
        for _, part, group, ranks in _slice_groups("y", y, lora_a_stacked, -2, kwargs.get("lora_ranks")):
            self._shrink(x, group, part, batch, scale, accumulate=True, lora_ranks=ranks)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Slices,
        lora_b_stacked: Weights,
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y[t, o_i : o_i + output_slices[i]] (+)= x[i][t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, slices in a row.

        y: ``[T', W]`` or higher rank that can be viewed so. x: ``[n, T', r]`` or n tensors ``[T', r]``, float32 or the
        dtype of B. B: n x ``[L, (1,) output_slices[i], r]``. ``add_inputs=False`` overwrites. ``lora_ranks`` as in
        `add_shrink`, B in FP8 too; x then is any floating dtype, or FP8 with ``a_scale``.
        """
        check_keywords("add_expand", kwargs, ("lora_ranks", *FP8_KEYWORDS))
        batch, fp8 = self._step(), Fp8Keywords.of(kwargs)
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        y = viewed_as_rows("y", y)
        check_slices(output_slices, lora_b_stacked)
        if not y.shape[0]:
            return
        if fp8 is not None:
            self._look_at(fp8)
            ranks = kwargs.get("lora_ranks")
            rows = stacked("x", x, lora_b_stacked, -1, ranks)
            given = fp8.of_expand | {"lora_ranks": ranks}
            self._expand_fp8(rows, lora_b_stacked, y, batch, offset_start, add_inputs, **given)
            return
        if not isinstance(x, torch.Tensor):  # slice by slice: all must be sure to fit before the first is written
            batch.check_rows(y.shape[0])
            check_output("y", y, describe_weights("lora_b_stacked", lora_b_stacked, -1), offset_start)
        for first, part, group, ranks in _slice_groups("x", x, lora_b_stacked, -1, kwargs.get("lora_ranks")):
            start = offset_start + sum(output_slices[:first])
            self._expand(part, group, y, batch, start, add_inputs, lora_ranks=ranks)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y[t] (+)= x[t] @ B[slot_t]^T``: x ``[T', r]`` are the rows already gathered from embedding A; with B in FP8
        they are real, and ``lora_b_scale`` is its scales, in a list.
        """
        check_keywords("add_lora_embedding", kwargs, ("lora_ranks", "lora_b_scale", "quant_args"))
        batch, fp8 = self._step(), Fp8Keywords.of(kwargs)
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        rows, y = flattened("x", x).unsqueeze(0), viewed_as_rows("y", y)
        if not y.shape[0]:
            return
        ranks = kwargs.get("lora_ranks")
        if fp8 is None:
            self._expand(rows, (lora_b_stacked,), y, batch, 0, add_inputs, lora_ranks=ranks)
        else:
            self._look_at(fp8)
            given = fp8.of_expand | {"lora_ranks": ranks}
            self._expand_fp8(rows, (lora_b_stacked,), y, batch, 0, add_inputs, **given)

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Weights, lora_b_stacked: Weights,
        scale: float,
        output_slices: Sequence[int],
        *, buffer: Slices | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, o_i : ...] (+)= scale * (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``.

        Shapes as in `add_shrink` and `add_expand`; the intermediate ``[n, T', r]`` is float32 whatever the model dtype.
        ``buffer`` (CPU only): n float32 tensors ``[T', r]`` that are zeroed and then hold the intermediate. Keywords:
        ``add_inputs`` (default True), ``lora_ranks``; on a GPU also (`punica.layers.dual_stream`) ``aside``, and
        ``base``, the weight and perhaps the bias of a base product, which y gets first (it may be uninitialised). A and
        B must have one rank: rank-sharded weights go through `add_shrink`, a collective, `add_expand`. A step without
        any adapter adds nothing at all. A and B in FP8 need the keywords of `punica.wrapper.fp8`; with
        ``use_fp8_w8a8`` an x that is not FP8 is quantised per token (leave ``a_scale`` out), and so is the
        intermediate.
        """
        known = "add_inputs", "lora_ranks", *FP8_KEYWORDS
        check_keywords("add_lora_linear", kwargs, (*known, "aside", "base") if self.takes_aside else known)
        check_bool("add_inputs", kwargs.get("add_inputs", True))
        if "base" in kwargs and buffer is not None:
            raise ValueError("add_lora_linear: buffer goes with no base product; leave one of them out")
        kwargs = self._with_fp8(kwargs)
        batch = self._step()
        if buffer is None and batch.no_lora and "base" not in kwargs:
            return
        y, x = viewed_as_rows("y", y), flattened("x", x)
        check_slices(output_slices, lora_b_stacked)
        if buffer is not None:
            self._linear_through(buffer, y, x, lora_a_stacked, lora_b_stacked, batch, scale, **kwargs)
        elif x.shape[0] or y.shape[0]:
            linear = self._linear_fp8 if "shrink" in kwargs else self._linear
            linear(y, x, lora_a_stacked, lora_b_stacked, batch, scale, **kwargs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: Slices | None = None,
        **kwargs: Any,
    ) -> None:
        """``y[s, :V] += scale * (x[s] @ A[slot_s]^T) @ B[slot_s]^T`` with the slots of the S sampled rows.

        x: ``[S', hidden]``; y: ``[S', V']`` with V' >= V = ``B.shape[-2]``, the columns from V on stay as they are.
        A, B: one tensor each, ``[L, (1,) r, hidden]`` and ``[L, (1,) V, r]``. ``buffer`` and FP8 as in
        `add_lora_linear`.
        """
        check_keywords("add_lora_logits", kwargs, ("lora_ranks", *FP8_KEYWORDS))
        kwargs = self._with_fp8(kwargs)
        batch = self._step().sampled
        if buffer is None and batch.no_lora:
            return
        y, x = viewed_as_rows("y", y), flattened("x", x)
        if buffer is not None:
            parts = buffer.unsqueeze(0) if isinstance(buffer, torch.Tensor) and buffer.ndim == 2 else buffer
            self._linear_through(parts, y, x, (lora_a_stacked,), (lora_b_stacked,), batch, scale, **kwargs)
        elif x.shape[0] or y.shape[0]:
            linear = self._linear_fp8 if "shrink" in kwargs else self._linear
            linear(y, x, (lora_a_stacked,), (lora_b_stacked,), batch, scale, **kwargs)

    def _with_fp8(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords with those of FP8, if any are given, as a backend's operator takes them."""
        fp8 = Fp8Keywords.of(kwargs)
        if fp8 is None:
            return {name: value for name, value in kwargs.items() if name not in FP8_KEYWORDS}
        self._look_at(fp8)
        return {name: value for name, value in kwargs.items() if name != "quant_args"} | fp8._asdict()

    def _look_at(self, fp8: Fp8Keywords) -> None:
        """With ``debug_checks`` the values of the scales are verified, but not during a capture."""
        wanted = self.lora_config is not None and self.lora_config.debug_checks
        if wanted and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            fp8.validate()

    def _linear_through(self, buffer: Slices, *operands: Any, **options: Any) -> None:
        """`_linear` that leaves its intermediate in ``buffer``, for a backend that can."""
        raise ValueError(f"buffer is created internally by {type(self).__name__}; call without it")

    def _shrink(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.torch_ops.shrink`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no shrink; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _expand(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.torch_ops.expand`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no expand; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _linear(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.torch_ops.linear`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no linear; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _shrink_fp8(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.fp8_ops.shrink_fp8`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no FP8; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _expand_fp8(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.fp8_ops.expand_fp8`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no FP8; use PunicaWrapperCPU or PunicaWrapperGPU")

    def _linear_fp8(self, *operands: Any, **options: Any) -> None:
        """Backend: `punica.ops.fp8_ops.linear_fp8`, or an operator that takes the same arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no FP8; use PunicaWrapperCPU or PunicaWrapperGPU")


def flattened(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` with its leading dimensions flattened to rows (a copy where the strides demand it: it is only read)."""
    if isinstance(x, torch.Tensor) and x.ndim == 2:
        return x
    check_rows_of(name, x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def viewed_as_rows(name: str, y: torch.Tensor) -> torch.Tensor:
    """``y`` as a 2-D view of its memory; ValueError where only a copy would do, since y is written in place."""
    if isinstance(y, torch.Tensor) and y.ndim == 2:
        return y
    check_rows_of(name, y)
    try:
        return y.view(math.prod(y.shape[:-1]), y.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} with shape {tuple(y.shape)} and strides {y.stride()} cannot be viewed as 2-D rows without a copy, "
            "so it cannot be updated in place; pass a contiguous tensor"
        ) from None


def check_rows_of(name: str, value: Any) -> None:
    """TypeError unless ``value`` is a floating tensor, ValueError unless it has rows."""
    check_dtype(name, value, (*FLOATS, *FP8_DTYPES))
    if value.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected rows: at least 2 dimensions")


def stacked(name: str, value: Slices, weights: Weights, rank_dim: int, lora_ranks: torch.Tensor | None) -> torch.Tensor:
    """An operand of FP8 weights over all slices: itself, or a copy of separate tensors, checked to be alike."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.stack(list(described_parts(name, value, weights, rank_dim, lora_ranks, FP8_DTYPES)))


def _slice_groups(
    name: str, value: Slices, weights: Weights, rank_dim: int, lora_ranks: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, Weights, torch.Tensor | None]]:
    """``(first slice, operand [m, T', r], weights of its m slices, their ranks)``, one operator call each.

    A tensor over all slices is one call. Separate tensors are addressed one by one, without copying them together; that
    they are alike is checked before the first call.
    """
    if isinstance(value, torch.Tensor):
        yield 0, value, weights, lora_ranks
        return
    parts = described_parts(name, value, weights, rank_dim, lora_ranks)
    for i, part in enumerate(parts):
        yield i, part.unsqueeze(0), weights[i : i + 1], None if lora_ranks is None else lora_ranks[i : i + 1]
