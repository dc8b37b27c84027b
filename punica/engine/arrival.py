"""What an engine refuses when it is built and when a request arrives, before anything changes."""

from torch import nn

from punica.checks import clip
from punica.config import LoRAConfig
from punica.engine.config import EngineConfig
from punica.models import LlamaForCausalLM
from punica.models.families import how_to_load
from punica.scheduling import BlockManager, Request, as_sampling_params


def check_tokens(request: Request, vocab_size: int, *, has_tokenizer: bool) -> None:
    """ValueError for a prompt or stop token outside of the vocabulary, and for stop strings without a tokenizer."""
    name, highest = clip(request.request_id), max(request.prompt_token_ids)
    if highest >= vocab_size:
        raise ValueError(
            f"prompt of request {name} contains token {clip(highest)}, the vocabulary has {vocab_size} ids; check the "
            "tokenizer"
        )
    params = as_sampling_params(request.params)
    last = max(params.stop_token_ids, default=0)
    if last >= vocab_size:
        raise ValueError(
            f"stop_token_ids of request {name} contain {clip(last)}, the vocabulary has {vocab_size} ids: it would "
            "never come; check the tokenizer"
        )
    if params.stop and not has_tokenizer:
        raise ValueError(
            f"request {name} has stop strings, but this engine has no tokenizer; pass stop_token_ids, or "
            "Engine(tokenizer=...)"
        )


def check_length(request: Request, config: EngineConfig, blocks: BlockManager) -> None:
    """ValueError for a request that is longer than ``max_model_len`` or than the whole KV cache."""
    name, prompt, new = clip(request.request_id), len(request.prompt_token_ids), request.max_new_tokens
    if prompt + new > config.max_model_len:
        raise ValueError(
            f"request {name} has {prompt} prompt tokens and {new} new ones, max_model_len is {config.max_model_len}; "
            "shorten it or raise EngineConfig.max_model_len"
        )
    needed = blocks.blocks_for(request.final_kv_length)
    if needed > blocks.num_blocks:
        raise ValueError(
            f"request {name} with {prompt} prompt tokens and {new} new ones needs {needed} KV blocks, the whole cache "
            f"has {blocks.num_blocks} (of {blocks.block_size} tokens); shorten it or raise EngineConfig.num_blocks"
        )


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
    """ValueError for more positions than the model has, for adapters to be both served and ignored, or for a model
    without weights.
    """
    limit, positions = model.max_context, model.config.max_position_embeddings
    if config.max_model_len > limit:
        what = f"{limit} positions (max_position_embeddings)" if limit == positions else (
            f"a sliding window of {limit} tokens, beyond which it would have to forget"
        )  # fmt: skip
        raise ValueError(f"max_model_len is {config.max_model_len}, the model has {what}; lower max_model_len")
    if config.ignore_adapters and lora_config is not None:
        raise ValueError("ignore_adapters=True is for an engine without LoRA; leave it out, or pass lora_config=None")
    if not model.has_weights:
        raise ValueError(
            "the model's weights were never loaded, it would compute with whatever lies in memory; call "
            "model.load_weights(folder) or model.init_random_weights() first"
        )
