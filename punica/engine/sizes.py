"""Memory of an engine, and sizes that fit the machine."""

from dataclasses import dataclass
from typing import Any

import torch

from punica.adapters import LoRAModelManager
from punica.adapters.wrap import slots_need
from punica.config import LoRAConfig
from punica.engine.config import EngineConfig
from punica.engine.cuda_graph import decode_sizes, prompt_sizes
from punica.engine.kv_cache import KVCache, token_bytes
from punica.models import LlamaForCausalLM
from punica.ops.quant import E4M3
from punica.parallel import (
    Need,
    all_ranks_agree,
    check_free_for_all,
    free_bytes,
    tensor_model_parallel_all_gather,
)

DEFAULT_MODEL_LEN = 8192
"""Default of ``max_model_len``; step buffers grow with it."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the device of one rank.

    ``weights``: of the backbone. ``adapter_slots``: ``slot_bytes`` each, used or not. ``kv_cache``: ``token_bytes`` for
    each token. ``graphs``: CUDA graphs captured so far, with their shared intermediate results.
    """

    weights: int
    adapter_slots: int
    slot_bytes: int
    kv_cache: int
    token_bytes: int
    graphs: int


# Of one graph: some ten kernels a layer, each with up to 4 KB of arguments, for 32 to 80 layers. An estimate:
# EngineMemory.graphs is what an engine really took.
_GRAPH_BYTES = 2 << 20


def graph_reserve(model: LlamaForCausalLM, config: EngineConfig) -> int:
    """Estimate the bytes of all CUDA graphs of an engine; 0 if it has none.

    Graphs share the intermediate results of the largest step: per row four hidden states (queries, keys and values
    counted as one) and three inner ones of the MLP, per request two rows of logits. Kernels are counted for every graph
    that `Engine.capture_graphs` could make.
    """
    if model.lm_head.weight.device.type != "cuda" or not config.cuda_graphs:
        return 0
    sizes = model.config
    inner = getattr(sizes, "moe_intermediate_size", None) or sizes.intermediate_size
    inner *= getattr(sizes, "num_experts_per_tok", None) or 1
    decodes, prompts = decode_sizes(config.max_batch_size), prompt_sizes(config.max_num_batched_tokens)
    elements = (prompts[-1] + decodes[-1]) * (4 * sizes.hidden_size + 3 * inner) + 2 * decodes[-1] * sizes.vocab_size
    graphs = 7 * len(decodes) + 10 * len(prompts)  # each with LoRA again for adapters of embedding or head
    return elements * model.lm_head.weight.element_size() + graphs * _GRAPH_BYTES


def slot_bytes(model: LlamaForCausalLM, rank: int, itemsize: int) -> int:
    """Return the bytes of one adapter slot of ``rank`` in all layers: A and B of every weight matrix.

    Exact on one rank if ``target_modules`` names every layer, else an upper bound.
    """
    shapes: list[Any] = [entry.shape for entry in model.checkpoint_entries() if len(entry.shape) == 2]
    if model.config.tie_word_embeddings:
        shapes.append((model.config.vocab_size, model.config.hidden_size))
    return sum(rank * itemsize * sum(shape) for shape in shapes)


def memory_of(
    model: LlamaForCausalLM, manager: LoRAModelManager | None, config: EngineConfig, graphs: int
) -> EngineMemory:
    """Return the memory of an engine of these parts; ``graphs``: bytes of its CUDA graphs."""
    slots, per_slot = (0, 0) if manager is None else (manager.lora_slots, manager.slot_bytes)
    tokens, per_token = config.total_blocks * config.block_size, token_bytes(model, fp8=config.fp8_kv_cache)
    return EngineMemory(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        adapter_slots=slots * per_slot,
        slot_bytes=per_slot,
        kv_cache=tokens * per_token,
        token_bytes=per_token,
        graphs=graphs,
    )


def check_memory(model: LlamaForCausalLM, lora_config: LoRAConfig | None, config: EngineConfig) -> None:
    """Check that KV cache and adapter slots, not allocated yet, fit the free memory together: ValueError."""
    cache = Need(
        f"a KV cache of {config.total_blocks} blocks of {config.block_size} tokens",
        config.total_blocks * config.block_size * token_bytes(model, fp8=config.fp8_kv_cache),
        "lower EngineConfig.num_blocks, max_batch_size or max_model_len",
    )
    slots = [] if lora_config is None else [slots_need(model, lora_config)]
    check_free_for_all([cache, *slots], model.lm_head.weight.device)


def check_cache(cache: KVCache, model: LlamaForCausalLM, config: EngineConfig) -> None:
    """Check that ``cache`` fits the model, and has the block size, dtype and number of blocks: ValueError."""
    weight = model.lm_head.weight
    wanted = model.num_layers, model.num_kv_heads, model.head_size, weight.dtype, weight.device
    keys = cache.keys[0]
    found = len(cache.keys), *keys.shape[1:], cache.model_dtype, keys.device
    if found != wanted:
        raise ValueError(
            f"cache has layers, kv heads, head size, dtype and device {found}, the model {wanted}; make one for this "
            "model, or leave it out"
        )
    if cache.block_size != config.block_size or cache.num_blocks < config.total_blocks:
        raise ValueError(
            f"cache has {cache.num_blocks} blocks of {cache.block_size} tokens, the engine needs {config.total_blocks} "
            f"of {config.block_size}; make it that large, or leave it out"
        )
    if (cache.dtype == E4M3) != config.fp8_kv_cache:
        raise ValueError(f"cache holds {cache.dtype}, fp8_kv_cache is {config.fp8_kv_cache}; make both say the same")


def fit_blocks(model: LlamaForCausalLM, config: EngineConfig, reserved: int, memory_fraction: float) -> int:
    """Return the KV blocks that fit, at most ``config.total_blocks``; the same number on every rank.

    Blocks share ``memory_fraction`` of the free memory with ``reserved`` bytes (adapter slots), and leave
    :func:`graph_reserve` free. RuntimeError on every rank if no block fits on one of them.
    """
    device = model.lm_head.weight.device
    block_bytes = config.block_size * token_bytes(model, fp8=config.fp8_kv_cache)
    with all_ranks_agree():
        free = free_bytes(device)
        steps = graph_reserve(model, config)
        fits = int((min(memory_fraction * free, free - steps) - reserved) // block_bytes)
        if fits < 1:
            raise RuntimeError(
                f"no KV block of {block_bytes} bytes fits: {free} bytes are free on {device}, of which memory_fraction "
                f"{memory_fraction} may be used, {reserved} are for adapter slots and {steps} are left to CUDA graphs; "
                "lower max_loras or max_lora_rank, or serve with fewer bytes per weight (dtype)"
            )
    fits = int(tensor_model_parallel_all_gather(torch.tensor([fits], device=device), 0).min())
    return min(config.total_blocks, fits)
