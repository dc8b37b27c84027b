"""What a request gives back: its result when it has ended, and pieces of it meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "aborted", "failed"]


@dataclass(frozen=True)
class GenerationResult:
    """One request that has ended.

    Attributes:
        request_id: its name.
        prompt_token_ids: what was continued.
        token_ids: what was generated, a token that ended it included.
        text: of ``token_ids`` without special tokens, up to the stop string if one ended it; ``None`` on an engine
            without a tokenizer.
        finish_reason: ``"stop"`` (an end token, a stop token or a stop string), ``"length"`` (``max_new_tokens``),
            ``"aborted"`` or ``"failed"``; what came before is kept in each case.
        error: why it failed, else ``None``.
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
    """What a step added to one of the prompts of ``Engine.stream``.

    ``index``: of the prompt. ``token_ids``: new tokens, in order. ``text``: new text; whole characters, without what may
    become a stop string, so it may be empty or lag behind the tokens, and all chunks together are the text of the result
    (``None`` on an engine without a tokenizer). ``result``: in the last chunk of a prompt, else ``None``.
    """

    index: int
    token_ids: list[int]
    text: str | None
    result: GenerationResult | None
