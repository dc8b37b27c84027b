"""Registration of Triton ops with torch, and their names in profiles.

A graph tracer sees one node for an op of ``torch.ops.punica``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.library import Library, infer_schema

from punica.ops.triton_ops.launch import INTERPRETED
from punica.ops.weights import is_traced as is_traced

# The custom ops of this package, `torch.ops.punica.*`
LIBRARY = Library("punica", "FRAGMENT")


def check_runnable(device: torch.device) -> None:
    """Raise RuntimeError where no Triton kernel can run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the Triton ops need CUDA tensors, got {device}; on the CPU use punica.ops.torch_ops, or set "
            "TRITON_INTERPRET=1 before punica is imported to run the kernels in Triton's interpreter"
        )


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
    """Register the decorated function, whose signature is the schema, as an op that writes its arguments ``mutates``.

    Called by its own name it runs as a plain function (torch's dispatcher costs as much as a launch), except where
    `is_traced`.
    """
    written = (mutates,) if isinstance(mutates, str) else mutates

    def register(function: Callable[..., None]) -> Callable[..., None]:
        registered = register_op(function.__name__, infer_schema(function, mutates_args=written), function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            (registered if is_traced() else function)(*args, **kwargs)

        return call

    return register


def register_op(name: str, schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function``, which only writes tensors that it is given, and return ``torch.ops.punica.<name>``."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"punica::{name}", lambda *args, **kwargs: None, lib=LIBRARY)
    return getattr(torch.ops.punica, name).default
