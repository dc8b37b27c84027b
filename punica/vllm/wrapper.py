"""The wrapper's methods on dense layers with the weights given by their tensors, and the wrappers that have them.

Notation: T tokens and S sampled rows in the step, L slots, n slices packed in one layer (q/k/v), rank r. "x @ A" means
``x @ A[slot]^T``. The slot of a row is -1 when it has no adapter: `add_shrink` and every expand then leave the row
untouched, whether they accumulate or overwrite.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from punica.checks import check_bool
from punica.metadata import LoRABatch
from punica.ops.expect import FLOAT32, expect
from punica.ops.interface import ALONE, Beside, check_output, check_parts, check_slices, low_rank_of
from punica.ops.weights import STEP, LoRAWeights, Stack
from punica.vllm.experts import ExpertContract
from punica.vllm.indices import StepIndices
from punica.vllm.weights import KEYWORDS, Keywords, known_stack, known_weights
from punica.wrapper.backends import CPUBackend, GPUBackend
from punica.wrapper.linear import LinearMethods, flattened, viewed_as_rows

Slices = Tensor | Sequence[Tensor]
Weights = tuple[Tensor, ...]


class LinearContract(LinearMethods):
    """The ``add_*`` methods on the current step.

    Every check precedes the first write. TypeError: a wrong type or dtype, an unknown keyword. ValueError: a wrong
    shape, range, stride or device, or fewer rows than the mapping has. RuntimeError: no metadata yet. ``T' = 0`` rows
    are legal and do nothing. The keywords of true ranks and of weights in FP8 are `punica.vllm.weights.Keywords`.
    """

    takes_buffer = False

    def add_shrink(self, y: Slices, x: Tensor, lora_a_stacked: Weights, scale: float, **kwargs: Any) -> None:
        """``y[i][t] += scale * (x[t] @ A_i[slot_t]^T)`` for every slice i.

        y: ``[n, T', r]`` or n tensors ``[T', r]``, any floating dtype (float32 keeps the precision). x: ``[T', in]`` or
        higher rank, dtype of A. A: n x ``[L, (1,) r, in]``. T' >= T, rows past T are padding. x of weights in FP8: any
        floating dtype, or FP8 with ``a_scale``.
        """
        given, batch = self._keywords("add_shrink", kwargs), self._step()
        if batch.no_lora:
            return
        x = flattened("x", x)
        if not x.shape[0]:
            return
        a = known_stack(lora_a_stacked, -2, given.lora_ranks, given.lora_a_scale, given.shrink)
        for _, part, own in _calls("y", y, a, self.ops.contiguous_shrinks):
            self.ops.shrink(part, x, own, batch, scale, True, given.a_scale)

    def add_expand(
        self, y: Tensor, x: Slices, lora_b_stacked: Weights, output_slices: Sequence[int], offset_start: int = 0,
        add_inputs: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, o_i : o_i + output_slices[i]] (+)= x[i][t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, slices in a row.

        y: ``[T', W]`` or higher rank that can be viewed so. x: ``[n, T', r]`` or n tensors ``[T', r]``, float32 or the
        dtype of B; of B in FP8 as in `add_shrink`. B: n x ``[L, (1,) output_slices[i], r]``. ``add_inputs=False``
        overwrites.
        """
        given, batch = self._keywords("add_expand", kwargs), self._step()
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        y = viewed_as_rows("y", y)
        check_slices(output_slices, lora_b_stacked)
        if not y.shape[0]:
            return
        b = known_stack(lora_b_stacked, -1, given.lora_ranks, given.lora_b_scale, given.expand)
        if not isinstance(x, Tensor):  # slice by slice: all must be sure to fit before the first is written
            batch.check_rows(y.shape[0])
            check_output(STEP, y, b.form.stored, offset_start)
        for first, part, own in _calls("x", x, b):
            start = offset_start + sum(output_slices[:first])
            self.ops.expand(y, part, own, batch, start, add_inputs, given.a_scale)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y[t] (+)= x[t] @ B[slot_t]^T`` of rows x ``[T', r]`` gathered from embedding A, real also for B in FP8."""
        given = self._keywords("add_lora_embedding", kwargs, ("lora_ranks", "lora_b_scale", "quant_args"))
        batch = self._step()
        if batch.no_lora:
            return
        check_bool("add_inputs", add_inputs)
        rows, y = flattened("x", x).unsqueeze(0), viewed_as_rows("y", y)
        if y.shape[0]:
            b = known_stack((lora_b_stacked,), -1, given.lora_ranks, given.lora_b_scale, given.expand)
            self.ops.expand(y, rows, b, batch, 0, add_inputs)

    def add_lora_linear(
        self, y: Tensor, x: Tensor, lora_a_stacked: Weights, lora_b_stacked: Weights, scale: float,
        output_slices: Sequence[int], *, buffer: Slices | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, o_i : ...] (+)= scale * (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``.

        Shapes as in `add_shrink` and `add_expand`; the intermediate ``[n, T', r]`` is float32. ``buffer`` (CPU only): n
        float32 tensors ``[T', r]``, which then hold it. ``add_inputs`` (default True) is a keyword. A and B have one
        rank: rank-sharded weights go through `add_shrink`, a collective, `add_expand`. With ``use_fp8_w8a8`` an x that
        is not FP8 is quantised per token (leave ``a_scale`` out), and so is the intermediate.
        """
        given = self._keywords("add_lora_linear", kwargs, ("add_inputs", *KEYWORDS))
        batch, add_inputs = self._step(), kwargs.get("add_inputs", True)
        check_bool("add_inputs", add_inputs)
        if buffer is None and batch.no_lora:
            return
        y, x = viewed_as_rows("y", y), flattened("x", x)
        check_slices(output_slices, lora_b_stacked)
        weights = _pair(lora_a_stacked, lora_b_stacked, given)
        self._linear(buffer, y, x, weights, batch, scale, add_inputs, given.a_scale)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float,
        *, buffer: Slices | None = None, **kwargs: Any,
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
        weights = _pair((lora_a_stacked,), (lora_b_stacked,), given)
        parts = buffer.unsqueeze(0) if isinstance(buffer, Tensor) and buffer.ndim == 2 else buffer
        self._linear(parts, y, x, weights, batch, scale, True, given.a_scale)

    def _keywords(self, method: str, kwargs: dict[str, Any], allowed: Sequence[str] = KEYWORDS) -> Keywords:
        given = Keywords.of(method, kwargs, allowed)
        self._debug_check(given)
        return given

    def _linear(
        self, buffer: Slices | None, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float,
        add_inputs: bool, x_scale: Tensor | None,
    ) -> None:  # fmt: skip
        """Add the product, and fill a ``buffer`` by a shrink of its own."""
        if buffer is None:
            if x.shape[0] or y.shape[0]:
                self.ops.linear(y, x, weights, batch, scale, add_inputs, x_scale)
            return
        if not self.takes_buffer:
            raise ValueError(f"buffer is created internally by {type(self).__name__}; call without it")
        stored = weights.b.form.stored
        if isinstance(buffer, Tensor):
            sizes = stored.sizes("lora_b_stacked") | {"T": x.shape[0], "of T *": "x"}
            expect("buffer", buffer, "n T r", dtype=FLOAT32, device=stored.device, sizes=sizes)
        else:
            check_parts("buffer", buffer, stored)
        if batch.no_lora:
            return
        self.ops.linear(y, x, weights, batch, scale, add_inputs, x_scale)
        low_rank = low_rank_of(self.ops, x, weights, batch, scale, x_scale)
        for part, result in zip(buffer, low_rank, strict=True):
            part.copy_(result)


def _pair(lora_a: Weights, lora_b: Weights, given: Keywords) -> LoRAWeights:
    scales = given.lora_a_scale, given.lora_b_scale
    return known_weights(lora_a, lora_b, given.lora_ranks, scales, (given.shrink, given.expand))


def _calls(name: str, value: Slices, stack: Stack, contiguous: bool = False) -> Iterator[tuple[int, Tensor, Stack]]:
    """Yield ``(first slice, operand [m, T', r], weights of its m slices)``, one operation each: a tensor over all
    slices, or separate tensors, which are checked to be alike before the first and are not copied.
    """
    if isinstance(value, Tensor):
        yield 0, value, stack
        return
    check_parts(name, value, stack.form.stored, contiguous)
    for i, part in enumerate(value):
        yield i, part.unsqueeze(0), stack.slice(i)


def _declared(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def declared(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    return abstractmethod(declared)


class PunicaWrapperABC(ABC):  # noqa: B024 (`_declared` makes them abstract)
    """The contract's six methods: in place, returning None; other platforms return the result, which layers honour."""

    update_metadata = _declared(LinearMethods.update_metadata)
    add_shrink = _declared(LinearContract.add_shrink)
    add_expand = _declared(LinearContract.add_expand)
    add_lora_embedding = _declared(LinearContract.add_lora_embedding)
    add_lora_linear = _declared(LinearContract.add_lora_linear)
    add_lora_logits = _declared(LinearContract.add_lora_logits)


class PunicaWrapperBase(StepIndices, LinearContract, ExpertContract, PunicaWrapperABC):
    """A step (`StepMetadata`), the methods that layers call (`LinearMethods`, `ExpertMethods`) and the contract's. A
    backend sets ``_ops`` and ``_experts``; methods without theirs raise NotImplementedError.
    """


class PunicaWrapperCPU(PunicaWrapperBase, CPUBackend):
    """The wrapper on `CPUBackend`."""

    takes_buffer = True


class PunicaWrapperGPU(PunicaWrapperBase, GPUBackend):
    """The wrapper on `GPUBackend`. TypeError without ``lora_config`` and ``max_loras``, short for its defaults."""


def inner_form(wrapper: Any) -> Any:
    """Return the methods that a layer calls (`LinearMethods`): the wrapper, or the way through its contract where it
    has that alone, or a method of its own in place of the library's.
    """
    own = [name for name in vars(PunicaWrapperABC) if name.startswith("add_")]
    if isinstance(wrapper, PunicaWrapperBase) and not any(
        name in vars(wrapper) or getattr(type(wrapper), name) is not getattr(PunicaWrapperBase, name) for name in own
    ):
        return wrapper
    return _ThroughContract(wrapper)


class _ThroughContract:
    """The inner form by the contract's methods of a wrapper, which know no base product and may return a new y."""

    takes_aside = False

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def add_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, add_inputs: bool = True, beside: Beside = ALONE
    ) -> None:
        a, b, given = weights.a, weights.b, _keywords_of(weights.a, weights.b)
        given |= {} if add_inputs else {"add_inputs": False}
        _store(y, self.wrapper.add_lora_linear(y, x, a.tensors, b.tensors, 1.0, b.form.stored.widths, **given))

    def add_logits(self, y: Tensor, x: Tensor, weights: LoRAWeights) -> None:
        a, b = weights.a, weights.b
        _store(y, self.wrapper.add_lora_logits(y, x, a.tensors[0], b.tensors[0], 1.0, **_keywords_of(a, b)))

    def add_shrunk(self, y: Tensor, x: Tensor, a: Stack) -> None:
        _store(y, self.wrapper.add_shrink(y, x, a.tensors, 1.0, **_keywords_of(a)))

    def add_expanded(self, y: Tensor, x: Tensor, b: Stack, offset_start: int = 0) -> None:
        _store(y, self.wrapper.add_expand(y, x, b.tensors, b.form.stored.widths, offset_start, **_keywords_of(b)))

    def add_embedding(self, y: Tensor, x: Tensor, b: Stack) -> None:
        _store(y, self.wrapper.add_lora_embedding(y, x, b.tensors[0], **_keywords_of(b)))


def _store(y: Tensor, returned: Tensor | None) -> None:
    if returned is not None and returned is not y:
        y.copy_(returned)


def _keywords_of(*stacks: Stack) -> dict[str, Any]:
    given: dict[str, Any] = {"lora_ranks": stacks[0].ranks}
    for stack in stacks:
        if stack.form.is_fp8:
            given["lora_a_scale" if stack.rank_dim == -2 else "lora_b_scale"] = stack.scales
            given["quant_args"] = stack.form.scheme
    return given
