"""Sampling: tokens from logits, by ``argmax`` for greedy rows and one draw each for the others.

For a row with scores z (adjusted by `penalties.py`), temperature t and a uniform number u in [0, 1):

    w_i = floor(2**40 exp((z_i - max z) / t)),  set to 0 outside of top-k, top-p, min-p;   token = first i with
    w_0 + ... + w_i > floor(u * sum w)

Sums of integers do not depend on their order. ``u`` is a function of the request's seed and its number of generated
tokens (Philox, a counter-based generator). So a row's token depends on its logits, parameters and seed alone:
not on its batch, preemption or tensor-parallel rank. Tokens less probable than 2**-40 of the most probable one are
never drawn.

A row that holds NaN gets ``NO_TOKEN``, and the engine fails its request.

The host never waits here: operands are sent asynchronously, and results are read after the whole step is launched.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from punica.engine.penalties import AdjustedRequest, adjust_scores
from punica.metadata.staging import send
from punica.ops.backbone import argmax
from punica.scheduling.sampling_params import MOST_LOGPROBS

NO_TOKEN = -1
"""Placeholder for the token of a row whose logits hold NaN."""
_ONE = 2.0**40


class SampledRequest(AdjustedRequest, Protocol):
    """Fields of a request that sampling reads (``punica.scheduling.RequestState``).

    ``num_generated`` is also the number of its next draw.
    """

    @property
    def seed(self) -> int:
        """Seed of its draws, 0 to 2**64 - 1."""


class PendingLogprobs(NamedTuple):
    """Log-probabilities: ``table`` is float64 ``[rows, 2, n]``, the ids and their log-probabilities."""

    counts: dict[int, int]
    table: "Tensor | PendingCopy | None"

    def copied(self) -> "PendingLogprobs":
        """Begin the copy to the host, so that reading waits for no later step."""
        return self._replace(table=PendingCopy(self.table)) if isinstance(self.table, Tensor) else self

    def read(self) -> dict[int, dict[int, float]]:
        """Return ``{row: {token id: logprob}}``: the chosen token, then the most probable ones in falling order.

        The host waits for the device.
        """
        tables = [] if self.table is None else self.table.tolist()
        found = {}
        for (row, count), (ids, values) in zip(self.counts.items(), tables, strict=True):
            found[row] = dict(zip(map(int, ids[: 1 + count]), values[: 1 + count], strict=True))
        return found


class PendingCopy:
    """Asynchronous copy of results to the host, so that the next step may overwrite them before the host reads."""

    def __init__(self, values: Tensor) -> None:
        self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        self._copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def tolist(self) -> list[Any]:
        """Return the values as nested lists; the host waits for the device, but for no later step."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[Any] = self._values.tolist()
        return found


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the argmax of each row of ``logits [S, vocab]``, ties to the lowest id; int64 ``[S]``.

    ``NO_TOKEN`` for a row that holds NaN.
    """
    return argmax(logits, NO_TOKEN)


def choose_tokens(logits: Tensor, requests: Sequence[SampledRequest], best: Tensor | None = None) -> Tensor:
    """Return the next token of each of the S requests, int64 ``[S]``, from ``logits [S, vocab]``.

    ``best [S]``: their :func:`greedy_tokens`, if known; the result itself if all are greedy. ``NO_TOKEN`` for NaN.
    """
    best = greedy_tokens(logits) if best is None else best
    rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if not rows:
        return best
    index = send(rows, torch.int64, logits.device)
    drawn = _sample(logits.index_select(0, index).float(), [requests[row] for row in rows])
    tokens = best.clone()
    tokens[index] = drawn.masked_fill_(best[index] < 0, NO_TOKEN)
    return tokens


def token_logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[SampledRequest]) -> PendingLogprobs:
    """Compute log-probabilities of the chosen ``tokens [S]`` and the most probable ones, for rows that ask for them."""
    counts = {row: one.params.logprobs for row, one in enumerate(requests) if one.params.logprobs is not None}
    if not counts:
        return PendingLogprobs({}, None)
    index = send(list(counts), torch.int64, logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, index).float(), dim=-1)
    # the same number for all rows: which of equal tokens are listed must not depend on other requests
    best = logprobs.topk(min(MOST_LOGPROBS, logprobs.shape[-1]))
    chosen = tokens.index_select(0, index).clamp_(min=0).unsqueeze(-1)
    ids = torch.cat((chosen, best.indices), dim=-1)
    values = torch.cat((logprobs.gather(-1, chosen), best.values), dim=-1)
    return PendingLogprobs(counts, torch.stack((ids.double(), values.double()), dim=1))


def uniform(seed: int, position: int) -> float:
    """Draw a number in [0, 1) for token ``position`` of a request with ``seed``: 53 bits of Philox(key, counter)."""
    return (int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def derived_seed(seed: int, number: int) -> int:
    """Derive a seed for the ``number``-th request of an engine with ``seed``."""
    return int(np.random.Philox(key=seed, counter=number).random_raw())


def draw(
    scores: Tensor, temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float],
    uniforms: Sequence[float],
) -> Tensor:  # fmt: skip
    """Draw one token id per row of ``scores [S, vocab]`` (float32), int64 ``[S]``.

    The lists have an entry per row; ``top_k`` is at least 1, ``vocab`` or more keeps all.
    """
    vocab = scores.shape[-1]
    table = send([temperature, top_k, top_p, min_p, uniforms], torch.float64, scores.device)
    temperatures, most, mass, least, u = table.unsqueeze(-1)  # each [S, 1]
    scaled = (scores - scores.amax(dim=-1, keepdim=True)).double().div_(temperatures)
    weights = scaled.nan_to_num_(nan=0.0).exp_().mul_(_ONE).long()  # inf - inf: the highest score
    cut = [row for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k < vocab or p < 1.0]
    if cut:
        index = send(cut, torch.int64, scores.device)
        weights[index] = _most_probable(scores[index], weights[index], most[index], mass[index])
    weights.masked_fill_(weights < least * _ONE, 0)  # the highest weight is 2**40
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    target = torch.minimum((u * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True).squeeze(-1).clamp_(max=vocab - 1)


def _most_probable(scores: Tensor, weights: Tensor, most: Tensor, mass: Tensor) -> Tensor:
    """Zero the ``weights [S, vocab]`` outside of top-k (``most [S, 1]``) and top-p (``mass [S, 1]``)."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    falling = weights.gather(-1, order)
    falling.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) >= most, 0)
    sums = falling.cumsum(dim=-1)
    falling.masked_fill_((sums - falling) >= mass * sums[:, -1:], 0)  # the mass before it is enough
    return torch.zeros_like(weights).scatter_(-1, order, falling)


def _sample(scores: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    params = [request.params for request in requests]
    adjust_scores(scores, requests)
    vocab = scores.shape[-1]
    greedy = [one.temperature == 0.0 for one in params]
    return draw(
        scores,
        [one.temperature or 1.0 for one in params],
        [1 if first else one.top_k or vocab for one, first in zip(params, greedy, strict=True)],
        [one.top_p for one in params],
        [one.min_p for one in params],
        [uniform(request.seed, request.num_generated) for request in requests],
    )
