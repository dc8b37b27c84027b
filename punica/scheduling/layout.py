"""Laying out a step: from the scheduled requests to the rows of one model invocation. Plain lists.

    rows:   prompt of the newly admitted request | one row per decoding request, sorted by adapter slot
            p0 p1 p2 p3 ...                      | d d d d d ...

Sorting makes the rows of one adapter neighbours, so that SGMV sees one segment per adapter, with ascending slots. The
layout and the segments are made once per invocation and used by every LoRA layer of the model (7 L of them).
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from punica.scheduling.block_manager import BlockManager
from punica.scheduling.request import RequestState, RequestStatus
from punica.scheduling.scheduler import StepPlan

ADAPTER_INDEX_RULES = ("per_request", "last_admitted")
"""Whose adapter a decode row takes, see :func:`lay_out`."""


@dataclass(frozen=True)
class Span:
    """Rows ``[start, start + length)`` of a step belong to one request, whose cache then holds ``kv_length`` tokens
    in the blocks of ``block_table``.

    A span is either a whole prompt (``length == kv_length``) or one decode row.
    """

    start: int
    length: int
    kv_length: int
    block_table: tuple[int, ...]

    @property
    def positions(self) -> range:
        """Positions of its rows in the request."""
        return range(self.kv_length - self.length, self.kv_length)

    def kv_rows(self, block_size: int) -> list[int]:
        """Row of the cache that each of its rows writes: ``block * block_size + offset``."""
        return [self.block_table[p // block_size] * block_size + p % block_size for p in self.positions]


@dataclass(frozen=True)
class StepLayout:
    """One model invocation over T rows of S requests.

    ``requests``, ``spans``, ``sampled_slots``: length S, in row order; the slot of the adapter that the LoRA layers
    apply to the request (-1: none).
    ``token_ids``, ``positions``, ``kv_rows``: length T; ``kv_rows`` say where in the cache a row's key and value go.
    ``num_prefill_rows``: rows of prompts, which come first.
    """

    requests: tuple[RequestState, ...]
    spans: tuple[Span, ...]
    sampled_slots: tuple[int, ...]
    token_ids: list[int]
    positions: list[int]
    kv_rows: list[int]
    num_prefill_rows: int

    @property
    def sampled_rows(self) -> list[int]:
        """The last row of every request: its logits give the next token."""
        return [span.start + span.length - 1 for span in self.spans]

    @cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """``(slot, number of rows)`` of every run of rows with one slot, in row order; slot -1: rows without adapter,
        or of no span.

        Neighbouring segments have different slots, and the lengths sum to the rows up to the last span's.
        """
        runs: list[list[int]] = []
        end = 0
        for slot, span in zip(self.sampled_slots, self.spans, strict=True):
            for run in ((-1, span.start - end), (slot, span.length)):
                if runs and runs[-1][0] == run[0]:
                    runs[-1][1] += run[1]
                elif run[1]:
                    runs.append([*run])
            end = span.start + span.length
        return tuple((slot, length) for slot, length in runs)

    def padded(self, prompt_rows: int) -> "StepLayout":
        """The same step with rows of no span behind those of its prompts, which take ``prompt_rows`` together: token 0
        at position 0, and no row of the cache (-1).
        """
        first, gap = self.num_prefill_rows, prompt_rows - self.num_prefill_rows
        if not gap:
            return self
        spans = tuple(span if span.start < first else replace(span, start=span.start + gap) for span in self.spans)
        token_ids, positions, kv_rows = (
            [*values[:first], *[nothing] * gap, *values[first:]]
            for values, nothing in ((self.token_ids, 0), (self.positions, 0), (self.kv_rows, -1))
        )
        return StepLayout(self.requests, spans, self.sampled_slots, token_ids, positions, kv_rows, prompt_rows)

    @property
    def num_segments(self) -> int:
        """Segments with an adapter."""
        return sum(slot >= 0 for slot, _ in self.segments)


def one_token_later(layout: StepLayout, blocks: BlockManager) -> StepLayout | None:
    """The step behind ``layout`` if nobody joins, leaves or stops: every request computes its next token (whichever
    that is: its id stands as 0), and idle members of a batch their last one again. ``None`` where somebody's output
    ends with this step, the step has a prompt, or blocks run out. Blocks for the new tokens are reserved.
    """
    grows = [request.status is RequestStatus.RUNNING for request in layout.requests]
    if layout.num_prefill_rows or any(
        request.num_generated + 1 >= request.params.max_new_tokens if running else not _is_idle(request)
        for request, running in zip(layout.requests, grows, strict=True)
    ):
        return None
    spans = []
    for request, span, more in zip(layout.requests, layout.spans, grows, strict=True):
        if more and not blocks.reserve(request.request_id, span.kv_length + 1):
            return None
        spans.append(Span(span.start, 1, span.kv_length + more, blocks.block_table(request.request_id)))
    return replace(
        layout,
        spans=tuple(spans),
        token_ids=[0] * len(spans),
        positions=[position + more for position, more in zip(layout.positions, grows, strict=True)],
        kv_rows=[row for span in spans for row in span.kv_rows(blocks.block_size)],
    )


def lay_out(
    plan: StepPlan, blocks: BlockManager, slots: Mapping[Hashable, int] | None, index_rule: str = "per_request",
    expected: StepLayout | None = None,
) -> StepLayout:  # fmt: skip
    """Rows of ``plan``: prompts first, then decode rows by ascending slot, those without adapter before them.

    ``slots``: ``weights_key`` to slot, for every request of the plan; ``None`` when nothing applies adapters.
    ``expected``: what :func:`one_token_later` made of the step before; if that came true its parts are returned, with
    the token ids that are known now.

    ``index_rule="last_admitted"`` reproduces the released text-generation harness (disagreement D04 of
    ``paper_results/README.md``): every decode row takes the adapter of the request admitted last, so each step has a
    single LoRA segment and *wrong outputs* for everyone else. It exists to measure what that did to Figure 11.
    """

    def slot_of(request: RequestState) -> int:
        return slots[request.weights_key] if slots is not None and request.weights_key else -1

    requests = (*plan.prefills, *sorted((*plan.decodes, *plan.idle), key=slot_of))
    sampled_slots = tuple(map(slot_of, requests))
    if index_rule == "last_admitted":
        newest = (plan.prefills or plan.decodes)[-1]
        sampled_slots = (slot_of(newest),) * len(requests)
    if expected is not None and not plan.prefills and _came_true(expected, requests, sampled_slots):
        return replace(expected, token_ids=[request.token_at(_end_of(request) - 1) for request in requests])
    spans: list[Span] = []
    token_ids: list[int] = []
    for request in requests:
        end = _end_of(request)
        length = end if request in plan.prefills else 1
        spans.append(Span(len(token_ids), length, end, blocks.block_table(request.request_id)))
        token_ids += [request.token_at(end - 1)] if length == 1 else request.token_ids[end - length : end]
    return StepLayout(
        requests,
        tuple(spans),
        sampled_slots,
        token_ids,
        positions=[position for span in spans for position in span.positions],
        kv_rows=[row for span in spans for row in span.kv_rows(blocks.block_size)],
        num_prefill_rows=sum(request.num_tokens for request in plan.prefills),
    )


def is_where(layout: StepLayout, requests: Collection[RequestState]) -> bool:
    """Whether ``layout`` has the next token of each of ``requests``, members of it that are still in the batch."""
    spans = dict(zip(layout.requests, layout.spans, strict=True))
    return all(_end_of(request) == spans[request].kv_length for request in requests)


def _came_true(expected: StepLayout, requests: tuple[RequestState, ...], sampled_slots: tuple[int, ...]) -> bool:
    return (expected.requests, expected.sampled_slots) == (requests, sampled_slots) and all(
        _end_of(request) == span.kv_length for request, span in zip(requests, expected.spans, strict=True)
    )


def _is_idle(request: RequestState) -> bool:
    """A finished member of a batch that leaves together."""
    return request.status is RequestStatus.FINISHED


def _end_of(request: RequestState) -> int:
    """Tokens that a request has once the step is computed; of an idle one, whose last token was never computed, those
    before it.
    """
    return max(request.num_tokens - 1, 1) if _is_idle(request) else request.num_tokens
