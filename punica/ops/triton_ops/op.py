"""Registration of Triton ops with torch, and their names in profiles.

An op with a flat signature is decorated with `custom_op`: the function's own signature is the schema of
``torch.ops.punica.<name>``. A graph tracer sees one node for it.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.library import Library

from punica.ops.triton_ops.launch import INTERPRETED

# The custom ops of this package, `torch.ops.punica.*`
LIBRARY = Library("punica", "FRAGMENT")


def check_runnable(device: torch.device) -> None:
    """Raise RuntimeError where no Triton kernel can run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the Triton ops need CUDA tensors, got {device}; on the CPU use punica.ops.torch_ops, or set "
            "TRITON_INTERPRET=1 before punica is imported to run the kernels in Triton's interpreter"
        )


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

        places = [(parameter, f"{parameter}_number", _place(signature, parameter)) for parameter in either]

        def implementation(*args: Any, **kwargs: Any) -> None:
            for parameter, name, place in places:
                number = kwargs.pop(name, None)
                if number is not None and place is not None:
                    args = (*args[:place], number, *args[place + 1 :])
                elif number is not None:
                    kwargs[parameter] = number
            function(*args, **kwargs)

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
    """Give no shape: every op here only writes tensors that it was given."""


def _place(signature: inspect.Signature, name: str) -> int | None:
    """Return the place of a parameter among the positional ones; None where it is given by its name."""
    parameter = signature.parameters[name]
    return None if parameter.kind is parameter.KEYWORD_ONLY else list(signature.parameters).index(name)


def _number_or_tensor(function: Callable) -> tuple[str, ...]:
    hints = typing.get_type_hints(function)
    return tuple(name for name, hint in hints.items() if {int, Tensor} <= set(typing.get_args(hint)))


def _maybe_lists(function: Callable) -> tuple[str, ...]:
    hints = typing.get_type_hints(function)
    return tuple(name for name, hint in hints.items() if Sequence[Tensor] in typing.get_args(hint))


def _schema(function: Callable, mutates: tuple[str, ...], either: Sequence[str], lists: Sequence[str]) -> str:
    """Return the schema that torch infers from the function's signature."""
    hints, parameters = typing.get_type_hints(function), []
    for parameter in inspect.signature(function).parameters.values():
        hint = typing.Optional[Tensor] if parameter.name in either else hints[parameter.name]  # noqa: UP045
        if parameter.name in lists:  # no schema has a default for a list of tensors
            hint, parameter = Sequence[Tensor], parameter.replace(default=inspect.Parameter.empty)
        parameters.append(parameter.replace(annotation=hint))
    for name in either:
        number = typing.Optional[int]  # noqa: UP045 (torch wants this spelling)
        parameters.append(
            inspect.Parameter(f"{name}_number", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=number)
        )

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=mutates)
