"""`EngineConfig`: sizes and switches of an engine, their checks, and the memory that they take."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from punica.adapters import LoRAModelManager
from punica.adapters.wrap import slots_need
from punica.checks import check_count, clip
from punica.config import LoRAConfig
from punica.engine.attention import KVCache, cache_need, token_bytes
from punica.engine.cuda_graph import decode_sizes, prompt_sizes, verify_sizes
from punica.models import LlamaForCausalLM
from punica.models.families import loading_advice
from punica.ops.quant import E4M3
from punica.parallel import all_ranks_agree, check_free, current_group, free_bytes, tensor_model_parallel_all_gather
from punica.parallel.matmul import MOST_DEQUANTISED
from punica.scheduling import ADAPTER_INDEX_RULES, AdmissionRule, BlockManager, PrefixCache

DEFAULT_MODEL_LEN = 8192
"""Default of ``max_model_len``; step buffers grow with it."""
MOST_DRAFTS = 31
"""Most drafts of a request in one step; a step's logits grow with them."""
# Of one graph: some ten kernels a layer, each with up to 4 KB of arguments, for 32 to 80 layers. An estimate:
# EngineMemory.graphs is what an engine really took.
_GRAPH_BYTES = 2 << 20
# Multiple of all tiles of `prompt_attention`: a prompt cut there is summed in the same order as in one piece.
_TILE_TOKENS = 128


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine; checked when built (TypeError, ValueError).

    Args:
        max_batch_size: most requests in one step (32 in the paper).
        block_size: tokens per KV block, the paper's page (16 in the released code).
        max_model_len: most tokens of one request, prompt and output.
        num_blocks: KV blocks; ``None``: a full batch of the longest requests, so that none is ever preempted.
        adapter_index_rule: ``"per_request"``: every row is computed with its own adapter. ``"last_admitted"``: the
            rule of the released harness (disagreement D04), for a comparison with Figure 11; its outputs are wrong.
        ignore_adapters: for an engine without LoRA: requests may name adapters, which affect admission only.
            Backbone-only baselines serve a multi-LoRA workload this way; otherwise such requests are refused.
        cuda_graphs: on GPUs, run steps as CUDA graphs (`punica.engine.cuda_graph`), NCCL collectives included. Without
            them the host launches each kernel, and has no time to prepare the next step.
        batch_invariant: on a GPU, bits of a request's logits do not depend on its batch: dense products and attention
            keep one form each. Needs ``LoRAConfig.batch_invariant``, ``num_blocks`` for a full batch (no preemption),
            and at most 2 tensor-parallel ranks.
        fp8_kv_cache: one byte per element of keys and values (float8_e4m3fn) instead of the model's two or four; tokens
            may differ from the model's.
        prefill_chunk: most rows of prompts in a step, for the admission rule ``"chunked"``; ``None`` for other rules,
            under which a prompt is computed in one step.
        speculate: most draft tokens of a request in one step (`punica.engine.speculation`); 0: none. Tokens are those
            without, as far as rounding allows: rows of a step with drafts are computed as those of prompts. The next
            step waits for their tokens, so the host's work for it is beside no other.
        prefix_cache: requests take the keys and values of their first tokens from others with the same tokens, adapter
            content and ``cache_salt``, as far as these are still in the KV cache.
        adapter_templates: chats with an adapter are rendered by the template in its folder, if it has one, in the
            process that encodes prompts: for folders that are trusted.
        seed: base of the seeds derived, with the arrival number, for requests that have none.
    """

    max_batch_size: int = 32
    block_size: int = 16
    max_model_len: int = 2048
    num_blocks: int | None = None
    adapter_index_rule: str = "per_request"
    ignore_adapters: bool = False
    cuda_graphs: bool = True
    batch_invariant: bool = False
    fp8_kv_cache: bool = False
    prefill_chunk: int | None = None
    prefix_cache: bool = False
    adapter_templates: bool = False
    seed: int = 0
    speculate: int = 0

    def __post_init__(self) -> None:
        def put(name: str, lowest: int = 1, meaning: str = "") -> None:
            object.__setattr__(self, name, check_count(name, getattr(self, name), lowest, meaning))

        put("max_batch_size")
        put("block_size")
        put("max_model_len", 2, "one prompt token and one new token")
        put("seed", 0)
        put("speculate", 0)
        if self.speculate > MOST_DRAFTS:
            raise ValueError(f"speculate is {clip(self.speculate)}, must be at most {MOST_DRAFTS} drafts of a request")
        if self.speculate and self.batch_invariant:
            raise ValueError("speculate needs batch_invariant=False: bits of a row would depend on drafts beside it")
        if self.speculate and self.adapter_index_rule != "per_request":
            raise ValueError("speculate needs adapter_index_rule='per_request', which alone gives a request its tokens")
        for name in ("num_blocks", "prefill_chunk"):
            if getattr(self, name) is not None:
                put(name)
        if self.adapter_index_rule not in ADAPTER_INDEX_RULES:
            raise ValueError(
                f"adapter_index_rule is {self.adapter_index_rule!r}, must be one of {list(ADAPTER_INDEX_RULES)}"
            )
        for field in fields(self):
            if field.type is bool and not isinstance(value := getattr(self, field.name), bool):
                raise TypeError(f"{field.name} must be a bool, got {value!r}")

    @property
    def total_blocks(self) -> int:
        """``num_blocks``, or its default, which never runs out."""
        return self.num_blocks or self.full_blocks

    @property
    def full_blocks(self) -> int:
        return self.max_batch_size * -(-self.max_model_len // self.block_size)

    @property
    def max_num_batched_tokens(self) -> int:
        """Most token rows in one step: the longest prompt, or the rows for prompts, beside a full batch and drafts."""
        return (self.prefill_chunk or self.max_model_len) + self.max_batch_size * (1 + self.speculate)

    @property
    def max_step_rows(self) -> int:
        """Most rows of a step: those of prompts beside a full batch, padded as its graphs are."""
        return prompt_sizes(self.max_num_batched_tokens)[-1] + decode_sizes(self.max_batch_size)[-1]

    @property
    def caches_prompts(self) -> bool:
        """Rows of a prompt, or of drafts, may follow cached tokens."""
        return self.prefix_cache or self.prefill_chunk is not None or self.speculate > 0

    @property
    def prompt_grain(self) -> int:
        """Tokens of which cached parts of prompts have a multiple: under batch invariance tiles of the attention."""
        return _TILE_TOKENS if self.batch_invariant else 1

    @property
    def full_slots(self) -> int:
        """Adapter slots with which no request waits: one per request of the batch, and one for prefetching.

        The adapter that joins next is copied into it beside the steps before (section 5.2 of the paper).
        """
        return self.max_batch_size + 1

    def lora_config(self, max_lora_rank: int = 16, **fields: Any) -> LoRAConfig:
        """Return a ``LoRAConfig`` with :attr:`full_slots`."""
        sizes = {"max_lora_rank": max_lora_rank, "max_loras": self.full_slots}
        return LoRAConfig(**{**sizes, "batch_invariant": self.batch_invariant, **fields})


def blocks_for(config: EngineConfig) -> BlockManager:
    if config.prefix_cache:
        return PrefixCache(config.total_blocks, config.block_size, config.prompt_grain)
    return BlockManager(config.total_blocks, config.block_size)


def check_rule(rule: AdmissionRule, config: EngineConfig) -> None:
    if rule.chunked != (config.prefill_chunk is not None):
        raise ValueError(
            f"prefill_chunk is {config.prefill_chunk}: the admission rule 'chunked' needs a number of rows, and no "
            "other rule has one"
        )
    if rule.inseparable and config.prefix_cache:
        raise ValueError("prefix_cache=True needs an admission rule whose requests leave one by one, not a static one")


def check_parts(
    model: LlamaForCausalLM, lora_config: LoRAConfig | None, engine_config: EngineConfig | None, warm_up: bool | None
) -> EngineConfig:
    """Check that the arguments of an engine fit each other, and return its config: TypeError, ValueError."""
    if isinstance(model, nn.Module) and not isinstance(model, LlamaForCausalLM):
        raise TypeError(f"model is not of this library: {loading_advice(model)}")
    for name, value, wanted, optional in (
        ("model", model, LlamaForCausalLM, False),
        ("lora_config", lora_config, LoRAConfig, True),
        ("engine_config", engine_config, EngineConfig, True),
        ("warm_up", warm_up, bool, True),
    ):
        if not isinstance(value, wanted) and not (optional and value is None):
            suffix = " or None" if optional else ""
            raise TypeError(
                f"{name} must be of class {wanted.__name__}{suffix}, got {type(value).__name__} {clip(value)}"
            )
    config, limit, ranks = engine_config or EngineConfig(), model.max_context, current_group().world_size
    if config.max_model_len > limit:
        what = f"{limit} positions (max_position_embeddings, or what its RoPE scaling makes of them)"
        if limit == getattr(model.config, "sliding_window", None):
            what = f"a sliding window of {limit} tokens, beyond which it would have to forget"
        raise ValueError(f"max_model_len is {config.max_model_len}, the model has {what}; lower max_model_len")
    if config.ignore_adapters and lora_config is not None:
        raise ValueError("ignore_adapters=True is for an engine without LoRA; leave it out, or pass lora_config=None")
    if config.batch_invariant and lora_config is not None and not lora_config.batch_invariant:
        raise ValueError("batch_invariant=True needs it of the adapters too; pass LoRAConfig(batch_invariant=True)")
    if config.batch_invariant and config.total_blocks < config.full_blocks:
        raise ValueError(
            f"batch_invariant=True needs {config.full_blocks} KV blocks, got {config.total_blocks}: a request that is "
            "preempted is computed again as a prompt, with other bits; leave num_blocks out, or lower max_batch_size "
            "or max_model_len"
        )
    if config.batch_invariant and ranks > 2:
        raise ValueError(
            f"batch_invariant=True serves on at most 2 tensor-parallel ranks, got {ranks}: the order in which more of "
            "them add depends on the batch"
        )
    if config.batch_invariant and config.caches_prompts and config.fp8_kv_cache:
        raise ValueError(
            "batch_invariant=True with fp8_kv_cache needs prompts computed whole, as rows of one step attend to each "
            "other before they are rounded; leave out prefix_cache and prefill_chunk"
        )
    if config.prefill_chunk is not None and config.prefill_chunk < config.prompt_grain:
        raise ValueError(
            f"prefill_chunk is {config.prefill_chunk}, must be at least {config.prompt_grain} with batch_invariant=True"
        )
    if config.prefix_cache and config.adapter_index_rule != "per_request":
        raise ValueError("prefix_cache=True needs adapter_index_rule='per_request': cached rows have their own adapter")
    if not model.has_weights:
        raise ValueError(
            "the model's weights were never loaded, it would compute with whatever lies in memory; call "
            "model.load_weights(folder) or model.init_random_weights() first"
        )
    return config


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

    @classmethod
    def of(
        cls, model: LlamaForCausalLM, manager: LoRAModelManager | None, config: EngineConfig, graphs: int
    ) -> "EngineMemory":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        slots, per_slot = (0, 0) if manager is None else (manager.lora_slots, manager.slot_bytes)
        tokens, per_token = config.total_blocks * config.block_size, token_bytes(model, fp8=config.fp8_kv_cache)
        return cls(weights, slots * per_slot, per_slot, tokens * per_token, per_token, graphs)


def graph_reserve(model: LlamaForCausalLM, config: EngineConfig) -> int:
    """Estimate the bytes of all CUDA graphs of an engine; 0 if it has none.

    Graphs share the intermediate results of the largest step: per row four hidden states (queries, keys and values
    counted as one) and three inner ones of the MLP, per request two rows of logits; and what is dequantised at once of
    weights in FP8. Kernels are counted for every graph that `Engine.capture_graphs` could make.
    """
    if model.lm_head.weight.device.type != "cuda" or not config.cuda_graphs:
        return 0
    sizes = model.config
    inner = getattr(sizes, "moe_intermediate_size", None) or sizes.intermediate_size
    inner *= getattr(sizes, "num_experts_per_tok", None) or 1
    decodes, prompts = decode_sizes(config.max_batch_size), prompt_sizes(config.max_num_batched_tokens)
    verifies = verify_sizes(config.max_batch_size, config.speculate)
    elements = config.max_step_rows * (4 * sizes.hidden_size + 3 * inner)
    elements += 2 * max(decodes[-1], verifies[-1]) * sizes.vocab_size
    elements += min(MOST_DEQUANTISED, max((one.numel() for one in model.parameters() if one.dtype == E4M3), default=0))
    # each with LoRA again for adapters of embedding or head
    graphs = 7 * (len(decodes) + len(verifies) - 1) + 10 * len(prompts)
    return elements * model.lm_head.weight.element_size() + graphs * _GRAPH_BYTES


def cache_for(
    model: LlamaForCausalLM, lora_config: LoRAConfig | None, config: EngineConfig, cache: KVCache | None
) -> KVCache:
    """Return a new KV cache, or ``cache``. ValueError: it does not fit, or cache and slots exceed the free memory."""
    weight = model.lm_head.weight
    if cache is not None and config.prefix_cache:
        raise ValueError("prefix_cache=True needs a KV cache that no other engine writes; leave out cache")
    if cache is None:
        need = cache_need(model, config.total_blocks, config.block_size, fp8=config.fp8_kv_cache)
        check_free([need] if lora_config is None else [need, slots_need(model, lora_config)], weight.device)
        return KVCache(model, config.total_blocks, config.block_size, fp8=config.fp8_kv_cache)
    wanted = model.num_layers, model.num_kv_heads, model.head_size, weight.dtype, weight.device
    found = len(cache.keys), *cache.keys[0].shape[1:], cache.model_dtype, cache.keys[0].device
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
    return cache


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
