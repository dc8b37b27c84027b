"""Layout of a step: the rows of one model invocation, as plain lists.

    rows:   prompt of the newly admitted request | one row per decoding request, sorted by adapter slot
            p0 p1 p2 p3 ...                      | d d d d d ...

A prompt's first tokens may be cached: then its rows are those behind them, all or a piece.

Sorting makes the rows of one adapter adjacent: one SGMV segment per adapter, with ascending slots. Layout and segments
are made once per invocation and shared by all LoRA layers of the model (7 L of them).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from punica.scheduling.block_manager import BlockManager
from punica.scheduling.request import RequestState, RequestStatus
from punica.scheduling.scheduler import StepPlan

_NO_DRAFTS: tuple[int, ...] = ()
ADAPTER_INDEX_RULES = ("per_request", "last_admitted")
"""Rules for the adapter of a decode row, see :func:`lay_out`."""


class Span(NamedTuple):
    """Rows ``[start, start + length)`` of one request: of its prompt, one decode row, or that and those of its drafts.

    ``kv_length``: tokens of the request in the cache after the step, in the blocks of ``block_table``. The first
    ``kv_length - length`` of a prompt's were there before: none of a whole prompt's.
    """

    start: int
    length: int
    kv_length: int
    block_table: tuple[int, ...]

    def kv_rows(self, block_size: int) -> list[int]:
        """Return the cache row written by each of its rows: ``block * block_size + offset``."""
        first = self.kv_length - self.length
        blocks = self.block_table[first // block_size : -(-self.kv_length // block_size)]
        rows = [row for block in blocks for row in range(block * block_size, (block + 1) * block_size)]
        return rows[first % block_size :][: self.length]


@dataclass(frozen=True)
class StepLayout:
    """One model invocation over T rows of S requests.

    ``requests``, ``spans``, ``sampled_slots``: length S, in row order; slot -1 applies no adapter.
    ``token_ids``, ``positions``, ``kv_rows``: length T; cache row that each row's key and value are written to.
    ``num_prefill_rows``: rows of prompts, which come first; all rows of a step with drafts, which are computed alike.
    ``partial``: the request whose prompt has rows in a later step, so that its sampled token is none.
    ``mixtures``: lists of (slot, weight); slot -2 - i means ``mixtures[i]``.
    ``plain_rows``: per span, its first rows that are before the activation of its adapter; empty where none has such.
    ``drafts``: of requests, after their last token.
    """

    requests: tuple[RequestState, ...]
    spans: tuple[Span, ...]
    sampled_slots: tuple[int, ...]
    token_ids: list[int]
    positions: list[int]
    kv_rows: list[int]
    num_prefill_rows: int
    partial: RequestState | None = None
    plain_rows: tuple[int, ...] = ()
    mixtures: tuple[tuple[tuple[int, float], ...], ...] = ()
    drafts: Mapping[RequestState, tuple[int, ...]] = field(default_factory=dict)

    @property
    def sampled(self) -> list[tuple[int, int]]:
        """Span index and row of each sampled row: of a span the last one, or those of last token and drafts."""
        return [
            (index, row)
            for index, (request, span) in enumerate(zip(self.requests, self.spans, strict=True))
            for row in range(span.start + span.length)[-1 - len(self.drafts.get(request, ())) :]
        ]

    @cached_property
    def verifies(self) -> bool:
        """Tell whether it has drafts and no prompt."""
        return bool(self.drafts) and len(self.sampled) == len(self.token_ids)

    @property
    def samples_all(self) -> bool:
        return self.verifies or not self.num_prefill_rows

    @cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """``(slot, number of rows)`` of maximal runs with one slot, in row order, up to the last span's row.

        Slot -1: rows without adapter, or of no span.
        """
        runs: list[list[int]] = []
        end = 0
        plain_rows = self.plain_rows or (0,) * len(self.spans)
        for slot, span, plain in zip(self.sampled_slots, self.spans, plain_rows, strict=True):
            for run in ((-1, span.start - end + plain), (slot, span.length - plain)):
                if runs and runs[-1][0] == run[0]:
                    runs[-1][1] += run[1]
                elif run[1]:
                    runs.append([*run])
            end = span.start + span.length
        return tuple((slot, length) for slot, length in runs)

    def padded(self, prompt_rows: int) -> "StepLayout":
        """Pad the prompts to ``prompt_rows`` rows, with rows of no span: token 0, position 0, cache row -1 (none)."""
        first, gap = self.num_prefill_rows, prompt_rows - self.num_prefill_rows
        if not gap:
            return self
        spans = tuple(span if span.start < first else span._replace(start=span.start + gap) for span in self.spans)
        token_ids, positions, kv_rows = (
            [*values[:first], *[nothing] * gap, *values[first:]]
            for values, nothing in ((self.token_ids, 0), (self.positions, 0), (self.kv_rows, -1))
        )
        rows = token_ids, positions, kv_rows, prompt_rows
        others = self.partial, self.plain_rows, self.mixtures, self.drafts
        return StepLayout(self.requests, spans, self.sampled_slots, *rows, *others)


def lay_out(
    plan: StepPlan, blocks: BlockManager, slots: Mapping[Hashable, int] | None, index_rule: str = "per_request"
) -> StepLayout:
    """Build the layout of ``plan``: prompts, decode rows of mixtures, those without adapter, the others by slot.

    ``slots``: ``weights_key`` to slot, for every request of the plan; ``None`` when no adapters are applied.

    ``index_rule="last_admitted"`` reproduces the released text-generation harness (disagreement D04 of
    ``paper_results/README.md``): every decode row takes the adapter of the request admitted last. Each step then has a
    single LoRA segment, and *wrong outputs* for all other adapters. It exists to measure the effect on Figure 11.
    """

    mixtures: dict[tuple[tuple[int, float], ...], int] = {}

    def slot_of(request: RequestState) -> int:
        if slots is not None and request.mixed:
            pairs = zip(request.mixed, request.adapter.weights, strict=True)
            mixture = tuple((slots[one.weights_key], weight) for one, weight in pairs)
            return mixtures.setdefault(mixture, -2 - len(mixtures))
        if slots is None or request.activation is None:
            return -1
        key = request.weights_key
        return slots[key] if key else -1

    requests = (*plan.prefills, *sorted((*plan.decodes, *plan.idle), key=slot_of))
    sampled_slots = tuple(map(slot_of, requests))
    if index_rule == "last_admitted":
        newest = [*plan.decodes, *plan.prefills][-1]
        sampled_slots = (slot_of(newest),) * len(requests)
    block_size = blocks.block_size
    spans, token_ids, positions, kv_rows = list[Span](), list[int](), list[int](), list[int]()
    partial: RequestState | None = None
    for request in requests:
        table, end = blocks.block_table(request.request_id), request.num_tokens
        if request.status is RequestStatus.FINISHED:
            end = max(end - 1, 1)  # the last token of an idle request is never computed
        length, drafts = 1, _NO_DRAFTS
        if request in plan.prefills:
            first, end = plan.prefills[request]
            length = end - first
            partial = request if end < request.num_tokens else partial
        elif plan.drafts:
            drafts = plan.drafts.get(request, ())
            length, end = 1 + len(drafts), end + len(drafts)
        spans.append(Span(len(token_ids), length, end, table))
        positions += range(end - length, end)
        if length == 1:
            token_ids.append(request.token_at(end - 1))
            kv_rows.append(table[(end - 1) // block_size] * block_size + (end - 1) % block_size)
        else:
            token_ids += (*request.tokens_between(end - length, end), *drafts)
            kv_rows += spans[-1].kv_rows(block_size)
    prompts = len(token_ids) if plan.drafts else sum(span.length for span in spans[: len(plan.prefills)])
    plain_rows: tuple[int, ...] = ()
    if index_rule == "per_request" and any(request.activation for request in plan.prefills):
        plain_rows = tuple(map(_rows_before_activation, requests, spans))
        rows = zip(sampled_slots, spans, plain_rows, strict=True)
        sampled_slots = tuple(-1 if plain == span.length else slot for slot, span, plain in rows)
    of_rows = token_ids, positions, kv_rows, prompts
    return StepLayout(requests, tuple(spans), sampled_slots, *of_rows, partial, plain_rows, (*mixtures,), plan.drafts)


def _rows_before_activation(request: RequestState, span: Span) -> int:
    return min(max((request.activation or 0) - span.kv_length + span.length, 0), span.length)
