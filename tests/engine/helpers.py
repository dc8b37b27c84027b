"""Helpers of the engine's tests."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import GenerationResult


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    """Return the generated tokens; every request must have ended without error."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


def torch_without_gpu() -> SimpleNamespace:
    """Return a stand-in for torch in `punica.engine.cuda_graph`, for tests that replace the capture."""
    device = SimpleNamespace(
        graph_pool_handle=lambda: None, mem_get_info=lambda _: (0, 0), synchronize=lambda _: None,
        empty_cache=lambda: None, Stream=lambda _: None, CUDAGraph=torch.cuda.CUDAGraph,
    )  # fmt: skip
    return SimpleNamespace(cuda=device, device=torch.device, OutOfMemoryError=torch.OutOfMemoryError)


def adapter_of_the_ends(backbone: Any, folder: Path) -> tuple[LoRARequest, transformers.LlamaForCausalLM]:
    """A PEFT adapter of embedding and head with rank 4, and the model that it is merged into."""
    hidden, vocab = backbone.config.hidden_size, backbone.config.vocab_size
    pairs = {"embed_tokens": (vocab, hidden), "lm_head": (hidden, vocab)}  # inputs, outputs
    path = write_random_adapter(folder, backbone.config, 4, 9, target_modules=("q_proj",))
    settings = json.loads((path / "adapter_config.json").read_text()) | {"target_modules": list(pairs)}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    merged = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
    tensors, start = {}, "base_model.model."
    for name, (inputs, outputs) in pairs.items():
        a, b = torch.randn(4, inputs) / 4, torch.randn(outputs, 4) / 4
        if name == "embed_tokens":
            tensors |= {f"{start}model.{name}.lora_embedding_A": a, f"{start}model.{name}.lora_embedding_B": b}
            merged.model.embed_tokens.weight.data.add_((b @ a).T, alpha=2.0)
        else:
            tensors |= {f"{start}{name}.lora_A.weight": a, f"{start}{name}.lora_B.weight": b}
            merged.lm_head.weight.data.add_(b @ a, alpha=2.0)
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest("ends", 9, str(path)), merged
