"""Compilation for an absent GPU: ``python target_compiler.py 86 < cases.json`` prints a record per launch.

The target is a compute capability, or an architecture of ROCm (``gfx942``). It is a program of its own, since Triton
decides when it is imported whether kernels are interpreted. Triton's driver, and what the library asks torch about the
GPU, are answered here. All else is the library's own: a schedule is chosen, a plan made for the GPU, and the launch
compiles (`Launch.compile_only`). Operands are on the meta device.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

if __name__ == "__main__" and sys.argv[1].startswith("gfx"):  # before the library is imported
    torch.version.hip = "absent"  # type: ignore[assignment]

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from punica.metadata import LoRABatch, RowGroups
from punica.ops.quant import FP8_DTYPES
from punica.ops.scales import Scheme
from punica.ops.slot_image import SlotMatrix, pack_image
from punica.ops.triton_ops.configs import Options, choose
from punica.ops.triton_ops.fp8_device import operands
from punica.ops.triton_ops.launch import IS_ROCM, Launch, shared_memory, supports_pdl
from punica.ops.triton_ops.lora_expand import ExpandMode, LowRank, plan_expand
from punica.ops.triton_ops.lora_linear import LinearMode, choose_linear, plan_linear
from punica.ops.triton_ops.lora_shrink import ShrinkMode, plan_shrink
from punica.ops.triton_ops.plan import Batch, KernelPlan
from punica.ops.triton_ops.schedules import Gpu, Problem, Schedule
from punica.ops.triton_ops.slot_write import SlotTable, write_slot
from punica.ops.weights import Form, Stack
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
GPU = torch.device("cuda", 0)
Record = dict[str, Any]


class AbsentGpu:
    """Triton's driver, as far as a compilation needs it."""

    def __init__(self, target: int | str) -> None:
        self.target = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compilations:
    """Everything that a launch has compiled; ``records`` grows by one per launch."""

    def __init__(self, target: int | str) -> None:
        self.records: list[Record] = []
        self._compile, self._known = JITFunction.warmup, {}
        driver.set_active(AbsentGpu(target))
        triton.knobs.nvidia.dump_ptxas_log = True
        if isinstance(target, str):
            shared, capability = {"shared_memory_per_block": ROCM_KIB[target] << 10}, (9, 4)
        else:
            shared, capability = {"shared_memory_per_block_optin": SHARED_KIB[target] << 10}, divmod(target, 10)
        self.capability = 10 * capability[0] + capability[1]
        torch.cuda.get_device_capability = lambda device=None: capability
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(**shared)
        Gpu.of = lambda device: Gpu(shared_memory=shared_memory(device))
        JITFunction.warmup = lambda kernel, *arguments, **options: self._note(kernel, arguments, options)
        Launch.compile_only = True

    def _note(self, kernel: JITFunction, arguments: tuple, options: dict[str, Any]) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = self._compile(kernel, *arguments, **options)
        if compiled.hash not in self._known:  # later compilations of the same are remembered ones, without log
            self._known[compiled.hash] = _described(compiled, log.getvalue())
        self.records.append(dict(self._known[compiled.hash]))


