"""Launching kernels from the host in a few microseconds.

A Triton launch spends most of its host time on what every argument is specialised on. A `Launch` has all fixed but the
tensors and counts of a call, and remembers the compiled kernel. Per call remain the addresses, which must be multiples
of 16, else Triton's own, slower way is taken.
"""

import ast
import functools
import inspect
import textwrap
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run on the CPU, statement by statement: TRITON_INTERPRET=1 was set when this module was imported."""
IS_ROCM: bool = torch.version.hip is not None
"""AMD GPUs: torch calls them "cuda", too, but there is no PDL, and capabilities are not those of NVIDIA."""

_RUNTIME = triton.knobs.runtime
_HERE = nullcontext()


def block_at_least(size: int, smallest: int = 16) -> int:
    """Return the power of two that holds `size` elements, at least `smallest` (16: least of a tensor-core operand)."""
    return max(smallest, 1 << (size - 1).bit_length())  # triton.next_power_of_2 takes 2 us on the host


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Tell whether kernels on `device` may start before their predecessor has ended (NVIDIA, capability 9.0 and up)."""
    if device.type != "cuda" or INTERPRETED or IS_ROCM:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use on `device`; an H200's where there is no GPU to ask."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # builds of torch declare different fields
    return properties.shared_memory_per_block if IS_ROCM else properties.shared_memory_per_block_optin


def stages_that_fit(stages: int, stage_bytes: int, device: torch.device) -> int:
    """Limit `stages` to what fits into shared memory beside 8 KiB of other uses (at least 1)."""
    return max(1, min(stages, (shared_memory(device) - (8 << 10)) // stage_bytes))


_DIRECT_CALL = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)
"""Statement by which Triton's `JITFunction.run` (3.6 and 3.7) starts a compiled kernel; `Launch` repeats it."""


@functools.cache
def launches_directly() -> bool:
    """Tell whether this Triton starts kernels as `Launch` does; if not, every launch takes Triton's public way."""
    try:
        source = textwrap.dedent(inspect.getsource(JITFunction.run))
    except (OSError, TypeError):
        return False
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if call.startswith("kernel.run(")] == [_DIRECT_CALL]


@functools.lru_cache(maxsize=4096)
def _binary(*specialised: Any) -> SimpleNamespace:
    """Return the binary of launches whose arguments Triton specialises alike: a compiled kernel once one has run."""
    return SimpleNamespace(compiled=None)


def _specialised(stride: int) -> tuple[bool, bool, bool]:
    """Return the properties of an integer that Triton compiles for: being 1, a multiple of 16, wider than 32 bits."""
    return stride == 1, stride % 16 == 0, not -(1 << 31) <= stride < 1 << 31


class Launch:
    """One launch of a kernel with everything fixed but its tensors and counts: ``launch(tensors, counts, aligned)``,
    and its grid where that follows the counts.

    The kernel's arguments are, in this order, ``tensors`` (some may be tuples of tensors, or None where ``constants``
    say so), ``counts`` (numbers it is not specialised on), ``strides`` and ``constants``. Strides are one tuple where
    the kernel has an argument of that name. Constants are given by name, all of them. ``aligned``: every address is a
    multiple of 16 (but those of arguments that are not specialised on alignment).

    ``dtypes``: whatever determines the types of the tensors; ``device``: of the tensors.
    """

    __slots__ = ("binary", "device", "grid", "kernel", "options", "tail")

    compile_only = False
    """True: compile instead of launching, so that processes fill Triton's cache; tensors may be meta."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int] | None, dtypes: tuple, strides: tuple[int, ...],
        constants: dict[str, Any],
        *,
        num_warps: int, pdl: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        values = tuple([constants[name] for name in kernel.arg_names[-len(constants) :]])
        self.kernel, self.grid = kernel, grid
        self.tail = (strides, *values) if "strides" in kernel.arg_names else (*strides, *values)
        self.options: dict[str, Any] = {} if INTERPRETED else {"num_warps": num_warps}
        if pdl:  # ROCm's compiler knows no such option
            self.options["launch_pdl"] = True
        self.device = -1 if device.index is None else device.index
        kinds = tuple([_specialised(stride) for stride in strides])
        self.binary = _binary(kernel, dtypes, kinds, values, (num_warps, pdl), self.device)

    def __call__(self, tensors: tuple, counts: tuple, aligned: bool, grid: tuple[int, int, int] | None = None) -> None:
        compiled: Any = self.binary.compiled
        grid = grid or self.grid or (0, 0, 0)
        if (
            compiled is not None
            and aligned
            and not (_RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls)
        ):
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            addresses = [
                None if one is None
                else tuple([part.data_ptr() for part in one]) if type(one) is tuple
                else one.data_ptr()
                for one in tensors
            ]  # fmt: skip
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *addresses, *counts, *self.tail,
            )  # fmt: skip
            return
        arguments = (*tensors, *counts, *self.tail)
        if Launch.compile_only:
            self.kernel.warmup(*arguments, grid=grid, **self.options)
            return
        compiled = self.kernel[grid](*arguments, **self.options)
        if aligned and not INTERPRETED and launches_directly():
            self.binary.compiled = compiled


def launch_alone(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], shape: Any,
    *, strides: tuple[int, ...] = (), dtypes: tuple, num_warps: int, counts: tuple = (),
) -> None:  # fmt: skip
    """Launch a kernel with one constexpr, SHAPE, on the device of its first tensor; ``shape.pdl``: it starts early."""
    launch = Launch(
        kernel, grid, dtypes, strides, {"SHAPE": shape}, num_warps=num_warps, pdl=shape.pdl, device=tensors[0].device
    )
    with on_device(tensors[0].get_device()):
        launch(tensors, counts, all_aligned(*tensors))


def all_aligned(*tensors: torch.Tensor) -> bool:
    """Tell whether every address is a multiple of 16, as kernels are compiled for."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses & 15 == 0


def on_device(index: int) -> AbstractContextManager:
    """Return a context in which device `index` is the current one; -1 (the CPU) and the current device cost nothing."""
    if index < 0 or index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(index)
