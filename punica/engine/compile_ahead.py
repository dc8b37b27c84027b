"""Kernels of an engine, compiled before there is one: ``python -m punica.engine.compile_ahead CHECKPOINT --help``.

The warm-up of an engine of the same sizes runs on a GPU that is described, not there, so every kernel that it would
compile is compiled into Triton's cache folder (TRITON_CACHE_DIR). No GPU is needed, no weight is read, and no memory
taken for them: of the checkpoint, its ``config.json``. An engine that starts later with that folder finds its kernels.
The folder serves the versions of Triton, Python and this library, and the kind of GPU, that it was made for.

The library chooses kernels and schedules by shapes, dtypes and what torch says of the device, so they are those of that
GPU. Tensors are torch's meta tensors that name a CUDA device: they have shapes and no values. Launches become
compilations (`Launch.compile_only`).
"""

import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from punica.adapters import LoRARequest
from punica.checks import check_count, clip
from punica.engine import pretrained
from punica.engine.engine import Engine
from punica.models import LlamaForCausalLM, mixture_of_experts
from punica.models.checkpoint import StoredTensor, stored_tensors

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
    """Make ``gpu`` the CUDA device of the rest of this process, which computes nothing any more.

    RuntimeError where kernels are interpreted, or torch is ROCm's.
    """
    # imported here so that the CPU path never imports triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from punica.ops.triton_ops.launch import INTERPRETED, IS_ROCM, Launch
    from punica.parallel.matmul import PLAIN_TENSORS

    if INTERPRETED or IS_ROCM:
        raise RuntimeError("kernels are compiled for NVIDIA GPUs, without TRITON_INTERPRET and not by torch for ROCm")
    target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, WARP)
    stand_in_driver: Any = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=None: 0
    )
    driver.set_active(stand_in_driver)
    Launch.compile_only = True
    PLAIN_TENSORS.add(AbsentTensor)
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


class Compiled(NamedTuple):
    """Numbers of kernels that were compiled, and that the cache folder had."""

    new: int
    found: int


def compile_ahead(gpu: GpuDescription, folder: str | Path, adapters: Sequence[LoRARequest], **sizes: Any) -> Compiled:
    """Compile the kernels of ``Engine.from_pretrained(folder, adapters, **sizes)`` on ``gpu``.

    The process computes nothing any more (:func:`stand_in`). Raises the errors of ``Engine.from_pretrained``.
    """
    from triton import knobs  # the CPU path never imports it

    hits: list[bool] = []
    stand_in(gpu)
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    without_weights: Any = lambda model, folder: setattr(model, "has_weights", True)  # noqa: E731
    LlamaForCausalLM.load_weights = without_weights  # type: ignore[method-assign]
    mixture_of_experts.stored_tensors = _any_tensors
    pretrained.fit_blocks = lambda model, config, *_: config.total_blocks
    # graphs are captured from the launches of the same steps
    Engine.from_pretrained(folder, adapters, device="cuda", cuda_graphs=False, warm_up=True, **sizes)
    return Compiled(hits.count(False), hits.count(True))


def _any_tensors(folder: str | Path, ignore_suffixes: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """List the stored tensors, which tell the dtype where the config does not; none where there are no files."""
    try:
        return stored_tensors(folder, ignore_suffixes)
    except FileNotFoundError:
        return {}


def parser() -> ArgumentParser:
    made = ArgumentParser("python -m punica.engine.compile_ahead", description="Fill Triton's cache for an engine.")
    made.add_argument("checkpoint", nargs="?", help="folder with a config.json; its weights are not read")
    made.add_argument("--adapter", action="append", default=[], metavar="FOLDER", help="to size slots for; repeatable")
    for name, meaning in (
        ("max-loras", "adapter slots"), ("max-lora-rank", "largest rank"), ("max-model-len", "tokens of one request"),
        ("max-batch-size", "requests of one step"), ("block-size", "tokens of a KV block"),
    ):  # fmt: skip
        made.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}, as Engine.from_pretrained")
    made.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: the checkpoint's")
    made.add_argument("--fp8", choices=("float8_e4m3fn", "float8_e5m2"), help="format of the adapters' slots")
    for name in ("fp8-kv-cache", "batch-invariant"):
        made.add_argument(f"--{name}", action="store_true", default=None, help="as Engine.from_pretrained")
    made.add_argument("--gpu", metavar="FILE", help="description of the GPU to compile for; default: this machine's")
    made.add_argument("--describe", metavar="FILE", help="write the description of this machine's GPU, no more")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and print how many kernels were new; exit with a message for arguments that are refused."""
    options = vars(parser().parse_args(arguments))
    folder, gpu, describe = (options.pop(name) for name in ("checkpoint", "gpu", "describe"))
    try:
        if describe is not None:
            GpuDescription.of_this_machine().write(describe)
            return
        if folder is None:
            raise ValueError("no checkpoint is given; pass the folder of a config.json, or --describe FILE")
        described = GpuDescription.of_this_machine() if gpu is None else GpuDescription.read(gpu)
        adapters = [LoRARequest(path, number, path) for number, path in enumerate(options.pop("adapter"), start=1)]
        sizes = {name: value for name, value in options.items() if value is not None}
        done = compile_ahead(described, folder, adapters, **sizes)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    where = os.environ.get("TRITON_CACHE_DIR", "Triton's default folder, as TRITON_CACHE_DIR is not set")
    print(f"{described.name}: {done.new} kernels compiled, {done.found} found in {where}")


if __name__ == "__main__":
    main()
