"""Generation requests, and their state in an engine."""

import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from punica.checks import MOST_MIXED, as_int, check_number, clip
from punica.scheduling.sampling_params import SamplingParams, as_sampling_params

FinishReason = Literal["stop", "length", "aborted", "failed"]
_MOST_WEIGHT = 3e38


class RequestStatus(Enum):
    """Status of a request: in the queue, in the batch, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class Mixture(NamedTuple):
    """Several adapters of one request, each with a weight: ``sum_i w_i s_i B_i A_i x``, terms in this order."""

    adapters: tuple[Any, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, name: str, given: "Mapping[Any, float] | Mixture") -> "Mixture":
        """TypeError, ValueError: none, more than `MOST_MIXED`, or a weight that is no finite float32."""
        adapters, weights = given if isinstance(given, Mixture) else (tuple(given), tuple(given.values()))
        if not 1 <= len(adapters) == len(weights) <= MOST_MIXED:
            counts = f"{len(adapters)} adapters by {len(weights)} weights"
            raise ValueError(f"{name} mixes {counts}; give 1 to {MOST_MIXED}, each with its weight")
        named = zip((clip(getattr(one, "lora_name", one)) for one in adapters), weights, strict=True)  # no folders
        weights = tuple(check_number(f"the weight of {one} in {name}", weight) for one, weight in named)
        if max(map(abs, weights)) > _MOST_WEIGHT:
            raise ValueError(f"{name} has weights {weights}; they must be at most {_MOST_WEIGHT}, as they are float32")
        return cls(tuple(adapters), weights)

    @property
    def lora_name(self) -> str:
        return " + ".join(f"{weight:g} {one.lora_name}" for one, weight in zip(*self, strict=True))


def adapters_of(adapter: Any) -> tuple[Any, ...]:
    """Return the adapters of a request: none, one, or those of its mixture."""
    return adapter.adapters if isinstance(adapter, Mixture) else () if adapter is None else (adapter,)


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue with one adapter; immutable, so that several engines can share it.

    Args:
        request_id: non-empty name, unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id; kept as a tuple of ints.
        params: choice of tokens and end of generation; an integer is greedy decoding of so many tokens.
        adapter: adapter to apply, a :class:`punica.adapters.LoRARequest`; ``{adapter: weight}`` a `Mixture`; ``None``
            is the plain backbone.
        cache_salt: requests share cached prefixes only with those of an equal salt, e.g. one per tenant.

    Raises TypeError (wrong types) or ValueError (empty id or prompt, negative token, fewer than one new token).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams | int
    adapter: Any = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(self.request_id).__name__} {clip(self.request_id)}")
        if not self.request_id:
            raise ValueError("request_id must not be empty")
        name = clip(self.request_id)
        if not isinstance(self.cache_salt, str):
            raise TypeError(f"cache_salt of request {name} must be a str, got {type(self.cache_salt).__name__}")
        object.__setattr__(self, "prompt_token_ids", _token_ids(name, self.prompt_token_ids))
        object.__setattr__(self, "params", as_sampling_params(self.params))
        if isinstance(self.adapter, (Mapping, Mixture)):
            object.__setattr__(self, "adapter", Mixture.of(f"adapter of request {name}", self.adapter))
        if isinstance(self.adapter, Mixture) and self.adapter.weights == (1,):
            object.__setattr__(self, "adapter", self.adapter.adapters[0])

    @property
    def max_new_tokens(self) -> int:
        return as_sampling_params(self.params).max_new_tokens

    @property
    def adapter_id(self) -> int:
        return 0 if self.adapter is None or isinstance(self.adapter, Mixture) else int(self.adapter.lora_int_id)

    @property
    def final_kv_length(self) -> int:
        """Tokens in the cache at the end: all but the last generated one, which nothing attends to."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1


