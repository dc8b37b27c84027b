"""Compilation for an absent GPU: ``python target_compiler.py 86 < cases.json`` prints a record per launch.

The target is a compute capability, or an architecture of ROCm (``gfx942``). It is a program of its own, since Triton
decides when it is imported whether kernels are interpreted. The library runs as on that GPU (`punica.ops.absent_gpu`).
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

if Path(sys.argv[0]).stem.endswith("target_compiler") and sys.argv[1].startswith("gfx"):  # before punica is imported
    torch.version.hip = "absent"  # type: ignore[assignment]

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from punica.metadata import LoRABatch, RowGroups
from punica.ops.absent_gpu import GpuDescription, stand_in
from punica.ops.scales import PLAIN, Scheme
from punica.ops.slot_image import pack_image
from punica.ops.triton_ops import Options, TritonOps
from punica.ops.triton_ops import launch as launching
from punica.ops.triton_ops.plan import Batch
from punica.ops.triton_ops.slot_write import SlotTable, write_slot
from punica.ops.weights import LoRAWeights
from punica.vllm.ops.dense import TensorBatch

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may opt in to (CUDA C++ programming guide, technical specifications per capability)."""
PACKED = re.compile(r"= shl [a-z ]*<\d+ x i32> %\w+, <i32")
"""Lanes of one vector shifted by different amounts. Triton 3.6 packs them into a register, and one overflows into the
next, which addresses memory.
"""
READS_FIRST = re.compile(r"(cp\.async|ld\.global\S*\.v[24]\.).*griddepcontrol\.wait", re.DOTALL)
"""Code that reads vectors (weights, rows) before the PDL wait."""
ROCM_KIB = {"gfx942": 64, "gfx950": 160}
"""LDS of a workgroup (CDNA 3 and 4 instruction set architecture guides)."""
STEPS = {
    "one row": [1],
    "64 distinct": [1] * 64,
    "64 of one": [64],
    "64 of five": [13, 13, 13, 13, 12],
    "prefill 512": [512],
    "prefill 2048": [1500, 548],
    "prefill 8192": [8192],
    "prompt and 31 rows": [481] + [1] * 31,
}
"""Rows of each adapter."""
LAYERS = {"qkv": (4096, (4096, 1024, 1024)), "down": (14336, (4096,)), "odd": (1000, (1000, 24))}
"""Hidden size and widths of the slices."""
SLOTS = 64
Record = dict[str, Any]


def stand_in_for(target: int | str) -> None:
    """Make the GPU of this capability or architecture the current one."""
    kib = SHARED_KIB[90 if isinstance(target, str) else target]
    major, minor = (9, 4) if isinstance(target, str) else divmod(target, 10)
    rocm, launching.IS_ROCM = launching.IS_ROCM, False
    stand_in(GpuDescription("an absent GPU", major, minor, 132, kib << 10, 0, 0))
    launching.IS_ROCM = rocm
    if isinstance(target, str):
        absent: Any = SimpleNamespace(
            get_current_target=lambda: GPUTarget("hip", target, 64), get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )  # fmt: skip
        driver.set_active(absent)
        properties = SimpleNamespace(shared_memory_per_block=ROCM_KIB[target] << 10, multi_processor_count=132)
        torch.cuda.get_device_properties = lambda device=None: properties


