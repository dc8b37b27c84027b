"""Sampling: tokens from logits, by ``argmax`` for greedy rows and one draw each for the others.

First a request's parameters and tokens adjust its scores z, in the order of vLLM and transformers, with counts c over
prompt and output, d over the output (`adjust_scores`):

    z_i += logit_bias_i;    z_i = -inf for banned i;    z_i = z_i / r or z_i r (for z_i < 0) where c_i > 0
    z_i -= frequency_penalty d_i + presence_penalty [d_i > 0]

Banned are the last tokens of bad words that the tokens so far would complete, and before ``min_tokens`` the tokens that
end the request. Then, with temperature t and a uniform number u in [0, 1):

    w_i = floor(2**40 exp((z_i - max z) / t)),  set to 0 outside of top-k, top-p, min-p;   token = first i with
    w_0 + ... + w_i > floor(u * sum w)

Sums of integers do not depend on their order. ``u`` is a function of the request's seed and its number of generated
tokens (Philox, a counter-based generator). So a row's token depends on its logits, parameters and seed alone: not on
its batch, preemption or tensor-parallel rank. Tokens less probable than 2**-40 of the most probable one are never
drawn. A row that holds NaN gets ``NO_TOKEN``, and the engine fails its request.

The host never waits here: operands are sent asynchronously, and results are read after the whole step is launched.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from punica.checks import clip
from punica.metadata.staging import send
from punica.ops.backbone import argmax
from punica.scheduling import RequestState
from punica.scheduling.sampling_params import MOST_LOGPROBS

NO_TOKEN = -1
"""Placeholder for the token of a row whose logits hold NaN."""
_ONE = 2.0**40


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


class PendingLogprobs(NamedTuple):
    """Log-probabilities: ``table`` is float64 ``[rows, 2, n]``, the ids and their log-probabilities."""

    counts: dict[int, int]
    table: Tensor | PendingCopy

    def copied(self) -> "PendingLogprobs":
        """Begin the copy to the host, so that reading waits for no later step."""
        return self._replace(table=PendingCopy(self.table)) if isinstance(self.table, Tensor) else self

    def read(self) -> dict[int, dict[int, float]]:
        """Return ``{row: {token id: logprob}}``: the chosen token, then the most probable ones in falling order."""
        found = {}
        for (row, count), (ids, values) in zip(self.counts.items(), self.table.tolist(), strict=True):
            found[row] = dict(zip(map(int, ids[: 1 + count]), values[: 1 + count], strict=True))
        return found


def choose_tokens(logits: Tensor, requests: Sequence[RequestState], best: Tensor | None = None) -> Tensor:
    """Return the next token of each of the S requests, int64 ``[S]``, from ``logits [S, vocab]``.

    ``best [S]``: the argmax of each row, if known; the result itself if all are greedy. ``NO_TOKEN`` for NaN.
    """
    best = argmax(logits, NO_TOKEN) if best is None else best
    rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if not rows:
        return best
    index = send(rows, torch.int64, logits.device)
    scores, drawing, vocab = logits.index_select(0, index).float(), [requests[row] for row in rows], logits.shape[-1]
    adjust_scores(scores, drawing)
    params = [request.params for request in drawing]
    drawn = draw(
        scores, [one.temperature or 1.0 for one in params],
        [1 if one.temperature == 0.0 else one.top_k or vocab for one in params],
        [one.top_p for one in params], [one.min_p for one in params],
        [uniform(request.seed, request.num_generated) for request in drawing],
    )  # fmt: skip
    tokens = best.clone()
    tokens[index] = drawn.masked_fill_(best[index] < 0, NO_TOKEN)
    return tokens


def token_logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[RequestState]) -> PendingLogprobs | None:
    """Compute log-probabilities of the chosen ``tokens [S]`` and the most probable ones, if any row asks for them."""
    counts = {row: one.params.logprobs for row, one in enumerate(requests) if one.params.logprobs is not None}
    if not counts:
        return None
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
    return (derived_seed(seed, position) >> 11) * 2.0**-53


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


class _Places:
    """Places ``(row, token)`` of a table of scores, each with a value."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, row: int, tokens: Sequence[int] | np.ndarray, values: float | Sequence[float] | np.ndarray) -> None:
        if len(tokens):
            self._parts.append(np.stack(np.broadcast_arrays(float(row), np.asarray(tokens, dtype=np.float64), values)))

    def sent(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self._parts:
            return None
        rows, tokens, values = send(np.concatenate(self._parts, axis=1), torch.float64, scores.device)
        return rows.long(), tokens.long(), values.to(scores.dtype)


def adjust_scores(scores: Tensor, requests: Sequence[RequestState]) -> None:
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


def _banned(request: RequestState, tokens: list[int], vocab: int) -> list[int]:
    ends = request.end_token_ids if request.num_generated < request.params.min_tokens else ()
    found = {token for token in ends if token < vocab}
    for *before, last in request.bad_sequences:
        if last < vocab and len(before) <= len(tokens) and tokens[len(tokens) - len(before) :] == before:
            found.add(last)
    return sorted(found)


def no_token_error(state: RequestState) -> str:
    adapter = state.adapter
    if adapter is None:
        cause = "it runs without an adapter: look for NaN in the model's weights, or serve them in a wider dtype"
    else:
        name, ids = clip(getattr(adapter, "lora_name", None)), ", ".join(map(str, sorted(state.adapter_ids)))
        cause = (
            f"the likely cause is its adapter {name} (id {ids}), whose weights or scaling take products "
            "out of the range of the model's dtype; train it with smaller ones, or serve it in a wider dtype"
        )
    return f"ValueError: the logits of request {clip(state.request_id)} hold NaN at token {state.num_tokens}: {cause}"
