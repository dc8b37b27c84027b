"""From logits to tokens: greedy rows by ``argmax``, the others by one draw each.

For a row with scores z, temperature t and a uniform number u in [0, 1):

    w_i = floor(2**40 exp((z_i - max z) / t)),  set to 0 outside of top-k, top-p, min-p;   token = first i with
    w_0 + ... + w_i > floor(u * sum w)

Sums of integers are the same in any order, and ``u`` is a function of the request's seed and of how many tokens it has
generated (Philox, a counter-based generator). So a row's token depends on its logits, its parameters and its seed: not
on its batch, not on preemption, not on the tensor-parallel rank. Tokens less probable than 2**-40 of the most probable
one are never drawn.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from punica.scheduling import SamplingParams

_ONE = 2.0**40


class SampledRequest(Protocol):
    """What sampling reads of a request (``punica.scheduling.RequestState``)."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""

    @property
    def seed(self) -> int:
        """Of its draws, 0 to 2**64 - 1."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far, which a repetition penalty is about."""

    @property
    def num_generated(self) -> int:
        """Output tokens so far: the number of its next draw."""


def choose_tokens(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """Next token of each of the S requests, int64 ``[S]``, from ``logits [S, vocab]``.

    Of equal maxima the lowest id. When all requests are greedy this is ``argmax`` alone.
    """
    tokens = logits.argmax(dim=-1)
    rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _sample(logits.index_select(0, index).float(), [requests[row] for row in rows])
    return tokens


def token_logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[SampledRequest]) -> dict[int, dict[int, float]]:
    """Log-probabilities ``{row: {token id: logprob}}`` of the rows whose requests ask for them.

    The chosen token (``tokens [S]``) first, then the most probable ones in falling order.
    """
    found = {}
    for row, request in enumerate(requests):
        count = request.params.logprobs
        if count is not None:
            logprobs = torch.log_softmax(logits[row].float(), dim=-1)
            best = logprobs.topk(min(count, len(logprobs)))
            ids = torch.cat((tokens[row : row + 1], best.indices))
            found[row] = dict(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return found


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for token ``position`` of a request with ``seed``: 53 bits of Philox(key, counter)."""
    return (int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def derived_seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th request of an engine with ``seed``, for a request that names none."""
    return int(np.random.Philox(key=seed, counter=number).random_raw())


def draw(
    scores: Tensor, temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float],
    uniforms: Sequence[float],
) -> Tensor:  # fmt: skip
    """One token id per row of ``scores [S, vocab]`` (float32), int64 ``[S]``.

    The lists have an entry per row; ``top_k`` is at least 1, ``vocab`` or more keeps all.
    """
    vocab = scores.shape[-1]
    table = torch.tensor([temperature, top_k, top_p, min_p, uniforms], dtype=torch.float64, device=scores.device)
    temperatures, most, mass, least, u = table.unsqueeze(-1)  # each [S, 1]
    scaled = (scores - scores.amax(dim=-1, keepdim=True)).double().div_(temperatures)
    weights = scaled.nan_to_num_(nan=0.0).exp_().mul_(_ONE).long()  # inf - inf: such a score is the highest
    cut = [row for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k < vocab or p < 1.0]
    if cut:
        index = torch.tensor(cut, device=scores.device)
        weights[index] = _most_probable(scores[index], weights[index], most[index], mass[index])
    weights.masked_fill_(weights < least * _ONE, 0)  # the highest weight is 2**40
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    target = torch.minimum((u * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True).squeeze(-1).clamp_(max=vocab - 1)


def _most_probable(scores: Tensor, weights: Tensor, most: Tensor, mass: Tensor) -> Tensor:
    """``weights [S, vocab]`` with those outside of top-k (``most [S, 1]``) and top-p (``mass [S, 1]``) set to 0."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    falling = weights.gather(-1, order)
    falling.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) >= most, 0)
    sums = falling.cumsum(dim=-1)
    falling.masked_fill_((sums - falling) >= mass * sums[:, -1:], 0)  # what comes before is enough
    return torch.zeros_like(weights).scatter_(-1, order, falling)


def _sample(scores: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    params = [request.params for request in requests]
    for row, request in enumerate(requests):
        penalty = request.params.repetition_penalty
        if penalty != 1.0:
            seen = torch.tensor(sorted(set(request.token_ids)), device=scores.device)
            values = scores[row, seen]
            scores[row, seen] = torch.where(values < 0, values * penalty, values / penalty)
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