class Compilations:
    """Everything that a launch has compiled; ``records`` grows by one per launch."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._compile, self._known = JITFunction.warmup, {}
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.runtime.jit_post_compile_hook = lambda **_: None  # as vLLM's: constants are written as JSON
        JITFunction.warmup = lambda kernel, *arguments, **options: self._note(kernel, arguments, options)

    def _note(self, kernel: JITFunction, arguments: tuple, options: dict[str, Any]) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = self._compile(kernel, *arguments, **options)
        if compiled.hash not in self._known:  # later compilations of the same are remembered ones, without log
            self._known[compiled.hash] = _described(compiled, log.getvalue())
        self.records.append({"form": form_of(kernel.__name__, arguments), **self._known[compiled.hash]})


def _described(compiled: Any, log: str) -> Record:
    if "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        spilled = sum(map(int, re.findall(r"\.[sv]gpr_spill_count: +(\d+)", code)))
        target = re.findall(r"amdgcn-amd-amdhsa--(gfx\w+)", code)[0]
        return {"target": target, "shared": compiled.metadata.shared, "spilled": spilled}
    code = compiled.asm["ptx"]
    return {
        "target": int(re.findall(r"\.target sm_(\d+)", code)[0]),
        "shared": compiled.metadata.shared,
        "spilled": int(re.findall(r"(\d+) bytes spill stores", log)[-1]),
        "packed": PACKED.search(compiled.asm["llir"]) is not None,
        "waits": "griddepcontrol" in code,
        "order": re.findall(r"griddepcontrol\.(\w+)", code),
        "reads_first": READS_FIRST.search(code) is not None,
        "starts_early": bool(compiled.metadata.launch_pdl),
        "reads_bytes": re.search(r"ld\.shared\S*\.[bu]8", code) is not None,
        "widths": sorted(set(re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"]))),
        "instructions": sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*", code))),
    }


def form_of(kernel: str, arguments: tuple) -> str:
    """Name of the kernel, its mode, and the parts of it in use."""
    form, tile = kernel.removeprefix("_lora_").removesuffix("_kernel").strip("_").replace("_", " "), arguments[-1]
    form += f" {tile.mode}" if hasattr(tile, "mode") else ""
    form += ", swapped operands" if getattr(tile, "swap_ab", False) else ""
    return form + (", in words" if getattr(tile, "words", False) else "")


class Operands:
    """Those of a case; with FP8 weights, and activations (w8a8), if it says so."""

    def __init__(self, case: dict[str, Any], device: str = "cuda") -> None:
        sizes, (k, widths), rank = STEPS[case["step"]], LAYERS[case["layer"]], case["rank"]
        tokens, slots, fp8 = sum(sizes), case.get("slots", SLOTS), case.get("fp8")
        dtype, w8a8 = getattr(torch, case["dtype"]), case.get("w8a8", False)
        held = getattr(torch, fp8) if fp8 else dtype

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def scales(columns: int, inner: int, scheme: Scheme) -> Tensor:
            return empty(slots, *scheme.shape(columns, inner))

        self.x, self.y = empty(tokens, k, dtype=held if w8a8 else dtype), empty(tokens, sum(widths), dtype=dtype)
        self.low = empty(len(widths), tokens, rank, dtype=torch.float32 if fp8 else dtype)
        self.h = empty(len(widths), tokens, rank, dtype=held if w8a8 else self.low.dtype)
        a = [empty(slots, rank, k, dtype=held) for _ in widths]
        b = [
            empty(slots, rank, width, dtype=held).mT if case["by_ranks"] else empty(slots, width, rank, dtype=held)
            for width in widths
        ]
        ranks = empty(len(widths), slots, dtype=torch.int32) if case["ranks"] else None
        of_a = of_b = None
        schemes = PLAIN, PLAIN
        if fp8:
            group, channel = 128 if case["scales"] == "block" else 0, case["scales"] == "channel"
            schemes = (
                Scheme(group, rank if group else 0, w8a8, channel),
                Scheme(rank if group else 0, group, w8a8, channel),
            )
            of_a = [scales(rank, k, schemes[0]) for _ in widths]
            of_b = [scales(width, rank, schemes[1]) for width in widths]
        self.x_scale = empty(tokens) if w8a8 else None
        self.weights = LoRAWeights.of(a, b, ranks, (of_a, of_b), schemes)
        step = LoRABatch(tokens, slots, device)
        step.fill(RowGroups.of_runs(range(len(sizes)), sizes))
        flat = TensorBatch.given(*step.tensors, flag=torch.tensor([False]), count=len(sizes))
        self.batch: Batch = step if case["listed"] else flat


def compile_case(case: dict[str, Any]) -> None:
    """Launch both kernels as a layer has them run (linear), or each op by itself; on a listed step shrink adds."""
    given, ops = Operands(case), TritonOps(Options(case["invariant"]))
    if case["linear"]:
        ops.linear(given.y, given.x, given.weights, given.batch)
        return
    ops.shrink(given.low, given.x, given.weights.a, given.batch, 1.0, given.batch.listed, given.x_scale)
    ops.expand(given.y, given.h, given.weights.b, given.batch, 0, True, given.x_scale)


def compile_slot_write(case: dict[str, Any]) -> None:
    """Launch the kernel that fills slots of so many elements, which decides whether all of them are aligned."""
    dtype = getattr(torch, case["dtype"])
    slots, ranks = torch.zeros(2, 1, case["elements"], dtype=dtype, device="cuda"), torch.zeros(2, device="cuda").int()
    write_slot(pack_image([(None, 0)], dtype), SlotTable([slots], [ranks]), 0)


def compiled(target: int | str, cases: list[dict[str, Any]], script: str = "target_compiler") -> list[Record]:
    """Records of a module like this one for these cases. Its cache is empty, so that ptxas tells its registers."""
    with TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        here = Path(__file__).parent
        paths = os.pathsep.join(map(str, (here.parents[2], here, here / "backbone")))
        environment |= {"TRITON_CACHE_DIR": folder, "PYTHONPATH": paths}
        found = subprocess.run(
            [sys.executable, "-m", script, str(target)],
            input=json.dumps(cases), capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout)


def check_fit(target: int | str, records: list[Record]) -> None:
    """They compiled for this GPU, and fit."""
    assert {one["target"] for one in records} == {target}
    limit = (SHARED_KIB | ROCM_KIB)[target] << 10
    assert not [(one["form"], one["case"], one["shared"]) for one in records if one["shared"] > limit]


def run(launch: Callable[[dict[str, Any]], None]) -> None:
    """Print the records of all cases that the input holds, each with its case; ``launch``: launch those of one."""
    target = sys.argv[1]
    stand_in_for(target if target.startswith("gfx") else int(target))
    done, found = Compilations(), []
    for case in json.load(sys.stdin):
        before = len(done.records)
        try:
            launch(case)
        except Exception as error:
            error.add_note(str(case))
            raise
        found += [{"case": case, **record} for record in done.records[before:]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    run(lambda case: (compile_slot_write if "elements" in case else compile_case)(case))
