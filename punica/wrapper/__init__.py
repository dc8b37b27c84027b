"""The wrapper that every LoRA layer calls: it owns the metadata of a step and chooses the ops.

    step.py       the step, given by slots or by adapter ids
    linear.py     LoRA of dense layers, with weights as objects
    experts.py    LoRA of experts
    backends.py   on torch, and on the Triton kernels

Methods with tensors and adapter ids, and with them `PunicaWrapperBase`, are vLLM's contract (`punica.vllm.wrapper`). A
new backend is a subclass of that whose ``_ops`` is a `punica.ops.interface.Ops` (and ``_experts`` a
`punica.ops.experts.ExpertOps`), and a factory registered in `BACKENDS`.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from punica import wrapper
from punica.lazy import lazily, offer_module
from punica.registry import Registry

_CLASSES = ("PunicaWrapperABC", "PunicaWrapperBase", "PunicaWrapperCPU", "PunicaWrapperGPU")
_HOMES = {"punica.vllm.wrapper": (*_CLASSES, "inner_form")}


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, _HOMES)


for _name in ("base", "cpu", "gpu"):  # documented paths of the classes
    vars()[_name] = offer_module(f"{__name__}.{_name}", __getattr__)

BACKENDS: Registry[Callable[..., Any]] = Registry("op backend")


@BACKENDS.register("cpu")
def _cpu_wrapper(*args: Any, **kwargs: Any) -> Any:
    return wrapper.PunicaWrapperCPU(*args, **kwargs)


@BACKENDS.register("gpu")
def _gpu_wrapper(*args: Any, **kwargs: Any) -> Any:
    device = _device_of(args, kwargs)
    if device.type != "cuda" or not torch.cuda.is_available():
        available = "available" if torch.cuda.is_available() else "not available"
        raise RuntimeError(f'backend "gpu" needs a CUDA device, got {device} (CUDA is {available}); use backend="cpu"')
    if not _has_triton():
        raise RuntimeError('backend "gpu" needs Triton, which is not installed; install triton or use backend="cpu"')
    return wrapper.PunicaWrapperGPU(*args, **kwargs)


def get_punica_wrapper(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    """Return a wrapper, constructed as `StepMetadata`.

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
