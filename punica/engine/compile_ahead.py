"""Kernels of an engine, compiled before there is one: ``python -m punica.engine.compile_ahead CHECKPOINT --help``.

The warm-up of an engine of the same sizes runs on a described GPU (`punica.ops.absent_gpu`), so every kernel that it
would compile is compiled into Triton's cache folder (TRITON_CACHE_DIR). No GPU is needed, no weight is read, and no
memory taken for them: of the checkpoint, its ``config.json``. An engine that starts later with that folder finds its
kernels.
The folder serves the versions of Triton, Python and this library, and the kind of GPU, that it was made for.
"""

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from punica.adapters import LoRARequest
from punica.engine import pretrained
from punica.engine.engine import Engine
from punica.models import LlamaForCausalLM, mixture_of_experts
from punica.models.checkpoint import StoredTensor, stored_tensors
from punica.ops.absent_gpu import AbsentTensor, GpuDescription, stand_in
from punica.parallel.matmul import PLAIN_TENSORS


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
    PLAIN_TENSORS.add(AbsentTensor)
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
        ("prefill-chunk", "rows of prompts in one step"), ("speculate", "drafts of a request in one step"),
    ):  # fmt: skip
        made.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}, as Engine.from_pretrained")
    made.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: the checkpoint's")
    made.add_argument("--fp8", choices=("float8_e4m3fn", "float8_e5m2"), help="format of the adapters' slots")
    for name in ("fp8-weights", "fp8-kv-cache", "batch-invariant", "prefix-cache"):
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
        if "prefill_chunk" in sizes:
            sizes["admission"] = "chunked"
        done = compile_ahead(described, folder, adapters, **sizes)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    where = os.environ.get("TRITON_CACHE_DIR", "Triton's default folder, as TRITON_CACHE_DIR is not set")
    print(f"{described.name}: {done.new} kernels compiled, {done.found} found in {where}")


if __name__ == "__main__":
    main()
