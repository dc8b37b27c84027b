"""One generation request: what the user asked for, and how far it has come."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from punica.checks import check_count


class AdapterRequest(Protocol):
    """What scheduling reads of an adapter's request (``punica.adapters.LoRARequest``)."""

    @property
    def lora_int_id(self) -> int:
        """Id of the adapter, at least 1."""


class RequestStatus(Enum):
    """Waiting in the queue, running in the batch, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt to continue with one adapter.

    Args:
        request_id: non-empty name, unique within an engine.
        prompt_token_ids: at least one token id.
        max_new_tokens: tokens to generate, at least 1.
        adapter: which adapter to apply; ``None`` is the plain backbone.
        eos_token_id: generation also ends with this token, which is kept in the output. ``None`` forces the length, as
            in the paper's harness.

    While it runs, ``output_token_ids`` grows. A preempted request keeps its output: on its return the prompt *and*
    the output are computed again, and generation goes on where it stopped.

    Raises TypeError (wrong types) or ValueError (empty id or prompt, negative token, ``max_new_tokens`` < 1).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    adapter: AdapterRequest | None = None
    eos_token_id: int | None = None
    output_token_ids: list[int] = field(default_factory=list, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(self.request_id).__name__} {self.request_id!r}")
        if not self.request_id:
            raise ValueError("request_id must not be empty")
        self.prompt_token_ids = _token_ids(self.request_id, self.prompt_token_ids)
        check_count(f"max_new_tokens of request {self.request_id!r}", self.max_new_tokens)
        if self.eos_token_id is not None:
            check_count(f"eos_token_id of request {self.request_id!r}", self.eos_token_id, lowest=0)

    @property
    def adapter_id(self) -> int:
        """Id of the adapter, 0 for the plain backbone."""
        return 0 if self.adapter is None else self.adapter.lora_int_id

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
        """Tokens whose keys and values are cached at the end.

        All but the last generated one, which nothing attends to.
        """
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    def append(self, token_id: int) -> None:
        """Take the next generated token; the request is finished when it was the last one."""
        self.output_token_ids.append(token_id)
        if len(self.output_token_ids) == self.max_new_tokens or token_id == self.eos_token_id:
            self.status = RequestStatus.FINISHED


def _token_ids(request_id: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(token_ids, str):
        raise TypeError(
            f"prompt_token_ids of request {request_id!r} must be token ids, got a str; tokenize the text first"
        )
    try:
        ids = tuple(operator.index(token) for token in token_ids)
    except TypeError as error:
        raise TypeError(f"prompt_token_ids of request {request_id!r} must be a sequence of ints: {error}") from error
    if not ids:
        raise ValueError(f"prompt_token_ids of request {request_id!r} is empty; a prompt has at least one token")
    if min(ids) < 0:
        raise ValueError(f"prompt_token_ids of request {request_id!r} contains {min(ids)}; token ids are >= 0")
    return ids
