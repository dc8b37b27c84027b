"""The wrapper that every LoRA layer calls: it owns the metadata of a step and chooses the ops.

`get_punica_wrapper` picks the backend. A new backend is a subclass of `PunicaWrapperBase` whose ``_ops`` is a
`punica.ops.interface.Ops` (and ``_experts`` a `punica.ops.experts.ExpertOps`), and a factory registered in `BACKENDS`.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from punica.registry import Registry
from punica.wrapper.base import PunicaWrapperABC, PunicaWrapperBase
from punica.wrapper.cpu import PunicaWrapperCPU
from punica.wrapper.gpu import PunicaWrapperGPU

BACKENDS: Registry[Callable[..., PunicaWrapperBase]] = Registry("op backend")
BACKENDS.register("cpu")(PunicaWrapperCPU)


@BACKENDS.register("gpu")
def _gpu_wrapper(*args: Any, **kwargs: Any) -> PunicaWrapperGPU:
    device = _device_of(args, kwargs)
    if device.type != "cuda" or not torch.cuda.is_available():
        available = "available" if torch.cuda.is_available() else "not available"
        raise RuntimeError(f'backend "gpu" needs a CUDA device, got {device} (CUDA is {available}); use backend="cpu"')
    if not _has_triton():
        raise RuntimeError('backend "gpu" needs Triton, which is not installed; install triton or use backend="cpu"')
    return PunicaWrapperGPU(*args, **kwargs)


def get_punica_wrapper(*args: Any, backend: str | None = None, **kwargs: Any) -> PunicaWrapperBase:
    """A wrapper for ``(max_num_batched_tokens, max_batches, device, *, max_loras=None, lora_config=None)``.

    ``backend``: a name in `BACKENDS` (``"cpu"``, ``"gpu"``), or None for the GPU where ``device`` is CUDA and Triton is
    installed, else the CPU. RuntimeError: ``"gpu"`` without a CUDA device or without Triton. ValueError: another name.
    """
    if backend is None:
        backend = "gpu" if _device_of(args, kwargs).type == "cuda" and _has_triton() else "cpu"
    return BACKENDS.get(backend)(*args, **kwargs)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if "device" not in kwargs and len(args) < 3:
        raise TypeError("get_punica_wrapper needs max_num_batched_tokens, max_batches and device")
    return torch.device(kwargs["device"] if "device" in kwargs else args[2])


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
