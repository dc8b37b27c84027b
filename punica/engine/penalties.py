"""Adjustments of scores by a request's parameters and tokens, before temperature and the cuts.

In the order of vLLM and transformers, for a row of scores z with counts c over prompt and output, d over the output:

    z_i += logit_bias_i;    z_i = -inf for banned i;    z_i = z_i / r or z_i r (for z_i < 0) where c_i > 0
    z_i -= frequency_penalty d_i + presence_penalty [d_i > 0]

Banned are the last tokens of bad words that the tokens so far would complete, and before ``min_tokens`` the tokens that
end the request. The host makes flat lists of places and values for all rows, and the device applies each at once.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from punica.metadata.staging import send
from punica.scheduling import SamplingParams


class AdjustedRequest(Protocol):
    """Fields of a request that adjustments read (``punica.scheduling.RequestState``)."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""

    @property
    def num_generated(self) -> int:
        """Output tokens so far."""

    @property
    def end_token_ids(self) -> Collection[int]:
        """Tokens that end it."""

    @property
    def bad_sequences(self) -> Sequence[tuple[int, ...]]:
        """Sequences of tokens that must not be completed."""


class _Places:
    """Places ``(row, token)`` of a table of scores, each with a value."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, row: int, tokens: Sequence[int] | np.ndarray, values: float | Sequence[float] | np.ndarray) -> None:
        """Append tokens of a row, with their values or one for all."""
        if len(tokens):
            self._parts.append(np.stack(np.broadcast_arrays(float(row), np.asarray(tokens, dtype=np.float64), values)))

    def sent(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rows, tokens and values on the device of the scores; ``None`` without any."""
        if not self._parts:
            return None
        rows, tokens, values = send(np.concatenate(self._parts, axis=1), torch.float64, scores.device)
        return rows.long(), tokens.long(), values.to(scores.dtype)


def adjust_scores(scores: Tensor, requests: Sequence[AdjustedRequest]) -> None:
    """Adjust ``scores [S, vocab]`` (float32) of S requests in place."""
    biases, bans, repetitions, counts = _Places(), _Places(), _Places(), _Places()
    for row, request in enumerate(requests):
        params = request.params
        if not params.adjusts:
            continue
        tokens = request.token_ids
        biases.add(row, [token for token, _ in params.logit_bias], [bias for _, bias in params.logit_bias])
        bans.add(row, _banned(request, tokens, scores.shape[-1]), 0.0)
        if params.repetition_penalty != 1.0:
            repetitions.add(row, np.unique(tokens), params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            output = tokens[len(tokens) - request.num_generated :]
            different, times = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
            counts.add(row, different, params.frequency_penalty * times + params.presence_penalty)
    if (found := biases.sent(scores)) is not None:
        rows, columns, bias = found
        scores[rows, columns] += bias
    if (found := bans.sent(scores)) is not None:
        scores.index_put_(found[:2], scores.new_full((), -torch.inf))
    if (found := repetitions.sent(scores)) is not None:
        rows, columns, penalty = found
        values = scores[rows, columns]
        scores[rows, columns] = torch.where(values < 0, values * penalty, values / penalty)
    if (found := counts.sent(scores)) is not None:
        rows, columns, penalty = found
        scores[rows, columns] -= penalty


def _banned(request: AdjustedRequest, tokens: list[int], vocab: int) -> list[int]:
    """Return the tokens that must not come next."""
    ends = request.end_token_ids if request.num_generated < request.params.min_tokens else ()
    found = {token for token in ends if token < vocab}
    for *before, last in request.bad_sequences:
        if last < vocab and len(before) <= len(tokens) and tokens[len(tokens) - len(before) :] == before:
            found.add(last)
    return sorted(found)
