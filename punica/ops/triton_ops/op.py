"""The scaffold of a Triton op: what it registers with torch, where it finds what it has worked out before.

An op is one file. It has two forms that share everything:

* *on a step*, what the wrapper calls: ``shrink(x, lora_a_stacked, y, batch, ...)`` with a `LoRABatch`;
* *flat*, for callers who hold the tensors of the metadata themselves: ``lora_shrink(inputs, ..., scaling)``, decorated
  with `custom_op`. The function's own signature is the schema of ``torch.ops.punica.lora_shrink``.

Checks and choices depend only on the forms of the operands (shapes, strides, dtypes, devices), so `Plans` keeps them:
those of the weights once per set of weights, those of the activations once per shape.
"""

import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.library import Library

from punica.metadata import LoRABatch
from punica.ops.checks import FLAT, STEP, WITH_DOUBLE, Names, check_dtype, check_scale
from punica.ops.triton_ops.configs import Options as Options
from punica.ops.triton_ops.launch import INTERPRETED
from punica.ops.triton_ops.plan import Batch
from punica.ops.triton_ops.tensor_batch import TensorBatch

# The custom ops of this package, `torch.ops.punica.*`
LIBRARY = Library("punica", "FRAGMENT")


def check_runnable(device: torch.device) -> None:
    """RuntimeError where no Triton kernel can run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the Triton ops need CUDA tensors, got {device}; on the CPU use punica.ops.torch_ops, or set "
            "TRITON_INTERPRET=1 before punica is imported to run the kernels in Triton's interpreter"
        )


# --- registration ----------------------------------------------------------------------------------------------------


def is_traced() -> bool:
    """Tell whether a graph tracer is active: an op is then one node of its graph.

    A profiler is none: a profiled step launches the kernels of any other step, under the names of `named`.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def named(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show calls of the decorated function in profiles as ``punica::<name>``."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if not torch.autograd.profiler._is_profiler_enabled:  # record_function costs microseconds
                function(*args, **kwargs)
                return
            with record_function(f"punica::{name}"):
                function(*args, **kwargs)

        return call

    return decorate


def call_flat(op: Callable[..., None], operands: tuple, batch: LoRABatch, rows: int, **options: Any) -> None:
    """The flat form of an op on a step whose tensors have ``rows`` rows."""
    batch.check_rows(rows)
    *tensors, count = batch.meta_args(rows)
    op(*operands, *tensors, num_active_loras=count, **options)


def custom_op(mutates: str | tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as ``torch.ops.punica.<name>``, which writes its arguments ``mutates``.

    Called by its own name it runs as a plain function (torch's dispatcher costs as much as a launch), except where
    `is_traced`. A parameter annotated ``int | Tensor | None`` becomes two in the schema, since no schema type is both:
    a tensor stays data for graph tracers, a number goes into ``<parameter>_number``. Of one annotated
    ``Sequence[Tensor] | None``, which no schema type is either, None becomes an empty list.
    """
    written = (mutates,) if isinstance(mutates, str) else mutates

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name, either, signature = function.__name__, _number_or_tensor(function), inspect.signature(function)
        lists = _maybe_lists(function)
        LIBRARY.define(name + _schema(function, written, either, lists))

        def implementation(*args: Any, **kwargs: Any) -> None:
            numbers = {parameter: kwargs.pop(f"{parameter}_number", None) for parameter in either}
            arguments = signature.bind(*args, **kwargs).arguments
            function(**arguments | {name: number for name, number in numbers.items() if number is not None})

        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"punica::{name}", _writes_in_place, lib=LIBRARY)
        registered = getattr(torch.ops.punica, name).default

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if not is_traced():
                function(*args, **kwargs)
                return
            args, kwargs = (), signature.bind(*args, **kwargs).arguments
            for parameter in either:
                if isinstance(kwargs.get(parameter), int):
                    kwargs |= {f"{parameter}_number": kwargs[parameter], parameter: None}
            kwargs |= {parameter: [] for parameter in lists if kwargs.get(parameter) is None}
            registered(*args, **kwargs)

        return call

    return register


def _writes_in_place(*args: Any, **kwargs: Any) -> None:
    """Shape function of every op here: it only writes a tensor that it was given."""


def _number_or_tensor(function: Callable) -> tuple[str, ...]:
    hints = typing.get_type_hints(function)
    return tuple(name for name, hint in hints.items() if {int, Tensor} <= set(typing.get_args(hint)))


def _maybe_lists(function: Callable) -> tuple[str, ...]:
    hints = typing.get_type_hints(function)
    return tuple(name for name, hint in hints.items() if Sequence[Tensor] in typing.get_args(hint))


def _schema(function: Callable, mutates: tuple[str, ...], either: Sequence[str], lists: Sequence[str]) -> str:
    """The schema that torch infers from the function's signature."""
    hints, parameters = typing.get_type_hints(function), []
    for parameter in inspect.signature(function).parameters.values():
        hint = typing.Optional[Tensor] if parameter.name in either else hints[parameter.name]  # noqa: UP045
        hint = Sequence[Tensor] if parameter.name in lists else hint
        parameters.append(parameter.replace(annotation=hint))
    for name in either:
        number = typing.Optional[int]  # noqa: UP045 (torch wants this spelling)
        parameters.append(
            inspect.Parameter(f"{name}_number", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=number)
        )

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=mutates)


# --- plans -----------------------------------------------------------------------------------------------------------


class WeightSet:
    """The weights of one call site, known to be legal as long as they are these tensors.

    Nothing here keeps them alive: a tensor is recognised by a weak reference, by where its memory lies and by how it is
    laid out, so neither freed and reused memory nor ``w.data = ...`` nor ``w.resize_(...)`` brings back a stale answer.
    ``plans`` are those of all sets of this form.
    """

    __slots__ = ("aligned", "forms", "known", "plans")

    def __init__(self, tensors: Sequence[Tensor], forms: Any, plans: dict[tuple, Any]) -> None:
        self.known = [(weakref.ref(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        self.aligned = not any([tensor.data_ptr() & 15 for tensor in tensors])
        self.forms, self.plans = forms, plans

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are still the weights that were checked."""
        for tensor, (reference, address, shape, stride, dtype) in zip(tensors, self.known, strict=True):
            same = reference() is tensor and tensor.data_ptr() == address and tensor.dtype is dtype
            if not (same and tensor.shape == shape and tensor.stride() == stride):
                return False
        return True

    def alive(self) -> bool:
        """Whether all of them still exist."""
        return all([one[0]() is not None for one in self.known])


class Call(NamedTuple):
    """What an op was called with, besides weights; ``names`` are the caller's, ``switches`` the op's own."""

    names: Names
    x: Tensor
    y: Tensor
    lora_ranks: Tensor | None
    batch: Batch
    switches: tuple


class Plans:
    """What an op has checked and chosen, in a bounded table: a full one starts anew.

    ``describe(names, *weights)`` checks the weights and returns what it learnt; ``plan(call, forms)`` checks the rest
    and chooses the launches. Both raise without leaving anything behind.
    """

    def __init__(self, describe: Callable[..., Any], plan: Callable[..., Any]) -> None:
        self.describe, self.plan = describe, plan
        self.sets: dict[tuple, WeightSet] = {}
        self.plans: dict[Any, dict[tuple, Any]] = {}  # by the form of the weights: layers of one shape share theirs

    def find(
        self,
        x: Tensor,
        y: Tensor,
        weights: Sequence[Sequence[Tensor]],
        lora_ranks: Tensor | None,
        batch: Batch,
        switches: tuple,
        scale: float = 1.0,
    ) -> tuple[Any, bool]:
        """The plan of a call (None: there is nothing to do) and whether all addresses are multiples of 16.

        Everything is checked then.
        """
        known, names, ranks = self._weights(weights, batch), names_of(batch), lora_ranks
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and (ranks is None or isinstance(ranks, Tensor))):
            check_dtype(names.input, x, WITH_DOUBLE)
            check_dtype(names.output, y, WITH_DOUBLE)
            check_dtype("lora_ranks", ranks, (torch.int32,))
        batch.check_rows(x.shape[-2] if x.ndim > 1 else 0)
        check_scale(names.scale, scale)
        key = (
            x.shape, x.stride(), x.dtype, x.get_device(), y.shape, y.stride(), y.dtype, y.get_device(),
            ranks if ranks is None else (ranks.shape, ranks.stride(), ranks.dtype, ranks.get_device()),
            batch.shape, batch.max_segments, batch.form, switches,
        )  # fmt: skip
        try:
            plan = known.plans[key]
        except KeyError:
            if len(known.plans) >= 4096:
                known.plans.clear()
            call = Call(names, x, y, lora_ranks, batch, switches)
            plan = self.plan(call, known.forms)
            check_runnable(x.device)
            known.plans[key] = plan
        return plan, known.aligned and not (x.data_ptr() | y.data_ptr()) & 15

    def _weights(self, weights: Sequence[Sequence[Tensor]], batch: Batch) -> WeightSet:
        tensors: list[Tensor] = []
        for group in weights:
            if not isinstance(group, (tuple, list)):
                self.describe(names_of(batch), *weights)
            tensors += group
        key = (*map(len, weights), *map(id, tensors))
        known = self.sets.get(key)
        if known is None or not known.holds(tensors):
            forms = self.describe(names_of(batch), *weights)
            if len(self.sets) >= 4096:  # most are of tensors that are gone
                self.sets = {key: one for key, one in self.sets.items() if one.alive()}
                if len(self.sets) >= 4096:
                    self.sets.clear()
            known = self.sets[key] = WeightSet(tensors, forms, self.plans.setdefault(forms, {}))
        return known


def names_of(batch: Batch) -> Names:
    """What the caller calls his operands."""
    return FLAT if isinstance(batch, TensorBatch) else STEP
