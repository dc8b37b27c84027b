"""Kernels of vLLM's dense layers, compiled by processes of their own while vLLM starts.

vLLM wraps all layers, then compiles its model, then captures its graphs, which need a kernel for each size of a step.
The process that `CompileAhead` starts for a form of layer has Triton's cache folder filled by then. It uses no GPU
(`punica.ops.absent_gpu`). What it has not compiled in time, the engine compiles.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.absent_gpu import GpuDescription, stand_in

MOST_PROCESSES = 8
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("vllm.punica")


class LayerForm(NamedTuple):
    """Sizes of a dense layer that its kernels depend on: rank of its slots, columns of inputs, widths of outputs."""

    slots: int
    rank: int
    columns: int
    widths: list[int]
    dtype: str

    @classmethod
    def of(cls, a: Sequence[Tensor], b: Sequence[Tensor]) -> "LayerForm":
        """Read the form off slots, [L, 1, r, K] and [L, 1, N_i, r]."""
        widths = [one.shape[-2] for one in b]
        return cls(a[0].shape[0], a[0].shape[-2], a[0].shape[-1], widths, str(a[0].dtype).removeprefix("torch."))


class CompileAhead:
    """Processes that compile, one for a form of layer, at most `MOST_PROCESSES`."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def layer(self, form: LayerForm, rows: int, counts: Sequence[int]) -> None:
        """Start to compile for a layer of a new form, steps of up to ``rows`` rows, and these numbers of ids."""
        key = json.dumps(form)
        if key in self.processes or len(self.processes) == MOST_PROCESSES or torch.cuda.current_device():
            return  # ranks on other GPUs of a host find what the first one compiles
        from triton import knobs  # the CPU path never imports it

        # torch's compiler would choose another folder for the rest of the engine's process
        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
        gpu = asdict(GpuDescription.of_this_machine())
        job = json.dumps({"gpu": gpu, "form": form, "rows": rows, "counts": list(counts)})
        self.processes[key] = subprocess.Popen(
            [sys.executable, "-m", __name__, job], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        _log.debug("punica: compiling ahead for %s", key)


def sizes(rows: int) -> Iterator[int]:
    """Yield numbers of rows of a step: those of vLLM's graphs, then a spread up to ``rows``."""
    small = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    yield from (size for size in small if size < rows)
    size = 576
    while size < rows:
        yield size
        size += size // 8
    yield rows


def launch_all(form: LayerForm, rows: int, counts: Sequence[int]) -> None:
    """Launch all that a layer launches in steps of up to ``rows`` rows, on what counts as the current GPU."""
    from punica.ops.weights import LoRAWeights
    from punica.vllm.ops.slots import OPS, step_of

    slots, rank, columns, widths, name = form
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
    launch_all(LayerForm(*job["form"]), job["rows"], job["counts"])


if __name__ == "__main__":
    main(sys.argv[1:])
