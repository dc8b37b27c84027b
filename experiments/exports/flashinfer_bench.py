"""Write a data set for FlashInfer-Bench: definitions of two LoRA operators, workloads, solutions.

    python -m experiments.exports.flashinfer_bench outputs/flashinfer-bench
    flashinfer-bench run --local outputs/flashinfer-bench        # its package; needs a GPU

Inputs and weights are random; slots and routing are files: rows by arrival, adapters by the paper's popularities, every
eighth row of a batch without one.
"""

import json
import sys
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from experiments.workload.popularity import popularity
from punica.metadata import LoRAKernelMeta

SOLUTIONS = Path(__file__).with_name("solutions")
ROWS, POPULARITIES = (1, 16, 64), ("Distinct", "Uniform", "Skewed", "Identical")
DENSE = {"K": 4096, "N": 11008, "R": 16}
MOE = {"K": 14336, "N": 4096, "R": 16, "E": 8, "J": 2}
STEP = {"slots": "T", "order": "T", "counts": "L1", "starts": "L2", "active": "L1"}  # as in `LoRAKernelMeta.meta_args`
INPUTS = {
    "lora_shrink_expand": {"y": "T N", "x": "T K", "a": "L R K", "b": "L N R", "scale": "", **STEP},
    "moe_lora": {"y": "T J N", "x": "T J K", "a": "L E R K", "b": "L E N R", "experts": "T J", "weights": "T J",
                 "slots": "T"},
}  # fmt: skip
FLOATS = {"scale": "float32", "weights": "float32", **dict.fromkeys(("y", "x", "a", "b"), "bfloat16")}


def definition(op: str, sizes: dict[str, int]) -> dict[str, Any]:
    inputs, reference = INPUTS[op], (SOLUTIONS / f"{op.split('_')[0]}_reference.py").read_text(encoding="utf-8")
    axes: dict[str, Any] = {axis: {"type": "var"} for shape in inputs.values() for axis in shape.split()}
    axes |= {axis: {"type": "const", "value": size} for axis, size in sizes.items()}
    specs = {key: {"shape": shape.split() or None, "dtype": FLOATS.get(key, "int32")} for key, shape in inputs.items()}
    name = "_".join((op, *(f"{axis.lower()}{size}" for axis, size in sizes.items())))
    return {"name": name, "op_type": op, "description": reference.split('"""')[1], "axes": axes,
            "reference": reference, "inputs": specs, "outputs": {"out": specs["y"]}}  # fmt: skip


def solution(file: str, of: str, needs: str) -> dict[str, Any]:
    source = (SOLUTIONS / f"{file}.py").read_text(encoding="utf-8")
    spec = {"language": "python", "target_hardware": ["cuda"], "entry_point": "main.py::run",
            "dependencies": [needs], "destination_passing_style": False}  # fmt: skip
    return {"name": f"{file}_{of}", "definition": of, "author": "punica", "spec": spec,
            "description": source.split('"""')[1], "sources": [{"path": "main.py", "content": source}]}  # fmt: skip


def tensors_of(slots: torch.Tensor, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of a step that may not be random: grouped by slot, or with experts of a random router."""
    if "E" not in sizes:
        meta = LoRAKernelMeta.make(len(slots), len(slots), "cpu")
        meta.prepare_tensors(slots)
        return {name: value.clone() for name, value in zip(STEP, meta.meta_args(len(slots)), strict=False)}
    logits = torch.randn(len(slots), sizes["E"], generator=torch.Generator().manual_seed(len(slots)))
    weights, experts = logits.softmax(-1).topk(sizes["J"])
    return {"experts": experts.int(), "weights": (sizes["K"] * sizes["R"]) ** -0.5 * weights, "slots": slots}


def workloads(op: str, of: str, sizes: dict[str, int], root: Path) -> Iterator[dict[str, Any]]:
    """Yield the workloads of definition ``of``; their tensors go to files below ``root``."""
    for rows, name in product(ROWS, POPULARITIES):
        slots = torch.from_numpy(popularity(name).requests(rows)).int()
        slots[7::8] = -1
        tensors, file = tensors_of(slots, sizes), Path("blob/workloads", op, of, f"{name}-{rows}.safetensors")
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / file)
        axes = {"T": rows, "L": rows} | ({"L1": rows + 1, "L2": rows + 2} if "active" in tensors else {})
        given: dict[str, Any] = {key: {"type": "random"} for key in INPUTS[op]}
        given |= {key: {"type": "safetensors", "path": str(file), "tensor_key": key} for key in tensors}
        if "scale" in given:  # what random adapters add has a variance of 1
            given["scale"] = {"type": "scalar", "value": (sizes["K"] * sizes["R"]) ** -0.5}
        workload = {"axes": axes, "inputs": given, "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, str(file)))}
        yield {"definition": of, "workload": workload, "solution": None, "evaluation": None}


def write(root: Path, dense: dict[str, int] = DENSE, moe: dict[str, int] = MOE) -> None:
    solved = {"lora_punica": "punica-lora", "lora_vllm": "vllm"}, {"moe_punica": "punica-lora", "moe_torch": "torch"}
    for op, sizes, files in zip(INPUTS, (dense, moe), solved, strict=True):
        made = definition(op, sizes)
        of = made["name"]
        parts = {f"solutions/{op}/{of}/{file}.json": [solution(file, of, needs)] for file, needs in files.items()}
        parts[f"definitions/{op}/{of}.json"] = [made]
        parts[f"workloads/{op}/{of}.jsonl"] = [*workloads(op, of, sizes, root)]
        for path, entries in parts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("name the folder to write: python -m experiments.exports.flashinfer_bench FOLDER")
    write(Path(sys.argv[1]))
