"""Overlap scheduling: steps are launched while the device computes the step before.

    device:  | step k                        | step k + 1                    |
    host:    | schedule, stage, launch k + 1 | tokens of k, then k + 2 ...

Step k + 1 is scheduled as if the tokens of step k were known: each request has one more token, and requests that are
complete with it have left. Their ids stay on the device, from which the next step reads them. Requests join as in any
other step. One that stops at a token has a row in step k + 1 that is not read.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from punica.engine.requests import StepStatistics
from punica.engine.residency import AdapterResidency
from punica.engine.runner import InFlight, ModelRunner
from punica.engine.sampler import NO_TOKEN
from punica.scheduling import RequestState, RequestStatus, Scheduler, StepLayout, StepPlan, lay_out


class BegunStep(NamedTuple):
    """Step that was scheduled, and launched unless no request can run.

    ``adapter_uses``: ``manager.uses`` at that time. ``scheduled_s``: when it was scheduled or taken up.
    """

    plan: StepPlan
    in_flight: InFlight | None
    adapter_uses: int
    scheduled_s: float

    def statistics(self, start: float, counts: Mapping[str, int]) -> StepStatistics:
        """Describe a step, now that its tokens are read; ``start``: when the host began with it."""
        plan, in_flight, scheduled = self.plan, self.in_flight, self.scheduled_s
        if in_flight is None:
            return StepStatistics(num_preempted=len(plan.preempted), schedule_s=scheduled - start)
        layout, ready = in_flight.layout, max(scheduled, in_flight.metadata_ready_s)
        prompts = layout.num_prefill_rows
        if layout.drafts:
            prompts = sum(span.length for span in layout.spans[: len(plan.prefills)])
        return StepStatistics(
            batch_size=len(layout.requests),
            num_idle=len(layout.requests) - len(plan.prefills) - len(plan.decodes),
            num_prefill_tokens=prompts,
            num_segments=sum([slot != -1 for slot, _ in layout.segments]),
            num_preempted=len(plan.preempted),
            schedule_s=scheduled - start, metadata_s=ready - scheduled, model_s=time.perf_counter() - ready, **counts,
        )  # fmt: skip


class Overlap:
    """Schedules and launches steps, the next one ahead of the tokens of the current one.

    Requests that fail meanwhile are appended to the lists ``failed``.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, residency: AdapterResidency | None, index_rule: str
    ) -> None:
        self._runner, self._scheduler, self._residency, self._index_rule = runner, scheduler, residency, index_rule

    def begin(self, pinned: Collection[int], failed: list[RequestState], before: InFlight | None = None) -> BegunStep:
        """Schedule and launch a step; ``before``: the step in flight, whose tokens it needs."""
        plan = self._scheduler.schedule(pinned)
        if plan.is_empty and before is None:
            failed += self._fail_unschedulable(pinned)
        plan = self._activate(plan, failed)
        if plan.prefills and self._scheduler.blocks.is_shared:
            plan = self._with_keys(plan)
        slots, uses = None, 0
        if self._residency is not None:
            active, uses = self._residency.manager.active_versions(), self._residency.manager.uses
            slots = {version.key: version.slot for version in active if version.slot is not None}
        if plan.is_empty:
            return BegunStep(plan, None, uses, time.perf_counter())
        layout = lay_out(plan, self._scheduler.blocks, slots, self._index_rule)
        scheduled = time.perf_counter()
        return BegunStep(plan, self._runner.launch(layout, before), uses, scheduled)

    def prepare_next(self, current: BegunStep, pinned: Collection[int], failed: list[RequestState]) -> BegunStep | None:
        """Launch the step after ``current``; ``None`` if it has to wait for the tokens of that.

        It waits for scores that the host adjusts by the tokens so far, for blocks and slots, and for the end of the
        first member of a static batch. Drafts continue the tokens, too. A host that launches each kernel itself has no
        time to work ahead.
        """
        scheduler, plan, in_flight = self._scheduler, current.plan, current.in_flight
        size = len(plan.prefills) + len(plan.decodes) + len(plan.idle)
        if in_flight is None or not self._runner.works_ahead or size != len(scheduler.running) or plan.drafts:
            return None
        growing = [request for request in scheduler.running if request.status is RequestStatus.RUNNING]
        if scheduler.partial is not None:
            growing.remove(scheduler.partial)  # it has no token in this step
        for request in growing:
            request.is_ahead = True
        try:
            ending = [request for request in growing if request.is_complete]
            if ending and (scheduler.rule.inseparable or not scheduler.has_slots_beside(len(ending), pinned)):
                return None
            if any(request.params.adjusts and not request.is_complete for request in growing):
                return None
            if scheduler.most_drafts and any(map(scheduler.most_drafts_of, growing)):
                return None
            for request in ending:
                scheduler.leave(request)
            if not scheduler.can_grow():
                return None
            step = self.begin(pinned, failed, in_flight)
        finally:
            for request in growing:
                request.is_ahead = False
        return None if step.in_flight is None else step

    def take_up(self, step: BegunStep, failed: list[RequestState]) -> BegunStep | None:
        """Return a step launched ahead, with those requests that are still in the batch.

        It is dropped if none is, or adapters were used since: a pin may need the slot of a running request.
        """
        plan, residency = step.plan.only(self._scheduler.running), self._residency
        if plan.is_empty or step.adapter_uses != (0 if residency is None else residency.manager.uses):
            self._scheduler.take_back(step.plan.prefills)
            return None
        return step._replace(plan=self._activate(plan, failed), scheduled_s=time.perf_counter())

    def register(self, layout: StepLayout, tokens: Sequence[int]) -> None:
        """Register the blocks that a step has filled in a prefix cache, before requests leave with it.

        None of a row that holds NaN, and of drafts none before a later step. Under batch invariance those of prompts
        alone: bits of decode rows differ.
        """
        blocks = self._scheduler.blocks
        for request, span, token in zip(layout.requests, layout.spans, tokens, strict=True):
            if span.length == 1 and span.kv_length % blocks.block_size:
                continue
            if request.status is RequestStatus.RUNNING and request.prefix_key is not None and token != NO_TOKEN:
                known = request.num_tokens if self._scheduler.grain == 1 else request.computed
                end = min(span.kv_length, known)
                blocks.register(request.request_id, request.tokens_between, end, request.prefix_key)

    def prefetch(self, pinned: Collection[int]) -> None:
        """Load the adapter of the head of the queue into a spare slot, beside the step (section 5.2 of the paper)."""
        head = self._scheduler.waiting[0]
        if self._residency is not None and self._scheduler.has_slot(head, pinned):
            self._residency.prefetch(head)

    def fail(self, request: RequestState, error: str) -> list[RequestState]:
        """Remove a request as FAILED, and return it; a finished member of the batch is removed alone."""
        had_ended = request.has_ended
        if not had_ended:
            request.fail(error)
        self._scheduler.remove(request)
        return [] if had_ended else [request]

    def _with_keys(self, plan: StepPlan) -> StepPlan:
        """Tell the keys of joining requests by the weights that they hold now, which decide what is registered.

        One that hit blocks of other weights is queued again.
        """
        others = {}
        for request in plan.prefills:
            expected, request.prefix_key = request.prefix_key, self._scheduler.key_of(request, True)
            if request.hit and request.prefix_key != expected:
                others[request] = 0, 0
        self._scheduler.take_back(others)
        return plan.only(self._scheduler.running)

    def _activate(self, plan: StepPlan, failed: list[RequestState]) -> StepPlan:
        """Activate the adapters of the step; return the plan without requests that failed."""
        residency, wanted = self._residency, [*plan.decodes, *plan.idle, *plan.prefills]
        if residency is None or residency.settled == (wanted, residency.manager.uses):
            return plan
        before = len(failed)
        # running requests first, of these the ones with a slot, so that no adapter of theirs is evicted for another
        running = sorted((*plan.decodes, *plan.idle), key=lambda one: one.weights is None or one.weights.slot is None)
        for request in (*running, *plan.prefills):
            if request not in self._scheduler.running:
                continue  # it left with the last unfinished member of its batch
            try:
                residency.activate(request)
            except (OSError, TypeError, ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise  # not caused by the adapter
                failed += self.fail(request, f"{type(error).__name__}: {error}")
        if len(failed) == before:
            residency.settled = wanted, residency.manager.uses
            return plan
        return plan.only(self._scheduler.running)

    def _fail_unschedulable(self, pinned: Collection[int]) -> list[RequestState]:
        """Fail the head of the queue if nothing runs and pins leave it no slot."""
        scheduler, head = self._scheduler, next(iter(self._scheduler.waiting), None)
        if scheduler.running or head is None or scheduler.has_slot(head, pinned):
            return []
        name = f"adapter {head.adapter_id}" if head.adapter_id else f"adapters {sorted(head.adapter_ids)}"
        return self.fail(
            head,
            f"RuntimeError: no slot for {name}: all {len(pinned)} slots were pinned, for adapters "
            f"{sorted(pinned)}, while the request waited; call manager.unpin_adapter and ask again",
        )
