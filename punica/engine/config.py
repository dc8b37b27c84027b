"""`EngineConfig`: sizes and switches of an engine, and their checks against model and adapters."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from punica.checks import check_count, clip
from punica.config import LoRAConfig
from punica.models import LlamaForCausalLM
from punica.models.families import loading_advice
from punica.parallel import get_tensor_model_parallel_world_size
from punica.scheduling import ADAPTER_INDEX_RULES


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
    adapter_templates: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        def put(name: str, lowest: int = 1, meaning: str = "") -> None:
            object.__setattr__(self, name, check_count(name, getattr(self, name), lowest, meaning))

        put("max_batch_size")
        put("block_size")
        put("max_model_len", 2, "one prompt token and one new token")
        put("seed", 0)
        if self.num_blocks is not None:
            put("num_blocks")
        if self.adapter_index_rule not in ADAPTER_INDEX_RULES:
            raise ValueError(
                f"adapter_index_rule is {self.adapter_index_rule!r}, must be one of {list(ADAPTER_INDEX_RULES)}"
            )
        for name in ("ignore_adapters", "cuda_graphs", "batch_invariant", "fp8_kv_cache", "adapter_templates"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    @property
    def total_blocks(self) -> int:
        """``num_blocks``, or its default, which never runs out."""
        return self.num_blocks or self.full_blocks

    @property
    def full_blocks(self) -> int:
        """Blocks of a full batch of the longest requests."""
        return self.max_batch_size * -(-self.max_model_len // self.block_size)

    @property
    def max_num_batched_tokens(self) -> int:
        """Most token rows in one step: the longest prompt beside a full batch of decode rows."""
        return self.max_model_len + self.max_batch_size

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


def check_types(model: object, lora_config: object, engine_config: object, warm_up: object) -> None:
    """Check the classes of an engine's arguments: TypeError, with advice for a transformers model."""
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


def check_fits(config: EngineConfig, lora_config: LoRAConfig | None, model: LlamaForCausalLM) -> None:
    """Check the config against model and adapters: ValueError.

    Refused: more positions than the model has; adapters both served and ignored; adapters, blocks or ranks that
    prevent batch invariance; a model without weights.
    """
    limit, window = model.max_context, getattr(model.config, "sliding_window", None)
    if config.max_model_len > limit:
        what = f"{limit} positions (max_position_embeddings, or what its RoPE scaling makes of them)"
        if limit == window:
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
    if config.batch_invariant and get_tensor_model_parallel_world_size() > 2:
        raise ValueError(
            f"batch_invariant=True serves on at most 2 tensor-parallel ranks, got "
            f"{get_tensor_model_parallel_world_size()}: the order in which more of them add depends on the batch"
        )
    if not model.has_weights:
        raise ValueError(
            "the model's weights were never loaded, it would compute with whatever lies in memory; call "
            "model.load_weights(folder) or model.init_random_weights() first"
        )
