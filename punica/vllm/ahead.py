"""Kernels of vLLM's dense layers, compiled by processes of their own while vLLM starts.

vLLM wraps all layers, then compiles its model, then captures its graphs, which need a kernel for each size of a step.
The process that `compile_ahead` starts for a form of layer has Triton's cache folder filled by then. It uses no GPU
(`punica.ops.absent_gpu`). What it has not compiled in time, the engine compiles.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from punica.ops.absent_gpu import GpuDescription, stand_in
from punica.ops.weights import LoRAWeights

MOST_PROCESSES = 8
_PR_SET_PDEATHSIG = 1
_processes: dict[str, subprocess.Popen[bytes]] = {}  # by the form of a layer


def compile_ahead(a: Sequence[Tensor], b: Sequence[Tensor], meta: Any) -> None:
    """Start to compile for slots [L, 1, r, K] and [L, 1, N_i, r], if their form is new; ``meta``: of the steps."""
    from triton import knobs  # the CPU path never imports it

    from punica.vllm.ops.slots import places

    widths, name = [one.shape[-2] for one in b], str(a[0].dtype).removeprefix("torch.")
    counts = sorted({places(count, len(meta.active_lora_ids)) for count in meta.captured_lora_counts})
    form = a[0].shape[0], *a[0].shape[-2:], widths, name, meta.token_lora_mapping.numel(), counts
    key = json.dumps(form)
    if key in _processes or len(_processes) == MOST_PROCESSES or torch.cuda.current_device():
        return  # ranks on other GPUs of a host find what the first one compiles
    # torch's compiler would choose another folder for the rest of the engine's process
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    job = json.dumps({"gpu": asdict(GpuDescription.of_this_machine()), "form": form})
    _processes[key] = subprocess.Popen(
        [sys.executable, "-m", __name__, job], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def sizes(rows: int) -> list[int]:
    """Return numbers of rows of a step: those of vLLM's graphs, then a spread up to ``rows``."""
    small = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    spread = accumulate(range(64), lambda size, _: size + size // 8, initial=576)
    return [*(size for size in (*small, *spread) if size < rows), rows]


def launch_all(
    slots: int, rank: int, columns: int, widths: Sequence[int], name: str, rows: int, counts: Sequence[int]
) -> None:
    """Launch what a layer launches in steps of up to ``rows`` rows, each with each of ``counts`` of ids."""
    from punica.vllm.ops.slots import OPS, step_of

    dtype = getattr(torch, name)

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(*shape, dtype=of, device="cuda")

    a, b = ([zeros(slots, 1, rank, columns) for _ in widths], [zeros(slots, 1, width, rank) for width in widths])
    weights, flag = LoRAWeights.of(a, b, zeros(len(widths), slots, of=torch.int32)), torch.tensor([False])
    for size in sizes(rows):
        y, x = zeros(size, sum(widths)), zeros(size, columns)
        tensors = [zeros(length, of=torch.int32) for length in (size, size, slots + 1, slots + 2, slots + 1)]
        for count in counts:
            OPS[True].linear(y, x, weights, step_of(*tensors, flag=flag, count=count), 1.0)


def main(arguments: Sequence[str]) -> None:
    if sys.platform == "linux":  # ends with the thread that started it, vLLM's main one
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job: dict[str, Any] = json.loads(arguments[0])
    stand_in(GpuDescription(**job["gpu"]))  # a launch compiles, and computes nothing
    launch_all(*job["form"])


if __name__ == "__main__":
    main(sys.argv[1:])
