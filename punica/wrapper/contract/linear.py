"""`PunicaWrapperABC` and its methods on dense layers, with the weights given by their tensors.

Notation: T tokens and S sampled rows in the step, L slots, n slices packed in one layer (q/k/v), rank r. "x @ A" means
``x @ A[slot]^T``. The slot of a row is -1 when it has no adapter: `add_shrink` and every expand then leave the row
untouched, whether they accumulate or overwrite.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from punica.metadata import LoRABatch, LoRAMapping
from punica.ops.expect import check_bool
from punica.ops.interface import check_output, check_parts, check_slices
from punica.ops.weights import STEP, LoRAWeights, Stack
from punica.wrapper.contract.keywords import KEYWORDS, Keywords
from punica.wrapper.linear import LinearMethods, flattened, viewed_as_rows

Slices = torch.Tensor | Sequence[torch.Tensor]
Weights = tuple[torch.Tensor, ...]


class PunicaWrapperABC(ABC):
    """The six methods of the contract, as `StepMetadata` and `LinearContract` describe them. These work in place and
    return None; a platform that cannot update in place returns the result instead, and layers honour it.
    """

    @abstractmethod
    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int,
        **kwargs: Any,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def add_shrink(
        self, y: Slices, x: torch.Tensor, lora_a_stacked: Weights, scale: float, **kwargs: Any
    ) -> torch.Tensor | None: ...

    @abstractmethod
    def add_expand(
        self, y: torch.Tensor, x: Slices, lora_b_stacked: Weights, output_slices: Sequence[int], offset_start: int = 0,
        add_inputs: bool = True, **kwargs: Any,
    ) -> torch.Tensor | None: ...  # fmt: skip

    @abstractmethod
    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> torch.Tensor | None: ...

    @abstractmethod
    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Weights, lora_b_stacked: Weights, scale: float,
        output_slices: Sequence[int], *, buffer: Slices | None = None, **kwargs: Any,
    ) -> torch.Tensor | None: ...  # fmt: skip

    @abstractmethod
    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, lora_b_stacked: torch.Tensor,
        scale: float, *, buffer: Slices | None = None, **kwargs: Any,
    ) -> torch.Tensor | None: ...  # fmt: skip


class LinearContract(LinearMethods, PunicaWrapperABC):
    """The ``add_*`` methods on the current step.

    Every check precedes the first write. TypeError: a wrong type or dtype, an unknown keyword. ValueError: a wrong
    shape, range, stride or device, or fewer rows than the mapping has. RuntimeError: no metadata yet. ``T' = 0`` rows
    are legal and do nothing.
    """

    def add_shrink(self, y: Slices, x: torch.Tensor, lora_a_stacked: Weights, scale: float, **kwargs: Any) -> None:
        """``y[i][t] += scale * (x[t] @ A_i[slot_t]^T)`` for every slice i.

        y: ``[n, T', r]`` or n tensors ``[T', r]``, any floating dtype (float32 keeps the precision). x: ``[T', in]`` or
        higher rank, dtype of A. A: n x ``[L, (1,) r, in]``. T' >= T, rows past T are padding. ``lora_ranks``: int32
        ``[n, L]``, each adapter's true rank (None: r). A in FP8 needs the keywords of `keywords.py`; x then is
        any floating dtype, or FP8 with ``a_scale``.
        """
        given, batch = self._keywords("add_shrink", kwargs), self._step()
        if batch.no_lora:
            return
        x = flattened("x", x)
        if not x.shape[0]:
            return
        for _, part, own in _calls("y", y, given.a(lora_a_stacked), self.ops.contiguous_shrinks):
            self.ops.shrink(part, x, own, batch, scale, True, given.a_scale)

    def add_expand(
        self, y: torch.Tensor, x: Slices, lora_b_stacked: Weights, output_slices: Sequence[int], offset_start: int = 0,
        add_inputs: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, o_i : o_i + output_slices[i]] (+)= x[i][t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, slices in a row.

        y: ``[T', W]`` or higher rank that can be viewed so. x: ``[n, T', r]`` or n tensors ``[T', r]``, float32 or the
        dtype of B. B: n x ``[L, (1,) output_slices[i], r]``. ``add_inputs=False`` overwrites. ``lora_ranks`` as in
        `add_shrink`, B in FP8 too; x then is any floating dtype, or FP8 with ``a_scale``.
        """
        given, batch = self._keywords("add_expand", kwargs), self._step()
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        y = viewed_as_rows("y", y)
        check_slices(output_slices, lora_b_stacked)
        if not y.shape[0]:
            return
        b = given.b(lora_b_stacked)
        if not isinstance(x, torch.Tensor):  # slice by slice: all must be sure to fit before the first is written
            batch.check_rows(y.shape[0])
            check_output(STEP, y, b.form.stored, offset_start)
        for first, part, own in _calls("x", x, b):
            start = offset_start + sum(output_slices[:first])
            self.ops.expand(y, part, own, batch, start, add_inputs, given.a_scale)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y[t] (+)= x[t] @ B[slot_t]^T``: x ``[T', r]`` are the rows already gathered from embedding A; with B in FP8
        they are real, and ``lora_b_scale`` is its scales, in a list.
        """
        given = self._keywords("add_lora_embedding", kwargs, ("lora_ranks", "lora_b_scale", "quant_args"))
        batch = self._step()
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        rows, y = flattened("x", x).unsqueeze(0), viewed_as_rows("y", y)
        if y.shape[0]:
            self.ops.expand(y, rows, given.b((lora_b_stacked,)), batch, 0, add_inputs)

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Weights, lora_b_stacked: Weights, scale: float,
        output_slices: Sequence[int], *, buffer: Slices | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, o_i : ...] (+)= scale * (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``.

        Shapes as in `add_shrink` and `add_expand`; the intermediate ``[n, T', r]`` is float32 whatever the model dtype.
        ``buffer`` (CPU only): n float32 tensors ``[T', r]``, which then hold the intermediate. Keywords: ``add_inputs``
        (default True), ``lora_ranks``. A and B must have one rank: rank-sharded weights go through `add_shrink`, a
        collective, `add_expand`. A step without any adapter adds nothing at all. A and B in FP8 need the keywords of
        `keywords.py`; with ``use_fp8_w8a8`` an x that is not FP8 is quantised per token (leave ``a_scale``
        out), and so is the intermediate.
        """
        given = self._keywords("add_lora_linear", kwargs, ("add_inputs", *KEYWORDS))
        batch, add_inputs = self._step(), kwargs.get("add_inputs", True)
        check_bool("add_inputs", add_inputs)
        if buffer is None and batch.no_lora:
            return
        y, x = viewed_as_rows("y", y), flattened("x", x)
        check_slices(output_slices, lora_b_stacked)
        if buffer is not None or x.shape[0] or y.shape[0]:
            weights = given.weights(lora_a_stacked, lora_b_stacked)
            self._linear(buffer, y, x, weights, batch, scale, add_inputs, given.a_scale)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, lora_b_stacked: torch.Tensor,
        scale: float, *, buffer: Slices | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[s, :V] += scale * (x[s] @ A[slot_s]^T) @ B[slot_s]^T`` with the slots of the S sampled rows.

        x: ``[S', hidden]``; y: ``[S', V']`` with V' >= V = ``B.shape[-2]``, the columns from V on stay as they are.
        A, B: one tensor each, ``[L, (1,) r, hidden]`` and ``[L, (1,) V, r]``. ``buffer`` and FP8 as in
        `add_lora_linear`.
        """
        given, batch = self._keywords("add_lora_logits", kwargs), self._step().sampled
        if buffer is None and batch.no_lora:
            return
        y, x = viewed_as_rows("y", y), flattened("x", x)
        parts = buffer.unsqueeze(0) if isinstance(buffer, torch.Tensor) and buffer.ndim == 2 else buffer
        if buffer is not None or x.shape[0] or y.shape[0]:
            weights = given.weights((lora_a_stacked,), (lora_b_stacked,))
            self._linear(parts, y, x, weights, batch, scale, True, given.a_scale)

    def _keywords(self, method: str, kwargs: dict[str, Any], allowed: Sequence[str] = KEYWORDS) -> Keywords:
        """The keywords of a call, their values verified with ``debug_checks``."""
        given = Keywords.of(method, kwargs, allowed)
        self._debug_check(given)
        return given

    def _linear(
        self, buffer: Slices | None, y: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, batch: LoRABatch,
        scale: float, add_inputs: bool, x_scale: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """The operation; a backend that can leaves the intermediate in ``buffer``."""
        if buffer is not None:
            raise ValueError(f"buffer is created internally by {type(self).__name__}; call without it")
        self.ops.linear(y, x, weights, batch, scale, add_inputs, x_scale)


def _calls(
    name: str, value: Slices, stack: Stack, contiguous: bool = False
) -> Iterator[tuple[int, torch.Tensor, Stack]]:
    """``(first slice, operand [m, T', r], weights of its m slices)``, one operation each.

    A tensor over all slices is one. Separate tensors are addressed one by one, without copying them together; that
    they are alike is checked before the first.
    """
    if isinstance(value, torch.Tensor):
        yield 0, value, stack
        return
    check_parts(name, value, stack.form.stored, contiguous)
    for i, part in enumerate(value):
        yield i, part.unsqueeze(0), stack.slice(i)
