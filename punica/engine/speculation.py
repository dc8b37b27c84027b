"""Verification of drafts: several tokens of a request in one step, the same as plain decoding would give.

    rows:    last token   d1   d2   d3       one segment, by the attention of chunked prompts
    argmax:  t0           t1   t2   t3
    d1 = t0, d2 != t1:    t0 and t1 are generated; d2 and d3 are rejected

A row's argmax is the next token if all drafts before it are right (greedy rejection of Leviathan et al., 2023, at
temperature 0). Rejected drafts leave keys and values in the cache behind the request's last token: later steps write
there before they read.

Drafts are only given to requests whose token is the argmax of their logits: penalties, biases and draws depend on the
tokens before. A step with drafts computes all its rows as those of prompts, and the next one waits for its tokens.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from punica.engine.sampler import NO_TOKEN
from punica.scheduling import RequestState, StepLayout

Logprobs = dict[int, float]


class StepTokens(NamedTuple):
    """Next token of each of the S requests, and ``{index: {token id: logprob}}`` of those that ask for it.

    ``further``: of a request with right drafts its tokens after that one, each with its log-probabilities.
    ``counts``: of drafts and right ones, by field of ``StepStatistics``.
    """

    token_ids: list[int]
    logprobs: dict[int, Logprobs]
    further: Mapping[RequestState, list[tuple[int, Logprobs | None]]] = MappingProxyType({})
    counts: Mapping[str, int] = MappingProxyType({})


def verified(layout: StepLayout, best: Sequence[int], logprobs: dict[int, Logprobs]) -> StepTokens:
    """Return the tokens of a step with drafts, whose sampled rows have the tokens ``best`` and ``{row: logprobs}``.

    They end before a row that holds NaN: it is computed again, as the first one of a later step.
    """
    chosen: dict[int, Logprobs] = {}
    accepted: dict[RequestState, list[tuple[int, Logprobs | None]]] = {}
    first: list[int] = []
    at = drafted = 0
    for place, request in enumerate(layout.requests):
        drafts = layout.drafts.get(request, ())
        first.append(best[at])
        if at in logprobs:
            chosen[place] = logprobs[at]
        further = []
        for row, draft in enumerate(drafts, at):
            if best[row] != draft or best[row + 1] == NO_TOKEN:
                break
            further.append((best[row + 1], logprobs.get(row + 1)))
        if further:
            accepted[request] = further
        at, drafted = at + 1 + len(drafts), drafted + len(drafts)
    counts = {"num_drafted_tokens": drafted, "num_accepted_tokens": sum(map(len, accepted.values()))}
    return StepTokens(first, chosen, accepted, counts)
