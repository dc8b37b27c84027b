"""Generation requests, and their state in an engine."""

import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from punica.checks import as_int, clip
from punica.scheduling.sampling_params import SamplingParams, as_sampling_params

FinishReason = Literal["stop", "length", "aborted", "failed"]


class AdapterRequest(Protocol):
    """Fields of an adapter's request that scheduling reads (``punica.adapters.LoRARequest``)."""

    @property
    def lora_int_id(self) -> int:
        """Id of the adapter, at least 1."""


class AdapterWeights(Protocol):
    """Weights that a request runs with (``punica.adapters.LoadedAdapter``)."""

    @property
    def key(self) -> Hashable:
        """Equal for weights that share a slot: the adapter's id, unless another version took its place."""


class OutputText(Protocol):
    """Text of an output that strings can end (``punica.engine.text.GrowingText``)."""

    stopped: bool

    def append(self, token_id: int) -> None:
        """Append the next token, and set ``stopped`` if it completes a stop string."""

    def finish(self) -> str:
        """Return the whole text."""


class RequestStatus(Enum):
    """Status of a request: in the queue, in the batch, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue with one adapter; immutable, so that several engines can share it.

    Args:
        request_id: non-empty name, unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id; kept as a tuple of ints.
        params: choice of tokens and end of generation; an integer is greedy decoding of so many tokens.
        adapter: adapter to apply; ``None`` is the plain backbone.

    Raises TypeError (wrong types) or ValueError (empty id or prompt, negative token, fewer than one new token).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams | int
    adapter: AdapterRequest | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(self.request_id).__name__} {clip(self.request_id)}")
        if not self.request_id:
            raise ValueError("request_id must not be empty")
        name = clip(self.request_id)
        object.__setattr__(self, "prompt_token_ids", _token_ids(name, self.prompt_token_ids))
        object.__setattr__(self, "params", as_sampling_params(self.params))

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to generate."""
        return as_sampling_params(self.params).max_new_tokens

    @property
    def adapter_id(self) -> int:
        """Id of the adapter, 0 for the plain backbone."""
        return 0 if self.adapter is None else self.adapter.lora_int_id

    @property
    def final_kv_length(self) -> int:
        """Tokens in the cache at the end: all but the last generated one, which nothing attends to."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1


@dataclass(eq=False)
class RequestState:
    """State of a request in one engine, with its output so far.

    A preempted request keeps its output: prompt *and* output are recomputed later, and generation continues.

    Args:
        request: the request.
        seed: seed of its draws.
        eos_token_ids: the model's end tokens, which end it unless its parameters ignore them.
        text: text of its output, if it has stop strings.
        bad_sequences: tokens of its bad words.

    Attributes:
        request_id, prompt_token_ids, adapter, adapter_id, params: of the request.
        output_token_ids: generated tokens.
        is_ahead: its next token is being computed, and counts as generated already; false between two steps.
        logprobs: one entry per output token, if the request asks for them.
        status: WAITING, RUNNING, FINISHED, FAILED with the reason in ``error``, or ABORTED.
        finish_reason: reason of the end, ``None`` before.
        preemptions: number of preemptions for want of blocks or slots.
        overtaken: number of later requests that joined while it waited.
        weights: the version of its adapter that it started with, and keeps; ``None`` before it has joined.
        reloads: it waits to load a new version of its adapter.
        arrival_s, first_token_s, last_token_s: seconds on the clock of ``time.perf_counter``.
    """

    request: Request
    seed: int = 0
    eos_token_ids: Collection[int] = ()
    text: OutputText | None = None
    bad_sequences: Sequence[tuple[int, ...]] = ()
    request_id: str = field(init=False)
    prompt_token_ids: Sequence[int] = field(init=False)
    adapter: AdapterRequest | None = field(init=False)
    adapter_id: int = field(init=False)
    params: SamplingParams = field(init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    is_ahead: bool = field(default=False, init=False)
    logprobs: list[dict[int, float]] = field(default_factory=list, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    overtaken: int = field(default=0, init=False)
    weights: AdapterWeights | None = field(default=None, init=False)
    reloads: bool = field(default=False, init=False)
    arrival_s: float = field(default_factory=time.perf_counter, init=False)
    first_token_s: float | None = field(default=None, init=False)
    last_token_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.request_id, self.prompt_token_ids, self.adapter = (
            request.request_id,
            request.prompt_token_ids,
            request.adapter,
        )
        self.adapter_id = request.adapter_id
        self.params = params = as_sampling_params(request.params)
        self._ends = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.eos_token_ids)

    @property
    def weights_key(self) -> Hashable:
        """Identity of the adapter weights it needs: two requests share a slot if theirs are equal; 0 for none."""
        if self.weights is not None:
            return self.weights.key
        return self if self.reloads else self.adapter_id

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def token_at(self, position: int) -> int:
        """Return ``token_ids[position]`` without building the list; 0 for a token that is being computed."""
        behind = position - len(self.prompt_token_ids)
        if behind < 0:
            return self.prompt_token_ids[position]
        return self.output_token_ids[behind] if behind < len(self.output_token_ids) else 0

    @property
    def num_tokens(self) -> int:
        """Length of ``token_ids``, with a token that is being computed."""
        return len(self.prompt_token_ids) + self.num_generated

    @property
    def next_kv_length(self) -> int:
        """Tokens in the cache after the next step; for an idle request, without its last, never computed token."""
        return max(self.num_tokens - 1, 1) if self.status is RequestStatus.FINISHED else self.num_tokens

    @property
    def end_token_ids(self) -> Collection[int]:
        """Tokens that end it."""
        return self._ends

    @property
    def num_generated(self) -> int:
        """Length of ``output_token_ids``, with a token that is being computed."""
        return len(self.output_token_ids) + self.is_ahead

    @property
    def is_complete(self) -> bool:
        """All tokens that it asks for are generated."""
        return self.num_generated >= self.params.max_new_tokens

    @property
    def text_token_ids(self) -> list[int]:
        """Output tokens without a stop token at the end."""
        ids = self.output_token_ids
        return ids[:-1] if self.finish_reason == "stop" and ids[-1] in self._ends else ids

    @property
    def has_ended(self) -> bool:
        """Finished, failed or aborted."""
        return self.finish_reason is not None

    @property
    def final_kv_length(self) -> int:
        """Tokens in the cache at the end, see :attr:`Request.final_kv_length`."""
        return self.request.final_kv_length

    def resume(self, generated: Sequence[int]) -> None:
        """Start with tokens generated elsewhere, as after a preemption."""
        self.output_token_ids.extend(generated)
        if self.text is not None:
            for token_id in generated:
                self.text.append(token_id)

    def append(self, token_id: int) -> None:
        """Append the next generated token, and finish the request if it is the last one."""
        self.output_token_ids.append(token_id)
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        if token_id in self._ends or (self.text is not None and self._completes_a_string(token_id, self.text)):
            self.status, self.finish_reason = RequestStatus.FINISHED, "stop"
        elif self.is_complete:
            self.status, self.finish_reason = RequestStatus.FINISHED, "length"

    def fail(self, error: str) -> None:
        """End the request with an error, and its output so far."""
        self.status, self.finish_reason, self.error = RequestStatus.FAILED, "failed", error

    def abort(self) -> None:
        """End the request by its caller's wish, with its output so far."""
        self.status, self.finish_reason = RequestStatus.ABORTED, "aborted"

    @staticmethod
    def _completes_a_string(token_id: int, text: OutputText) -> bool:
        text.append(token_id)
        return text.stopped


def _token_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(token_ids, str):
        raise TypeError(f"prompt_token_ids of request {name} must be token ids, got a str; tokenize the text first")
    if isinstance(token_ids, (bytes, bytearray, memoryview, Mapping, Set)):
        raise TypeError(
            f"prompt_token_ids of request {name} must be a sequence of ints, got {type(token_ids).__name__}; pass the "
            "token ids in their order, as a list"
        )
    if isinstance(token_ids, tuple) and all(type(token) is int for token in token_ids):
        ids = token_ids  # shared by the outputs of one prompt, also where they are pickled together
    else:
        try:
            ids = tuple(as_int("a token id", token) for token in token_ids)
        except TypeError as error:
            raise TypeError(f"prompt_token_ids of request {name} must be a sequence of ints: {error}") from error
    if not ids:
        raise ValueError(f"prompt_token_ids of request {name} is empty; a prompt has at least one token")
    if min(ids) < 0:
        raise ValueError(f"prompt_token_ids of request {name} contains {clip(min(ids))}; token ids are >= 0")
    return ids
