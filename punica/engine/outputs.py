"""Outputs of requests (results, streamed chunks) and of steps (tokens, statistics)."""

from collections.abc import Sequence
from dataclasses import dataclass

from punica.checks import clip
from punica.engine.text import TextCodec, text_of
from punica.scheduling import FinishReason, RequestState, StepLayout, StepPlan


@dataclass(frozen=True)
class GenerationResult:
    """Result of a request that has ended.

    Attributes:
        request_id: name of the request.
        prompt_token_ids: its prompt.
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

    ``index``: of the prompt, or of the result where prompts have ``n`` each. ``token_ids``: new tokens, in order.
    ``text``: new text, ``None`` without a tokenizer or if decoding failed. It holds back partial characters and
    possible stop strings, so it may lag behind the tokens; all chunks together are the text of the result.
    ``result``: set in the last chunk of a prompt.
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

    ``schedule_s``: scheduling, adapter activation, layout. ``metadata_s``: step inputs and segment indices; 0 for a
    step launched ahead. ``model_s``: the model with LoRA, up to the tokens on the host, including the host's work for
    the next step.
    """

    batch_size: int = 0
    num_idle: int = 0
    num_prefill_tokens: int = 0
    num_segments: int = 0
    num_preempted: int = 0
    schedule_s: float = 0.0
    metadata_s: float = 0.0
    model_s: float = 0.0

    @classmethod
    def of(
        cls, plan: StepPlan, layout: StepLayout, schedule_s: float, metadata_s: float, model_s: float
    ) -> "StepStatistics":
        """Count the requests and rows of a step."""
        size = len(layout.requests)
        idle = size - len(plan.prefills) - len(plan.decodes)
        counts = size, idle, layout.num_prefill_rows, layout.num_segments, len(plan.preempted)
        return cls(*counts, schedule_s, metadata_s, model_s)


@dataclass(frozen=True)
class StepOutput:
    """Tokens of one step, ``{request_id: token}``, results of requests that finished or failed in it, statistics.

    Results kept for it come first: of requests added one by one that ended in a step of ``generate`` or ``stream``, or
    in a step that raised. Their tokens are in the results and in the requests' states only.
    """

    tokens: dict[str, int]
    finished: tuple[GenerationResult, ...]
    statistics: StepStatistics
    failed: tuple[GenerationResult, ...] = ()


def result_of(state: RequestState, codec: TextCodec | None) -> GenerationResult:
    """Build the result of a request that has ended; it fails if its text cannot be decoded.

    RuntimeError for one that has not ended.
    """
    if state.finish_reason is None:
        raise RuntimeError(f"request {state.request_id!r} has not ended; call step until it has, or abort_request")
    text = None
    if codec is not None:
        try:
            keeps, ids = not state.params.skip_special_tokens, state.text_token_ids
            if state.text is not None:
                text = state.text.finish()
            else:
                text = text_of(codec, ids, keeps_special=keeps, prompt_token_ids=state.prompt_token_ids)
        except Exception as error:  # any exception of a tokenizer
            state.fail(state.error or f"{type(error).__name__}: {error}")
    return GenerationResult(
        request_id=state.request_id,
        prompt_token_ids=state.prompt_token_ids,
        token_ids=list(state.output_token_ids),
        text=text,
        finish_reason=state.finish_reason,
        error=state.error,
        logprobs=None if state.params.logprobs is None else list(state.logprobs),
        arrival_s=state.arrival_s,
        first_token_s=state.first_token_s,
        last_token_s=state.last_token_s,
    )


def no_token_error(state: RequestState) -> str:
    """Return the error of a request whose logits hold NaN."""
    adapter = state.adapter
    if adapter is None:
        cause = "it runs without an adapter: look for NaN in the model's weights, or serve them in a wider dtype"
    else:
        name = clip(getattr(adapter, "lora_name", None))
        cause = (
            f"the likely cause is its adapter {name} (id {state.adapter_id}), whose weights or scaling take products "
            "out of the range of the model's dtype; train it with smaller ones, or serve it in a wider dtype"
        )
    return f"ValueError: the logits of request {clip(state.request_id)} hold NaN at token {state.num_tokens}: {cause}"