def _described(compiled: Any, log: str) -> Record:
    if "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        spilled = sum(map(int, re.findall(r"\.[sv]gpr_spill_count: +(\d+)", code)))
        target = re.findall(r"amdgcn-amd-amdhsa--(gfx\w+)", code)[0]
        return {"error": "", "target": target, "shared": compiled.metadata.shared, "spilled": spilled}
    code = compiled.asm["ptx"]
    return {
        "error": "",
        "target": int(re.findall(r"\.target sm_(\d+)", code)[0]),
        "shared": compiled.metadata.shared,
        "registers": int(re.findall(r"Used (\d+) registers", log)[-1]),
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


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Operands:
    """Those of one case, as its forms and as tensors without memory."""

    def __init__(self, case: dict[str, Any]) -> None:
        sizes, (self.k, self.widths) = STEPS[case["step"]], LAYERS[case["layer"]]
        self.rank, self.dtype = case["rank"], getattr(torch, case["dtype"])
        self.tokens, self.slices, self.slots = sum(sizes), len(self.widths), case.get("slots", SLOTS)
        self.x, self.y = self._empty(self.tokens, self.k), self._empty(self.tokens, sum(self.widths))
        self.a = tuple([self._empty(self.slots, self.rank, self.k) for _ in self.widths])
        self.by_rows = not case["by_ranks"]
        self.b = tuple([self._b(width, case["by_ranks"]) for width in self.widths])
        self.ranks = empty(self.slices, self.slots, dtype=torch.int32) if case["ranks"] else None
        step = LoRABatch(self.tokens, self.slots, "meta")
        step.fill(RowGroups.of_runs(range(len(sizes)), sizes))
        flat = TensorBatch.given(*step.tensors, flag=torch.tensor([False]), count=len(sizes))
        self.batch: Batch = step if case["listed"] else flat
        self.options = Options(case["invariant"])

    def _empty(self, *shape: int) -> Tensor:
        return empty(*shape, dtype=self.dtype)

    def _b(self, width: int, by_ranks: bool) -> Tensor:
        if by_ranks:
            return self._empty(self.slots, self.rank, width).transpose(1, 2)
        return self._empty(self.slots, width, self.rank)

    def stacks(self) -> tuple[Stack, Stack]:
        return Stack.of_a(self.a, self.ranks), Stack.of_b(self.b, self.ranks)

    def forms(self) -> tuple[Form, Form]:
        """Of A and B, as if they were on the GPU."""
        a, b = (stack.form for stack in self.stacks())
        a, b = (form._replace(stored=form.stored._replace(device=GPU)) for form in (a, b))
        return a, b

    def schedule(self, op_type: str, partials: int = 1) -> Schedule:
        element = self.a[0].element_size()
        problem = Problem(self.batch.shape, self.tokens, self.k, self.widths, self.rank, element, self.by_rows)
        return choose(op_type, problem, self.options, GPU, partials, True)


def linear_plans(given: Operands) -> tuple[tuple, tuple]:
    """Shrink and expand of a layer, each with the low-rank tensor between them."""
    (a, b), shrink = given.forms(), given.schedule("shrink")
    schedules = shrink, given.schedule("expand", shrink.split_k)
    plan = plan_linear(given.y, given.x, (a, b), given.batch, schedules, LinearMode(pdl=supports_pdl(GPU)))
    partials = empty(*plan.partials, dtype=torch.float32)
    return (plan.shrink, partials), (plan.expand, partials)


def single_plans(given: Operands) -> tuple[tuple, tuple]:
    """The ops by themselves, with a low-rank tensor of the inputs' type. On a listed step shrink adds to it."""
    (a, b), h = given.forms(), given._empty(given.slices, given.tokens, given.rank)
    mode = ShrinkMode(h.dtype, direct=True, accumulate=given.batch.listed)
    shrink = plan_shrink(given.x, a, given.batch, given.schedule("shrink"), mode)
    expand = plan_expand(LowRank.result(h), given.y, b, given.batch, given.schedule("expand"), ExpandMode())
    return (shrink, h), (expand, h)


class Fp8Operands(Operands):
    """The same with FP8 weights and scales of one mode, and with FP8 activations (w8a8) if the case says so.

    A GPU whose compiler does not know e4m3 gets bytes, as the library would give it.
    """

    def __init__(self, case: dict[str, Any], capability: int) -> None:
        super().__init__(case)
        self.fp8, w8a8 = getattr(torch, case["fp8"]), case["w8a8"]
        groups = (128, self.rank) if case["scales"] == "block" else (0, 0)
        self.shrink = Scheme(groups[0], groups[1], w8a8, case["scales"] == "channel")
        self.expand = Scheme(self.rank if groups[0] else 0, groups[0], w8a8, case["scales"] == "channel")
        self.known = capability >= 89
        self.a = tuple([self._as(self.fp8, a) for a in self.a])
        self.b = tuple([self._as(self.fp8, b) for b in self.b])
        if w8a8:
            self.x = self._as(self.fp8, self.x)
        self.a_scale = empty(self.tokens, dtype=torch.float32) if w8a8 else None
        self.a_scales = tuple([self._scales(self.rank, self.k, self.shrink) for _ in self.widths])
        self.b_scales = tuple([self._scales(width, self.rank, self.expand) for width in self.widths])

    @staticmethod
    def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")

    @staticmethod
    def _scales(columns: int, k: int, scheme: Scheme) -> Tensor:
        if scheme.block_wise:
            return empty(SLOTS, -(-columns // scheme.group_n), -(-k // scheme.group_k), dtype=torch.float32)
        shape = (SLOTS, columns) if scheme.per_channel_quant else (SLOTS,)
        return empty(*shape, dtype=torch.float32)

    def stacks(self) -> tuple[Stack, Stack]:
        a = Stack.of_a(self.a, self.ranks, self.a_scales, self.shrink)
        return a, Stack.of_b(self.b, self.ranks, self.b_scales, self.expand)

    def given(self, weights: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return operands([self._bytes(weight) for weight in weights], scales, self.a_scale)

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor if self.known or tensor.dtype not in FP8_DTYPES else self._as(torch.uint8, tensor)


def record_of(plan: KernelPlan, arguments: tuple, done: Compilations) -> Record:
    """The launch's record, or why there is none."""
    try:
        plan.run(*arguments)
        return done.records[-1]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}"}


def compile_fp8_case(case: dict[str, Any], done: Compilations, capability: int) -> list[Record]:
    """Both FP8 kernels of one case: as a layer has them run (weight-only, linear), or each op by itself."""
    given = Fp8Operands(case, capability)
    (a, b), low = given.forms(), torch.float32
    if case["linear"] and not case["w8a8"]:
        mode = LinearMode(pdl=supports_pdl(GPU))
        plan = choose_linear(given.y, given.x, (a, b), given.batch, given.options, mode)
        shrink, expand, partials = plan.shrink, plan.expand, plan.partials
        h = empty(*partials, dtype=low)
    else:
        a_strides = (1, 0) if case["w8a8"] else None
        partials = (1, given.slices, given.tokens, given.rank)
        h = empty(*partials, dtype=given.fp8 if case["w8a8"] else low)
        modes = ShrinkMode(low, True, given.batch.listed, x_strides=a_strides), ExpandMode(x_strides=a_strides)
        shrink = plan_shrink(given.x, a, given.batch, given.schedule("shrink"), modes[0])
        low_rank = LowRank(partials, h.stride(), h.dtype)
        expand = plan_expand(low_rank, given.y, b, given.batch, given.schedule("expand"), modes[1])
    x, between, out = given._bytes(given.x), given._bytes(h), empty(*partials, dtype=low)
    left, right = given.given(given.a, given.a_scales), given.given(given.b, given.b_scales)
    step = given.batch, given.ranks, True
    runs = (shrink, (x, left, out, *step, 1.0)), (expand, (between, right, given.y, *step))
    return [{"case": case, "form": form_of(plan), **record_of(plan, tensors, done)} for plan, tensors in runs]


def constants_of(plan: KernelPlan) -> Record:
    """Shape and schedule that the kernel is compiled for, by field name."""
    launch = plan.launch
    named = dict(zip(launch.kernel.arg_names[-len(launch.tail) :], launch.tail, strict=True))
    return named["SHAPE"]._asdict() | named["TILE"]._asdict()


def form_of(plan: KernelPlan) -> str:
    """Name of the kernel, its mode, and the parts of it in use."""
    constants, kernel = constants_of(plan), plan.launch.kernel.__name__
    form = kernel.removeprefix("_lora_").removesuffix("_kernel") + " " + constants["mode"]
    form += ", swapped operands" if constants["swap_ab"] else ""
    return form + (", in words" if constants.get("words") else "")


def compile_case(case: dict[str, Any], done: Compilations) -> list[Record]:
    """Both kernels of one case."""
    given = Operands(case)
    (shrink, h), (expand, _) = linear_plans(given) if case["linear"] else single_plans(given)
    step = given.batch, given.ranks, True
    runs = (shrink, (given.x, given.a, h, *step, 1.0)), (expand, (h, given.b, given.y, *step))
    return [{"case": case, "form": form_of(plan), **record_of(plan, tensors, done)} for plan, tensors in runs]


def compile_slot_write(dtype: str, elements: int, done: Compilations) -> Record:
    """The kernel that fills slots of so many elements, which decides whether all of them are aligned."""
    slots, ranks = [torch.zeros(2, 1, elements, dtype=getattr(torch, dtype))], [torch.zeros(2, dtype=torch.int32)]
    write_slot(pack_image([SlotMatrix(None, 0)], slots[0].dtype), SlotTable(slots, ranks), 0)
    return {"case": {"dtype": dtype, "elements": elements}, "form": "slot write", **done.records[-1]}


def target_of(name: str) -> int | str:
    """Target of a command line."""
    return name if name.startswith("gfx") else int(name)


def compiled(target: int | str, cases: list[dict[str, Any]], script: Path = Path(__file__)) -> list[Record]:
    """Records of a script like this one for these cases. Its cache is empty, so that ptxas tells its registers."""
    with TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = os.pathsep.join(map(str, (Path(__file__).parents[3], Path(__file__).parent)))
        environment |= {"TRITON_CACHE_DIR": folder, "PYTHONPATH": paths}
        found = subprocess.run(
            [sys.executable, str(script), str(target)],
            input=json.dumps(cases), capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout)


def main() -> None:
    done, found = Compilations(target_of(sys.argv[1])), []
    capability = 0 if IS_ROCM else done.capability  # ROCm gets FP8 as bytes
    for case in json.load(sys.stdin):
        found += compile_fp8_case(case, done, capability) if case.get("fp8") else compile_case(case, done)
    found += [compile_slot_write(dtype, size, done) for dtype in ("float16", "float32") for size in (64, 33)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
