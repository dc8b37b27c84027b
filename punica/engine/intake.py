"""Intake of requests: checks on arrival, before anything changes, and the state of those accepted."""

import itertools
from collections.abc import Sequence

from punica.checks import check_count, clip
from punica.engine.config import EngineConfig
from punica.engine.pretrained import GenerationDefaults
from punica.engine.residency import AdapterResidency
from punica.engine.sampler import derived_seed
from punica.engine.text import TextCodec, bad_sequences, growing_text
from punica.scheduling import BlockManager, Request, RequestState, as_sampling_params


class StateFactory:
    """Makes the states of requests, in order of arrival.

    Args:
        seed: base of the seeds derived for requests that sample without one.
        defaults: the model's end tokens.
        codec: text codec for stop strings; ``None`` without a tokenizer.
    """

    def __init__(self, seed: int, defaults: GenerationDefaults, codec: TextCodec | None) -> None:
        self._seed, self._defaults, self._codec = seed, defaults, codec
        self._numbers = itertools.count()

    def make(self, request: Request) -> RequestState:
        """Return the state of the next request to arrive."""
        params, number = as_sampling_params(request.params), next(self._numbers)
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derived_seed(self._seed, number)
        codec = self._codec
        text = growing_text(codec, params, request.prompt_token_ids) if codec is not None and params.stop else None
        banned = bad_sequences(codec, params.bad_words)
        return RequestState(request, seed, self._defaults.eos_token_ids, text, banned)


class Intake:
    """Checks and states of the requests of one engine; ``residency`` is ``None`` without LoRA."""

    def __init__(
        self, config: EngineConfig, vocab_size: int, blocks: BlockManager, residency: AdapterResidency | None,
        defaults: GenerationDefaults, codec: TextCodec | None,
    ) -> None:  # fmt: skip
        self._config, self._vocab_size, self._blocks, self._residency = config, vocab_size, blocks, residency
        self._has_tokenizer = codec is not None
        self._states = StateFactory(config.seed, defaults, codec)

    def check(self, request: Request, generated: Sequence[int]) -> None:
        """Check everything except the adapter's folder: TypeError, ValueError, RuntimeError (no slot)."""
        name = clip(request.request_id)
        check_tokens(request, self._vocab_size, has_tokenizer=self._has_tokenizer)
        check_length(request, self._config, self._blocks)
        if request.adapter is not None and not self._config.ignore_adapters:
            if self._residency is None:
                raise ValueError(
                    f"request {name} names an adapter, but this engine has no LoRA layers; pass lora_config to "
                    "Engine, or set EngineConfig.ignore_adapters to serve the backbone alone"
                )
            self._residency.check(request.adapter)
        check_generated(request, generated, self._vocab_size)

    def check_folder(self, request: Request) -> None:
        """Check the adapter's id and folder: FileNotFoundError, ValueError, TypeError."""
        if self._residency is not None and request.adapter is not None:
            self._residency.check_folder(request.adapter)

    def accept(self, request: Request, generated: Sequence[int]) -> RequestState:
        """Return the state of a checked request; until it leaves, its adapter id names that folder."""
        state = self._states.make(request)
        state.resume(generated)
        if self._residency is not None:
            self._residency.add(state)
        return state

    def refuse(self, request: Request, error: Exception) -> RequestState:
        """Return the state of a request that failed on arrival."""
        state = self._states.make(request)
        state.fail(f"{type(error).__name__}: {error}")
        return state


def check_tokens(request: Request, vocab_size: int, *, has_tokenizer: bool) -> None:
    """Check that tokens of prompt and parameters are in the vocabulary, and strings have a tokenizer: ValueError.

    ``n`` has to be 1: a request has one output.
    """
    name, highest = clip(request.request_id), max(request.prompt_token_ids)
    if highest >= vocab_size:
        raise ValueError(
            f"prompt of request {name} contains token {clip(highest)}, the vocabulary has {vocab_size} ids; check the "
            "tokenizer"
        )
    params = as_sampling_params(request.params)
    words = [word for word in params.bad_words if not isinstance(word, str)]
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("bad_words", [token for word in words for token in word]),
    ):
        last = max(ids, default=0)
        if last >= vocab_size:
            raise ValueError(
                f"{field} of request {name} contain {clip(last)}, the vocabulary has {vocab_size} ids: it would "
                "never come; check the tokenizer"
            )
    if not has_tokenizer and (params.stop or len(words) < len(params.bad_words)):
        what = "stop strings" if params.stop else "bad words as text"
        raise ValueError(
            f"request {name} has {what}, but this engine has no tokenizer; pass token ids (stop_token_ids, or lists of "
            "ids as bad_words), or Engine(tokenizer=...)"
        )
    if params.n != 1:
        raise ValueError(
            f"request {name} has n={params.n}, a request has one output; call generate, or add a request for each of "
            "params.choices()"
        )


def check_generated(request: Request, generated: Sequence[int], vocab_size: int) -> None:
    """Check that generated tokens are in the vocabulary, and fewer than the request asks for: TypeError, ValueError."""
    for place, token in enumerate(generated):
        if check_count(f"generated[{place}]", token, 0) >= vocab_size:
            raise ValueError(f"generated[{place}] is {clip(token)}, the vocabulary has {vocab_size} ids")
    if len(generated) >= request.max_new_tokens:
        raise ValueError(
            f"request {clip(request.request_id)} has {len(generated)} generated tokens and asks for "
            f"{request.max_new_tokens}: it has ended; take its output as it is"
        )


def check_length(request: Request, config: EngineConfig, blocks: BlockManager) -> None:
    """Check the length against ``max_model_len`` and the whole KV cache: ValueError."""
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