class RequestState:
    """State of a request in one engine. Preempted, it keeps its output, which is recomputed later with the prompt.

    Args:
        seed: seed of its draws.
        eos_token_ids: the model's end tokens, which end it unless its parameters ignore them.
        text: text of its output (``punica.engine.text.GrowingText``), if it has stop strings.
        bad_sequences: tokens of its bad words.

    Attributes:
        request_id, prompt_token_ids, adapter, adapter_id, final_kv_length, params: of the request.
        is_ahead: its next token is being computed, and counts as generated already; false between two steps.
        logprobs: one entry per output token, if the request asks for them.
        status: WAITING, RUNNING, FINISHED, FAILED with the reason in ``error``, or ABORTED.
        finish_reason: reason of the end, ``None`` before.
        preemptions: number of preemptions for want of blocks or slots.
        overtaken: number of later requests that joined while it waited.
        computed: number of its tokens that its prefill has computed, launched steps included; 0 while it waits.
        is_cached: the blocks hold all its tokens but the last: one was appended since it joined.
        hit: the first of these, which it took from the prefix cache.
        activation: the first token computed with its adapter; ``None``: none is.
        may_draft: false once a step with its drafts held NaN, which may have been of a draft.
        lookup_text: its tokens as characters, as far as they were needed for drafts.
        prefix_key: identity of its keys and values beside its tokens, see :class:`punica.scheduling.PrefixKey`.
        weights: the version of its adapter (``punica.adapters.LoadedAdapter``) that it started with, and keeps;
            ``None`` before it has joined.
        reloads: it waits to load a new version of its adapter.
        mixed: one state for each adapter of its mixture, to hold the weights; empty without.
        arrival_s, first_token_s, last_token_s: seconds on the clock of ``time.perf_counter``.
    """

    def __init__(
        self, request: Request, seed: int = 0, eos_token_ids: Collection[int] = (), text: Any = None,
        bad_sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:  # fmt: skip
        self.request, self.seed, self.text, self.bad_sequences = request, seed, text, bad_sequences
        self.request_id, self.prompt_token_ids = request.request_id, request.prompt_token_ids
        self.adapter, self.adapter_id = request.adapter, request.adapter_id
        self.final_kv_length = request.final_kv_length
        self.params = params = as_sampling_params(request.params)
        self.end_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.output_token_ids: list[int] = []
        self.is_ahead = self.reloads = self.is_cached = False
        self.logprobs: list[dict[int, float]] = []
        self._num_whole = self._num_resumed = 0  # tokens that came without an error, those of `resume` included
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.preemptions = self.overtaken = 0
        self.computed = self.hit = self.num_read = 0
        self.activation: int | None = 0
        self.prefix_key: Any = None
        self.may_draft, self.lookup_text = True, ""
        self.weights: Any = None
        self.mixed: tuple[RequestState, ...] = ()
        if isinstance(self.adapter, Mixture):
            parts = [replace(request, request_id=f"{self.request_id}\0{i}", adapter=one)
                     for i, one in enumerate(self.adapter.adapters)]  # fmt: skip
            self.mixed = tuple(RequestState(part) for part in parts)
        self.arrival_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def weights_key(self) -> Hashable:
        """Identity of the adapter weights it needs, by which requests share slots; 0: none; a tuple: a mixture's."""
        if self.mixed:
            return tuple(part.weights_key for part in self.mixed)
        if self.weights is None:
            return self if self.reloads else self.adapter_id
        key: Hashable = self.weights.key
        return key

    @property
    def parts(self) -> "tuple[RequestState, ...]":
        """The states that hold weights: those of its mixture, else itself."""
        return self.mixed or (self,)

    @property
    def adapter_ids(self) -> set[int]:
        return {part.adapter_id for part in self.parts}

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    def token_at(self, position: int) -> int:
        """Return ``token_ids[position]`` without building the list; 0 for a token that is being computed."""
        behind = position - len(self.prompt_token_ids)
        if behind < 0:
            return self.prompt_token_ids[position]
        return self.output_token_ids[behind] if behind < len(self.output_token_ids) else 0

    def tokens_between(self, first: int, end: int) -> tuple[int, ...]:
        """Return ``token_ids[first:end]``."""
        behind = len(self.prompt_token_ids)
        if end <= behind:
            return tuple(self.prompt_token_ids[first:end])
        output = self.output_token_ids[max(0, first - behind) : max(0, end - behind)]
        return (*self.prompt_token_ids[first:end], *output)

    @property
    def num_tokens(self) -> int:
        """Length of ``token_ids``, with a token that is being computed."""
        return len(self.prompt_token_ids) + self.num_generated

    @property
    def num_generated(self) -> int:
        """Length of ``output_token_ids``, with a token that is being computed."""
        return len(self.output_token_ids) + self.is_ahead

    @property
    def is_complete(self) -> bool:
        return self.num_generated >= self.params.max_new_tokens

    @property
    def text_token_ids(self) -> list[int]:
        """Output tokens without a stop token at the end."""
        ids = self.output_token_ids
        return ids[:-1] if self.finish_reason == "stop" and ids[-1] in self.end_token_ids else ids

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    def resume(self, generated: Sequence[int]) -> None:
        """Start with tokens generated elsewhere, as after a preemption."""
        self.output_token_ids.extend(generated)
        self._num_whole = self._num_resumed = len(generated)
        self.restore()

    def append(self, token_id: int, logprobs: dict[int, float] | None = None) -> None:
        """Append the next generated token, and finish the request if it is the last one."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.output_token_ids.append(token_id)
        self.last_token_s = time.perf_counter()
        self.first_token_s = self.first_token_s or self.last_token_s
        ends = token_id in self.end_token_ids
        if not ends and self.text is not None:
            self.text.append(token_id)
            ends = self.text.stopped
        if ends or self.is_complete:
            self.status, self.finish_reason = RequestStatus.FINISHED, "stop" if ends else "length"
        self._num_whole += 1
        self.is_cached = True

    def accept(self, further: Iterable[tuple[int, dict[int, float] | None]], earlier: list[int]) -> None:
        """Append the tokens after the one that was appended last, with their log-probabilities, until it ends.

        ``earlier`` gets the tokens before each of these.
        """
        for token_id, logprobs in further:
            if self.has_ended:
                break
            earlier.append(self.output_token_ids[-1])
            self.append(token_id, logprobs)

    def restore(self) -> None:
        """Take back a token that was being computed or appended when an error ended a step; it comes again."""
        self.is_ahead = False
        if not self.has_ended:
            del self.output_token_ids[self._num_whole :], self.logprobs[self._num_whole - self._num_resumed :]
        if self.text is not None and self.error is None:
            self.text.begin()
            self.text.take(self.text_token_ids, is_last=False)

    def fail(self, error: str) -> None:
        self.status, self.finish_reason, self.error = RequestStatus.FAILED, "failed", error

    def abort(self) -> None:
        self.status, self.finish_reason = RequestStatus.ABORTED, "aborted"


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
