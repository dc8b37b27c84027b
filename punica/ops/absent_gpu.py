"""A GPU that is described, not there: a process in which tensors "on" it have no memory and launches only compile.

The library chooses kernels and schedules by shapes, dtypes and what torch says of the device, so they are those of that
GPU. Tensors are torch's meta tensors that name a CUDA device: they have shapes and no values. Launches become
compilations (`Launch.compile_only`), which end in Triton's cache folder.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from punica.checks import check_count, clip

DEVICE = torch.device("cuda", 0)
WARP = 32
ENDLESS = 1 << 60  # bytes of memory, of which nothing is taken


@dataclass(frozen=True)
class GpuDescription:
    """Properties that decide on kernels, in the units of ``torch.cuda.get_device_properties``: bytes, kHz and bits."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    memory_clock_rate: int
    memory_bus_width: int

    @classmethod
    def of_this_machine(cls) -> "GpuDescription":
        """Describe the current GPU. RuntimeError without one, or for one of AMD."""
        if not torch.cuda.is_available() or torch.version.hip is not None:
            raise RuntimeError("this machine has no NVIDIA GPU to describe; pass the file that one wrote (--gpu FILE)")
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        given: dict[str, Any] = {one.name: getattr(found, one.name, 0) for one in fields(cls)}
        return cls(**given)

    @classmethod
    def read(cls, path: str | Path) -> "GpuDescription":
        """Read what :meth:`write` wrote. FileNotFoundError; ValueError for anything else."""
        names = {one.name for one in fields(cls)}
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{clip(str(path))} is not JSON: {error}; write it with --describe on a GPU") from None
        if not isinstance(given, dict) or given.keys() != names or not isinstance(given["name"], str):
            raise ValueError(f"{clip(str(path))} must have the fields {sorted(names)}; write it with --describe")
        for name in sorted(names - {"name"}):
            check_count(f"{name} (of {clip(str(path))})", given[name], 0)
        return cls(**given)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


class AbsentTensor(Tensor):
    """A meta tensor that says it is on the GPU. Its address is its place in a storage, which begins at 0."""

    is_cuda = True
    is_meta = False
    device = DEVICE
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def get_device(self) -> int:
        """Return -1: there is no device to make the current one."""
        return -1

    def data_ptr(self) -> int:
        """Return the distance from the start of the storage, in bytes."""
        return int(self.storage_offset()) * self.element_size()


class _OnAbsentGpu(TorchFunctionMode):
    """Sends what would be made or computed on a GPU to meta tensors. Host memory counts as page-locked."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if name in ("pin_memory", "is_pinned"):
            return args[0] if name == "pin_memory" else True
        given: dict[int, tuple[AbsentTensor, Tensor]] = {}  # by the id of the meta tensor, which stays alive
        asked = False

        def to_meta(value: Any) -> Any:
            nonlocal asked
            if isinstance(value, AbsentTensor):
                plain = value.as_subclass(Tensor)
                given[id(plain)] = value, plain
                return plain
            is_gpu = isinstance(value, torch.device) and value.type == "cuda"
            if is_gpu or (isinstance(value, str) and value.partition(":")[0] == "cuda"):
                asked = True
                return torch.device("meta")
            return value

        def to_absent(value: Any) -> Any:
            if type(value) is not Tensor or not value.is_meta:
                return value
            return given[id(value)][0] if id(value) in given else value.as_subclass(AbsentTensor)

        plain_args, plain_kwargs = tree_map(to_meta, tuple(args)), tree_map(to_meta, kwargs or {})
        if "pin_memory" in plain_kwargs:
            plain_kwargs["pin_memory"] = False
        found = func(*plain_args, **plain_kwargs)
        return tree_map(to_absent, found) if asked or given else found


class _Inert:
    """Stream, event and runtime of CUDA, where nothing is under way."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *error: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> "_Inert":
        return _Inert()

    def record(self, *args: Any) -> None: ...

    wait_event = wait_stream = synchronize = wait = cudaHostRegister = cudaHostUnregister = record


def stand_in(gpu: GpuDescription) -> None:
    """Make ``gpu`` the CUDA device of this process, which computes nothing. RuntimeError: interpreted kernels, ROCm."""
    # imported here so that the CPU path never imports triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from punica.ops.triton_ops.launch import INTERPRETED, IS_ROCM, Launch

    if INTERPRETED or IS_ROCM:
        raise RuntimeError("kernels are compiled for NVIDIA GPUs, without TRITON_INTERPRET and not by torch for ROCm")
    target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, WARP)
    stand_in_driver: Any = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=None: 0
    )
    driver.set_active(stand_in_driver)
    Launch.compile_only = True
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_current_stream_capturing": False,
        "get_device_capability": (gpu.major, gpu.minor), "get_device_name": gpu.name,
        "get_device_properties": SimpleNamespace(**asdict(gpu)), "mem_get_info": (ENDLESS, ENDLESS),
        "memory_reserved": 0, "memory_allocated": 0, "current_stream": _Inert(), "stream": _Inert(),
        "synchronize": None, "set_device": None, "cudart": _Inert(), "check_error": None,
        "device": nullcontext(),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.Stream = torch.cuda.Event = _Inert  # type: ignore[misc, assignment]
    _OnAbsentGpu().__enter__()
