"""Requests of an engine: checks on arrival and states of those accepted; their results, and the outputs of steps."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from punica.checks import check_count, clip
from punica.engine.pretrained import GenerationDefaults
from punica.engine.sampler import derived_seed
from punica.engine.text import TextCodec, bad_sequences, growing_text, text_of
from punica.scheduling import FinishReason, Request, RequestState, as_sampling_params


@dataclass(frozen=True)
class GenerationResult:
    """Result of a request that has ended.

    Attributes:
        token_ids: generated tokens, including one that ended it.
        text: of ``token_ids``, without special tokens unless asked for, and up to the stop token or stop string that
            ended it; it continues the prompt, so it may begin with a space. ``None`` on an engine without a tokenizer.
        finish_reason: ``"stop"`` (an end token, a stop token or a stop string), ``"length"`` (``max_new_tokens``),
            ``"aborted"`` or ``"failed"``; the output before is kept in each case.
        error: reason of the failure, else ``None``.
        logprobs: per token ``{token id: logprob}``, the token itself first; ``None`` if not asked for.
        arrival_s, first_token_s, last_token_s: seconds on the clock of ``time.perf_counter``; ``None`` without a token.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None
    logprobs: list[dict[int, float]] | None
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None


@dataclass(frozen=True)
class GenerationChunk:
    """New output of one of the prompts of ``Engine.stream``.

    ``index``: of the prompt, or of the result where prompts have ``n`` each. ``text``: new text, ``None`` without a
    tokenizer or if decoding failed. It holds back partial characters and possible stop strings, so it may lag behind
    the tokens; all chunks together are the text of the result. ``result``: set in the last chunk of a prompt.
    """

    index: int
    token_ids: list[int]
    text: str | None
    result: GenerationResult | None


@dataclass(frozen=True)
class StepStatistics:
    """Composition and times of a step (seconds, host clock).

    ``batch_size``: requests in the invocation. ``num_idle`` of them are finished members of a static batch, or left
    after the launch. ``num_prefill_tokens``: prompt rows. ``num_segments``: LoRA segments.

    With a prefix cache, since the step before: ``num_hit_tokens`` of joining requests were cached,
    ``num_missed_tokens`` were not, and ``num_evicted_blocks`` made room for others.

    With speculation: ``num_drafted_tokens``, of which ``num_accepted_tokens`` were right, up to each first wrong one.

    ``schedule_s``: scheduling, adapter activation, layout. ``metadata_s``: step inputs and segment indices; 0 for a
    step launched ahead. ``model_s``: the model with LoRA, up to the tokens on the host, including the host's work for
    the next step.
    """

    batch_size: int = 0
    num_idle: int = 0
    num_prefill_tokens: int = 0
    num_segments: int = 0
    num_preempted: int = 0
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0
    num_evicted_blocks: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    schedule_s: float = 0.0
    metadata_s: float = 0.0
    model_s: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """Tokens of one step, ``{request_id: token}``, results of requests that finished or failed in it, statistics.

    ``earlier``: tokens of a request in this step before that one, where drafts were accepted.

    Results kept for it come first: of requests added one by one that ended in a step of ``generate`` or ``stream``, or
    in a step that raised. Their tokens are in the results and in the requests' states only.
    """

    tokens: dict[str, int]
    finished: tuple[GenerationResult, ...]
    statistics: StepStatistics
    failed: tuple[GenerationResult, ...] = ()
    earlier: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True)


def result_of(state: RequestState, codec: TextCodec | None) -> GenerationResult:
    """Build the result of a request that has ended (else RuntimeError); it fails if its text cannot be decoded."""
    if state.finish_reason is None:
        raise RuntimeError(f"request {state.request_id!r} has not ended; call step until it has, or abort_request")
    text = None
    if codec is not None:
        try:
            if state.text is not None:
                text = state.text.finish()
            else:
                keeps, ids = not state.params.skip_special_tokens, state.text_token_ids
                text = text_of(codec, ids, keeps_special=keeps, prompt_token_ids=state.prompt_token_ids)
        except Exception as error:  # any exception of a tokenizer
            state.fail(state.error or f"{type(error).__name__}: {error}")
    logprobs = None if state.params.logprobs is None else list(state.logprobs)
    return GenerationResult(
        state.request_id, state.prompt_token_ids, list(state.output_token_ids), text, state.finish_reason, state.error,
        logprobs, state.arrival_s, state.first_token_s, state.last_token_s,
    )  # fmt: skip


class StateFactory:
    """States of requests, in order of arrival; ``seed``: base of the seeds derived for those that have none."""

    def __init__(self, seed: int, defaults: GenerationDefaults, codec: TextCodec | None) -> None:
        self._seed, self._defaults, self._codec = seed, defaults, codec
        self._numbers = itertools.count()

    def make(self, request: Request) -> RequestState:
        params, number, codec = as_sampling_params(request.params), next(self._numbers), self._codec
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derived_seed(self._seed, number)
        text = growing_text(codec, params, request.prompt_token_ids) if codec is not None and params.stop else None
        return RequestState(request, seed, self._defaults.eos_token_ids, text, bad_sequences(codec, params.bad_words))


def check_request(
    request: Request, is_in_use: Callable[[str], bool], vocab_size: int, max_model_len: int, *, has_tokenizer: bool,
    generated: Sequence[int] = (),
) -> None:  # fmt: skip
    """Check a request that arrives, all but its adapter, and the tokens that it has already: TypeError, ValueError.

    Tokens of prompt and parameters have to be in the vocabulary, strings need a tokenizer, ``n`` has to be 1.
    """
    if not isinstance(request, Request):
        raise TypeError(f"request must be a Request, got {type(request).__name__}")
    name, highest = clip(request.request_id), max(request.prompt_token_ids)
    if is_in_use(request.request_id):
        raise ValueError(f"request_id {name} is in use by an unfinished request; choose another id")
    if highest >= vocab_size:
        raise ValueError(
            f"prompt of request {name} contains token {clip(highest)}, the vocabulary has {vocab_size} ids; check the "
            "tokenizer"
        )
    params = as_sampling_params(request.params)
    words = [word for word in params.bad_words if not isinstance(word, str)]
    for name_of_ids, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("bad_words", [token for word in words for token in word]),
    ):
        last = max(ids, default=0)
        if last >= vocab_size:
            raise ValueError(
                f"{name_of_ids} of request {name} contain {clip(last)}, the vocabulary has {vocab_size} ids: it would "
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
    prompt, new = len(request.prompt_token_ids), request.max_new_tokens
    if prompt + new > max_model_len:
        raise ValueError(
            f"request {name} has {prompt} prompt tokens and {new} new ones, max_model_len is {max_model_len}; "
            "shorten it or raise EngineConfig.max_model_len"
        )

    for place, token in enumerate(generated):
        if check_count(f"generated[{place}]", token, 0) >= vocab_size:
            raise ValueError(f"generated[{place}] is {clip(token)}, the vocabulary has {vocab_size} ids")
    if len(generated) >= new:
        raise ValueError(
            f"request {name} has {len(generated)} generated tokens and asks for {new}: it has ended; take its output "
            "as it is"
        )
