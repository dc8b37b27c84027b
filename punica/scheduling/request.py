"""One generation request: what the user asked for, and how far it has come."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from punica.checks import check_count, clip


class AdapterRequest(Protocol):
    """What scheduling reads of an adapter's request (``punica.adapters.LoRARequest``)."""

    @property
    def lora_int_id(self) -> int:
        """Id of the adapter, at least 1."""


class RequestStatus(Enum):
    """Waiting in the queue, running in the batch, finished, or taken out with an error."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue with one adapter; immutable, so that any number of engines can be given it.

    Args:
        request_id: non-empty name, unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id; kept as a tuple of ints.
        max_new_tokens: tokens to generate, at least 1.
        adapter: which adapter to apply; ``None`` is the plain backbone.
        eos_token_id: generation also ends with this token, which is kept in the output. ``None`` forces the length, as
            in the paper's harness.

    Raises TypeError (wrong types) or ValueError (empty id or prompt, negative token, ``max_new_tokens`` < 1).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    adapter: AdapterRequest | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(self.request_id).__name__} {clip(self.request_id)}")
        if not self.request_id:
            raise ValueError("request_id must not be empty")
        name = clip(self.request_id)
        object.__setattr__(self, "prompt_token_ids", _token_ids(name, self.prompt_token_ids))
        check_count(f"max_new_tokens of request {name}", self.max_new_tokens)
        if self.eos_token_id is not None:
            check_count(f"eos_token_id of request {name}", self.eos_token_id, lowest=0)

    @property
    def adapter_id(self) -> int:
        """Id of the adapter, 0 for the plain backbone."""
        return 0 if self.adapter is None else self.adapter.lora_int_id

    @property
    def final_kv_length(self) -> int:
        """Tokens whose keys and values are cached at the end.

        All but the last generated one, which nothing attends to.
        """
        return len(self.prompt_token_ids) + self.max_new_tokens - 1


@dataclass(eq=False)
class RequestState:
    """A request in one engine: its output so far, and what the engine notes about it.

    A preempted request keeps its output: on its return the prompt *and* the output are computed again, and generation
    goes on where it stopped.

    Attributes:
        request: what was asked for.
        output_token_ids: grows while the request runs.
        status: WAITING, RUNNING, FINISHED, or FAILED with the reason in ``error``.
        preemptions: how often it was sent back to the queue for want of blocks or slots.
        weights_id: which adapter weights it needs; two requests share a slot if theirs are equal. That of the adapter,
            unless a new version of it was or is to be loaded: see ``punica.engine.residency``.
        has_weights: it has joined, and keeps the version of its adapter that it began with.
    """

    request: Request
    output_token_ids: list[int] = field(default_factory=list, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    error: str | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    weights_id: int = field(init=False)
    has_weights: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.weights_id = self.request.adapter_id

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.request.prompt_token_ids

    @property
    def adapter(self) -> AdapterRequest | None:
        """The adapter that was asked for."""
        return self.request.adapter

    @property
    def adapter_id(self) -> int:
        """Id of the adapter, 0 for the plain backbone."""
        return self.request.adapter_id

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_tokens(self) -> int:
        """Length of ``token_ids``."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def final_kv_length(self) -> int:
        """As :attr:`Request.final_kv_length`."""
        return self.request.final_kv_length

    def append(self, token_id: int) -> None:
        """Take the next generated token; the request is finished when it was the last one."""
        self.output_token_ids.append(token_id)
        if len(self.output_token_ids) == self.request.max_new_tokens or token_id == self.request.eos_token_id:
            self.status = RequestStatus.FINISHED

    def fail(self, error: str) -> None:
        """It ends here, with the output so far."""
        self.status, self.error = RequestStatus.FAILED, error


def _token_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(token_ids, str):
        raise TypeError(f"prompt_token_ids of request {name} must be token ids, got a str; tokenize the text first")
    if isinstance(token_ids, (bytes, bytearray, memoryview, Mapping, Set)):
        raise TypeError(
            f"prompt_token_ids of request {name} must be a sequence of ints, got {type(token_ids).__name__}; pass the "
            "token ids in their order, as a list"
        )
    try:
        ids = tuple(_token_id(token) for token in token_ids)
    except TypeError as error:
        raise TypeError(f"prompt_token_ids of request {name} must be a sequence of ints: {error}") from error
    if not ids:
        raise ValueError(f"prompt_token_ids of request {name} is empty; a prompt has at least one token")
    if min(ids) < 0:
        raise ValueError(f"prompt_token_ids of request {name} contains {clip(min(ids))}; token ids are >= 0")
    return ids


def _token_id(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError(f"{token} is a bool, not a token id")
    return operator.index(token)  # type: ignore[arg-type]  # TypeError for what is no integer
