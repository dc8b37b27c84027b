"""Requests of one HTTP call, and pieces of their answers: what the API and an engine exchange."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from punica.engine import GenerationResult, Request
from punica.serve.errors import ApiError

_NUMBERS = itertools.count()


class Outcome(NamedTuple):
    """A result without its prompt and tokens, which the call and its pieces have."""

    text: str | None
    finish_reason: str
    error: str | None
    num_prompt: int
    num_generated: int
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None

    @classmethod
    def of(cls, result: GenerationResult) -> "Outcome":
        """Keep what the server tells of a result."""
        return cls(
            result.text, result.finish_reason, result.error, len(result.prompt_token_ids), len(result.token_ids),
            result.arrival_s, result.first_token_s, result.last_token_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of request ``index`` of a call, the first ``num_text`` of them with text; the last has the result, or
    an error instead where the engine itself failed.
    """

    index: int
    token_ids: list[int]
    num_text: int
    logprobs: list[dict[int, float]]
    result: Outcome | None = None
    error: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call, in a third of the time of a dataclass's own way: there is a piece per token."""
        return Piece, (self.index, self.token_ids, self.num_text, self.logprobs, self.result, self.error)


@dataclass(eq=False)
class Call:
    """Requests of one HTTP call, and their pieces as they arrive on the event loop.

    ``streams``: pieces with every step; otherwise one piece per request, when it ends. ``number``: its own.
    """

    requests: Sequence[Request]
    streams: bool
    number: int = field(default_factory=_NUMBERS.__next__)
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.requests)
        self._pieces: list[Piece] = []
        self._arrived = asyncio.Event()
        self._error: ApiError | None = None

    def put(self, piece: Piece) -> None:
        """Append a piece; on the event loop."""
        self.num_unfinished -= piece.result is not None
        self._pieces.append(piece)
        self._arrived.set()

    def end(self, error: ApiError) -> None:
        """Have :meth:`batches` raise an error instead of waiting for further pieces; on the event loop."""
        self._error = error
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Yield all pieces that have arrived, until every request has ended. ApiError 500: the engine failed; the one
        of :meth:`end`.
        """
        while self.num_unfinished or self._pieces:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._pieces = self._pieces, []
            for piece in batch:
                if piece.error is not None:
                    raise ApiError(500, piece.error, code="engine_failed")
            yield batch
            if self._error is not None and self.num_unfinished:
                raise self._error
