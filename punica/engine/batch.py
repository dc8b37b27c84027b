"""Laying out a step: from the scheduled requests to the rows of one model invocation. Pure Python lists, no torch.

    rows:   prompt of the newly admitted request | one row per decoding request, sorted by adapter slot
            p0 p1 p2 p3 ...                      | d d d d d ...

Sorting makes the rows of one adapter neighbours, so that SGMV sees one segment per adapter, with ascending slots. The
layout and the segment indices derived from it are built once per invocation and used by every LoRA layer of the model
(7 L of them).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from punica.engine.pages import PagePool
from punica.engine.request import Request
from punica.engine.scheduler import StepPlan

AdapterIndexRule = Literal["per_request", "last_admitted"]
ADAPTER_INDEX_RULES: tuple[str, ...] = get_args(AdapterIndexRule)


@dataclass(frozen=True)
class Span:
    """Rows ``[start, start + length)`` of a step belong to one request, whose cache then holds ``kv_length`` tokens
    in ``pages``.

    A span is either a whole prompt (``length == kv_length``) or one decode row.
    """

    start: int
    length: int
    kv_length: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepBatch:
    """One model invocation over T rows of S requests.

    ``token_ids``, ``positions``, ``kv_rows``: lists of length T (where a row's key and value go: ``page * page_size +
    offset``).
    ``requests``, ``spans``: length S, in row order. ``adapter_ids``: length S, what the LoRA layers apply (0: none).
    ``num_prefill_rows``: rows of prompts, which come first. ``num_segments``: runs of rows with one adapter, rows
    without one not counted. ``num_idle``: rows of finished requests.
    """

    requests: tuple[Request, ...]
    spans: tuple[Span, ...]
    token_ids: list[int]
    positions: list[int]
    kv_rows: list[int]
    adapter_ids: tuple[int, ...]
    num_prefill_rows: int
    num_segments: int
    num_idle: int

    @property
    def sampled_rows(self) -> list[int]:
        """The last row of every request: its logits give the next token."""
        return [span.start + span.length - 1 for span in self.spans]

    @property
    def index_mapping(self) -> list[int]:
        """Adapter id of every row, length T."""
        pairs = zip(self.spans, self.adapter_ids, strict=True)
        return [adapter_id for span, adapter_id in pairs for _ in range(span.length)]


def lay_out(
    plan: StepPlan, pages: PagePool, slots: Mapping[int, int], index_rule: AdapterIndexRule = "per_request"
) -> StepBatch:
    """Rows of ``plan``: prompts first, then decode rows by ascending slot (``slots``: adapter id to slot; rows
    without come first).

    ``index_rule="last_admitted"`` reproduces the released text-generation harness (disagreement D04 of
    ``paper_results/README.md``): every decode row takes the adapter of the request admitted last, so each step has a
    single LoRA segment and *wrong outputs* for everyone else. It exists to measure what that did to Figure 11.
    """
    idle = set(plan.idle)
    decodes = sorted((*plan.decodes, *plan.idle), key=lambda request: slots.get(request.adapter_id, -1))
    requests = (*plan.prefills, *decodes)
    adapter_ids = tuple(request.adapter_id for request in requests)
    if index_rule == "last_admitted":
        adapter_ids = (requests_newest(plan).adapter_id,) * len(requests)
    spans: list[Span] = []
    token_ids: list[int] = []
    positions: list[int] = []
    kv_rows: list[int] = []
    for order, request in enumerate(requests):
        tokens, table = request.token_ids, pages.table(request.request_id)
        end = max(len(tokens) - 1, 1) if request in idle else len(tokens)
        first = 0 if order < len(plan.prefills) else end - 1
        spans.append(Span(len(token_ids), end - first, end, table))
        token_ids += tokens[first:end]
        positions += range(first, end)
        kv_rows += [table[i // pages.page_size] * pages.page_size + i % pages.page_size for i in range(first, end)]
    num_prefill_rows = sum(request.num_tokens for request in plan.prefills)
    num_segments = sum(1 for adapter_id, _ in groupby(adapter_ids) if adapter_id)
    return StepBatch(
        requests, tuple(spans), token_ids, positions, kv_rows, adapter_ids, num_prefill_rows, num_segments, len(idle)
    )


def requests_newest(plan: StepPlan) -> Request:
    """The request of a non-empty plan that was admitted last."""
    admitted: Sequence[Request] = plan.prefills or plan.decodes
    return admitted[-1]
