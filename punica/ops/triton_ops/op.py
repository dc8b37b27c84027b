"""Check of the device; operators as graph tracers see them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from punica.ops.triton_ops.launch import INTERPRETED

T = TypeVar("T")


def check_runnable(device: torch.device) -> None:
    """Raise RuntimeError where no Triton kernel can run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the Triton ops need CUDA tensors, got {device}; on the CPU use punica.ops.torch_ops, or set "
            "TRITON_INTERPRET=1 before punica is imported to run the kernels in Triton's interpreter"
        )


def untraced(function: Callable[..., T]) -> Callable[..., T]:
    """Keep ``torch.compile`` out of a function: its graph breaks there, and the call is an eager one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
