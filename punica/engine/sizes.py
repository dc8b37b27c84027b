"""How much memory an engine takes, and sizes that fit the machine."""

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
"""Most tokens of a request when nobody says: longer ones are legal, but every step's buffers are made for them."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the device of one rank: ``weights`` of the backbone, ``adapter_slots`` (``slot_bytes`` each, used or
    not), ``kv_cache`` (``token_bytes`` for each token that it holds), ``graphs`` (CUDA graphs captured so far, with the
    memory of intermediate results that they share).
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
    """Bytes that steps as CUDA graphs may take beside everything else on a GPU; 0 where there are none.

    The intermediate results of the largest step (per row four hidden states, queries, keys and values as one of them,
    and three inner ones of the MLP; two rows of logits for each request), once, as graphs share them, and the kernels
    of every graph that `Engine.capture_graphs` could make.
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
    """Most bytes that one adapter slot of ``rank`` takes in all layers: both matrices of every weight matrix.

    Exact for one rank whose ``target_modules`` name every layer, an upper bound otherwise.
    """
    shapes: list[Any] = [entry.shape for entry in model.checkpoint_entries() if len(entry.shape) == 2]
    if model.config.tie_word_embeddings:
        shapes.append((model.config.vocab_size, model.config.hidden_size))
    return sum(rank * itemsize * sum(shape) for shape in shapes)


def memory_of(
    model: LlamaForCausalLM, manager: LoRAModelManager | None, config: EngineConfig, graphs: int
) -> EngineMemory:
    """What an engine of these parts holds; ``graphs``: bytes of its CUDA graphs."""
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
    """ValueError if KV cache and adapter slots, neither of which exists yet, take more than is free together."""
    cache = Need(
        f"a KV cache of {config.total_blocks} blocks of {config.block_size} tokens",
        config.total_blocks * config.block_size * token_bytes(model, fp8=config.fp8_kv_cache),
        "lower EngineConfig.num_blocks, max_batch_size or max_model_len",
    )
    slots = [] if lora_config is None else [slots_need(model, lora_config)]
    check_free_for_all([cache, *slots], model.lm_head.weight.device)


def check_cache(cache: KVCache, model: LlamaForCausalLM, config: EngineConfig) -> None:
    """ValueError if ``cache`` was made for another model than ``model``, has blocks of another size or kind than the
    engine, or fewer.
    """
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
    """KV blocks that fit: ``config.total_blocks``, or fewer when ``memory_fraction`` of what is free, less ``reserved``
    bytes (for adapter slots), holds no more, or when :func:`graph_reserve` would not stay free; the same number on
    every rank.

    RuntimeError on every rank when on one of them not a single block fits.
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
