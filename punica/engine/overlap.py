"""Overlap scheduling: the host prepares the next decode step while the device computes the current one."""

from collections.abc import Collection
from typing import NamedTuple

from punica.adapters import LoRAModelManager
from punica.engine.runner import InFlight, ModelRunner, StagedStep
from punica.scheduling import Scheduler, StepLayout, StepPlan, next_decode_step


class NextStep(NamedTuple):
    """Decode step prepared ahead; valid until a step fails or graphs are captured.

    ``layout`` has no token ids yet. ``staged``: its inputs; ``None`` if its graph has to be captured first.
    ``in_flight``: set once it is launched. ``adapter_uses``: ``manager.uses`` at that time.
    """

    layout: StepLayout
    staged: StagedStep | None
    in_flight: InFlight | None
    adapter_uses: int


class Overlap:
    """Prepares and launches steps, the next one ahead of the tokens of the current one."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, manager: LoRAModelManager | None) -> None:
        self._runner, self._scheduler, self._manager = runner, scheduler, manager

    @property
    def _adapter_uses(self) -> int:
        return 0 if self._manager is None else self._manager.uses

    def schedule(self, upcoming: NextStep | None, pinned: Collection[int]) -> tuple[StepPlan, InFlight | None]:
        """Return the plan of the step to run, and that step if it was launched ahead.

        A launched step is continued unless adapters were used since: a pin may need the slot of a running request.
        """
        if upcoming is not None and upcoming.in_flight is not None and upcoming.adapter_uses == self._adapter_uses:
            plan = self._scheduler.continue_batch(upcoming.layout.requests)
            if not plan.is_empty:
                return plan, upcoming.in_flight
        return self._scheduler.schedule(pinned), None

    def launch(self, layout: StepLayout, upcoming: NextStep | None) -> InFlight:
        """Launch a step, unless it is the one that was launched ahead; stage it, unless that was done ahead."""
        if upcoming is not None and upcoming.layout.is_same_step(layout):
            if upcoming.in_flight is not None:
                return upcoming.in_flight
            if upcoming.staged is not None and self._runner.has_graph(upcoming.staged.shape):
                return self._runner.launch(upcoming.staged)
        return self._runner.launch(self._runner.stage(layout))

    def prepare_next(self, current: InFlight, plan: StepPlan, pinned: Collection[int]) -> NextStep | None:
        """Stage the decode step after ``current``, the step of ``plan``; launch it if no request could join it.

        It is not launched if a choice of tokens needs the host. A request that finishes with ``current`` still has a
        row in it, whose output is discarded. ``None``: the next step is not foreseen, or the device leaves no time.
        """
        is_complete = plan.num_requests == len(current.layout.requests) == len(self._scheduler.running)
        if not (is_complete and self._runner.works_ahead):
            return None
        layout = next_decode_step(current.layout, self._scheduler.blocks)
        if layout is None:
            return None
        staged, in_flight = self._runner.stage_ahead(layout, current.device_tokens), None
        if not self._scheduler.can_admit(pinned) and staged is not None and layout.is_greedy:
            in_flight = self._runner.launch(staged)
        return NextStep(layout, staged, in_flight, self._adapter_uses)
