"""Requests that arrive: what is refused of them, before anything changes, and what is noted about those that stay."""

import itertools
from collections.abc import Sequence

from punica.checks import check_count, clip
from punica.engine.config import EngineConfig
from punica.engine.folder import GenerationDefaults
from punica.engine.sampler import derived_seed
from punica.engine.text import GrowingText, TextCodec
from punica.scheduling import BlockManager, Request, RequestState, as_sampling_params


class Arrivals:
    """What is noted about the requests that come, in their order.

    Args:
        seed: from which those that sample and bring no seed get theirs, each another one.
        defaults: the model's end tokens.
        codec: of the text in which stop strings are looked for, if there is one.
    """

    def __init__(self, seed: int, defaults: GenerationDefaults, codec: TextCodec | None) -> None:
        self._seed, self._defaults, self._codec = seed, defaults, codec
        self._numbers = itertools.count()

    def note(self, request: Request) -> RequestState:
        """The next one, as it waits."""
        params, number = as_sampling_params(request.params), next(self._numbers)
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derived_seed(self._seed, number)
        text = GrowingText(self._codec, params.stop) if self._codec is not None and params.stop else None
        return RequestState(request, seed, self._defaults.eos_token_ids, text)


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


def check_generated(request: Request, generated: Sequence[int], vocab_size: int) -> None:
    """TypeError, ValueError for tokens that a request cannot have generated: no ids of the vocabulary, or as many as it
    asks for, with which it would have ended.
    """
    for place, token in enumerate(generated):
        if check_count(f"generated[{place}]", token, 0) >= vocab_size:
            raise ValueError(f"generated[{place}] is {clip(token)}, the vocabulary has {vocab_size} ids")
    if len(generated) >= request.max_new_tokens:
        raise ValueError(
            f"request {clip(request.request_id)} has {len(generated)} generated tokens and asks for "
            f"{request.max_new_tokens}: it has ended; take its output as it is"
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
