"""What an engine refuses when it is built, before anything changes."""

from torch import nn

from punica.checks import clip
from punica.config import LoRAConfig
from punica.engine.config import EngineConfig
from punica.models import LlamaForCausalLM
from punica.models.families import how_to_load
from punica.parallel import get_tensor_model_parallel_world_size


def check_types(model: object, lora_config: object, engine_config: object) -> None:
    """TypeError for parts of another class, with advice for a transformers model."""
    if isinstance(model, nn.Module) and not isinstance(model, LlamaForCausalLM):
        raise TypeError(f"model is not of this library: {how_to_load(model)}")
    for name, value, wanted, optional in (
        ("model", model, LlamaForCausalLM, False),
        ("lora_config", lora_config, LoRAConfig, True),
        ("engine_config", engine_config, EngineConfig, True),
    ):
        if not isinstance(value, wanted) and not (optional and value is None):
            suffix = " or None" if optional else ""
            raise TypeError(
                f"{name} must be of class {wanted.__name__}{suffix}, got {type(value).__name__} {clip(value)}"
            )


def check_fits(config: EngineConfig, lora_config: LoRAConfig | None, model: LlamaForCausalLM) -> None:
    """ValueError for more positions than the model has, for adapters to be both served and ignored, for adapters,
    blocks or ranks with which nothing can be batch invariant, or for a model without weights.
    """
    limit, positions = model.max_context, model.config.max_position_embeddings
    if config.max_model_len > limit:
        what = f"{limit} positions (max_position_embeddings)" if limit == positions else (
            f"a sliding window of {limit} tokens, beyond which it would have to forget"
        )  # fmt: skip
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
