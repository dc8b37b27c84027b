"""Launching kernels from the host in a few microseconds, and the operator library they are registered in.

A Triton launch spends most of its host time working out what every argument is specialised on, and an operator's own
checks cost about as much. Both depend only on the *forms* of the arguments (shapes, strides, dtypes, devices). So an op
makes a plan per combination of forms, once: arguments checked, configuration and grid chosen; a `Launch` then remembers
its compiled kernel. Per call remain one look-up and the test that addresses are multiples of 16 (else Triton's own,
slower way is taken).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch.library import Library

__all__ = [
    "INTERPRETED",
    "LIBRARY",
    "Launch",
    "Plans",
    "all_aligned",
    "block_at_least",
    "cdiv",
    "forms",
    "on_device",
    "stages_that_fit",
    "supports_pdl",
]

# With TRITON_INTERPRET=1 in the environment when this module is imported, kernels run on the CPU, statement by
# statement.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_RUNTIME = triton.knobs.runtime
_HERE = nullcontext()

# The custom ops of this package, `torch.ops.punica.*`; `define` / `impl` cost a few microseconds per call.
LIBRARY = Library("punica", "FRAGMENT")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def block_at_least(size: int, smallest: int = 16) -> int:
    """The power of two that holds `size` elements, at least `smallest` (16: what a tensor-core operand needs)."""
    return max(smallest, 1 << (size - 1).bit_length())


_PDL_DEVICES: dict[int, bool] = {}


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may start before the kernel in front has ended (compute capability 9.0 and newer)."""
    index = device.index
    if device.type != "cuda" or INTERPRETED:
        return False
    if index not in _PDL_DEVICES:
        _PDL_DEVICES[index] = torch.cuda.get_device_capability(device)[0] >= 9
    return _PDL_DEVICES[index]


_SHARED_MEMORY: dict[int, int] = {}


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on `device`; an H200's where there is no GPU to ask."""
    if device.type != "cuda":
        return 227 << 10
    index = device.index
    if index not in _SHARED_MEMORY:
        properties: Any = torch.cuda.get_device_properties(device)  # CPU builds of torch declare fewer fields
        _SHARED_MEMORY[index] = properties.shared_memory_per_block_optin
    return _SHARED_MEMORY[index]


def stages_that_fit(stages: int, stage_bytes: int, device: torch.device) -> int:
    """`stages`, or as many as leave room in shared memory for what a kernel needs besides (at least 1)."""
    return max(1, min(stages, (shared_memory(device) - (8 << 10)) // stage_bytes))


class Launch:
    """One launch of a kernel with everything fixed but its tensors and counts: ``launch(tensors, counts, aligned)``.

    The kernel's arguments are ``tensors`` (one may be a tuple of tensors, one per slice), ``counts`` (numbers it is not
    specialised on), ``strides`` and ``constants``, in this order. ``aligned``: every address is a multiple of 16.
    """

    __slots__ = ("compiled", "constants", "grid", "kernel", "options", "strides")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], strides: tuple, constants: tuple, num_warps: int, pdl: bool
    ) -> None:
        self.kernel, self.grid, self.strides, self.constants = kernel, grid, strides, constants
        self.options = {} if INTERPRETED else {"num_warps": num_warps, "launch_pdl": pdl}
        self.compiled: Any = None

    def __call__(self, tensors: tuple, counts: tuple, aligned: bool) -> None:
        grid, compiled = self.grid, self.compiled
        if compiled is not None and aligned and not _RUNTIME.launch_enter_hook.calls:
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *tensors, *counts, *self.strides, *self.constants,
            )  # fmt: skip
            return
        arguments = (*tensors, *counts, *self.strides, *self.constants)
        if Launch.compile_only:
            self.kernel.warmup(*arguments, grid=grid, **self.options)
            return
        compiled = self.kernel[grid](*arguments, **self.options)
        if aligned:
            self.compiled = compiled

    compile_only = False
    """True: compile instead of launching (tensors may be on the meta device); worker processes fill Triton's cache
    so.
    """


def forms(*tensors: torch.Tensor) -> tuple:
    """What a plan may depend on: shape, strides, dtype and device of every tensor, never an address."""
    return tuple([(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors])


class Plans(dict):
    """Plans of one op by the forms of its arguments: checks and choices made once. Bounded: a full table starts
    anew.
    """

    def keep(self, key: tuple, plan: Any) -> Any:
        """Store and return `plan`."""
        if len(self) >= 4096:
            self.clear()
        self[key] = plan
        return plan


def all_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every address is a multiple of 16, which is what kernels are compiled for."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses & 15 == 0


def on_device(index: int) -> AbstractContextManager:
    """Context in which device `index` is the current one; -1 (the CPU) and the current device cost nothing."""
    if index < 0 or index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(index)
