"""Command lines that start a server on the made folder, each with fewer slots than adapters."""

import shlex
from collections.abc import Sequence

from experiments.conformance.client import KEY_VARIABLE
from experiments.conformance.expected import World
from experiments.conformance.oracle import BASE
from experiments.conformance.weights import ADAPTERS, CHECKPOINT, MAX_LEN

SLOTS = 4
BATCH = 64


def lines(world: World) -> str:
    """Return what to type for each server."""
    checkpoint = shlex.quote(str((world.folder / CHECKPOINT).resolve()))
    root = str((world.folder / ADAPTERS).resolve())
    names = world.models[1:]
    given = [f"{name}={shlex.quote(str(world.adapter(name)))}" for name in names]
    rank = max(8, 1 << (max(tenant.rank for tenant in world.tenants) - 1).bit_length())  # vLLM takes few other sizes
    sizes = f"--max-loras {SLOTS} --max-lora-rank {rank} --max-model-len {MAX_LEN}"
    test = f"python -m experiments.commands.conformance folder={shlex.quote(str(world.folder.resolve()))}"
    return "\n\n".join([
        "ours:\n" + _joined([
            f"python -m punica.serve {checkpoint} --served-model-name {BASE} {sizes}",
            f"--max-batch-size {BATCH} --allow-folder {shlex.quote(root)}", *(f"--adapter {one}" for one in given),
        ]) + f"\n{test} url=http://127.0.0.1:8000",
        "vLLM:\n" + _joined([
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server",
            f"--model {checkpoint} --served-model-name {BASE} {sizes} --max-num-seqs {BATCH}",
            f"--enable-lora --max-cpu-loras {len(names) + 2} --lora-modules", *given,
        ]) + f"\n{test} url=http://127.0.0.1:8000",
        "SGLang:\n" + _joined([
            f"python -m sglang.launch_server --model-path {checkpoint} --served-model-name {BASE} --enable-lora",
            f"--max-loras-per-batch {SLOTS} --max-lora-rank {rank} --lora-target-modules all --lora-paths", *given,
        ]) + f"\n{test} url=http://127.0.0.1:30000 prefix={BASE}:",
        "LoRAX:\n" + _joined([
            f"lorax-launcher --model-id {checkpoint} --adapter-source local --max-active-adapters {SLOTS} --port 8080",
        ]) + f"\n{test} url=http://127.0.0.1:8080 base={checkpoint} prefix={shlex.quote(root)}/",
        f"An API key is taken from {KEY_VARIABLE}.",
    ])  # fmt: skip


def _joined(parts: Sequence[str]) -> str:
    return " \\\n    ".join(parts)
