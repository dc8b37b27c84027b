"""Checkpoint and adapters on disk, drawn at random, the same for all engines."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from experiments.benches.model_steps import llama_config, random_llama
from experiments.harness.schema import ModelConf
from experiments.systems.weights import exported
from punica.adapters import write_random_adapter


@dataclass(frozen=True)
class Folders:
    """Folders of the model and of adapters 1, 2, ..., and the bytes of all adapters."""

    model: str
    adapters: list[str]
    adapter_bytes: int


def written(home: Path, model: ModelConf, device: str, rank: int, adapters: int, seed: int) -> Folders:
    """Write the model and `adapters` different adapters below `home`; the device is left empty."""
    config = llama_config(model)
    config.architectures, config.dtype = ["LlamaForCausalLM"], model.dtype.name
    config.save_pretrained(home / "model")
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in exported(random_llama(model, device)).items()}
    save_file(weights, home / "model" / "model.safetensors", metadata={"format": "pt"})
    dtype = getattr(torch, model.dtype.name)
    folders = [
        write_random_adapter(home / f"adapter-{i}", config, rank, seed + i, dtype=dtype, device=device)
        for i in range(1, adapters + 1)
    ]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    return Folders(str(home / "model"), list(map(str, folders)), size)
