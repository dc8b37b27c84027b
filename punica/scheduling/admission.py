"""Admission rules: who is next, and may it join now? Serving systems are told apart by the answers.

A new rule is one class with :data:`ADMISSION_RULES` ``.register("name")``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from punica.checks import check_count
from punica.registry import Registry
from punica.scheduling.request import RequestState

IsResident = Callable[[RequestState], bool]
"""Whether a request's adapter lies in a slot, so that it could run at once (also where it has none)."""


class AdmissionRule(ABC):
    """Who is the next to join, and may it?

    ``inseparable`` marks a batch whose KV cache is one piece: it is reserved in full when a request joins, and a
    finished request stays in the batch, computing for nothing, until the last one is done.
    """

    inseparable: ClassVar[bool] = False

    def candidate(self, waiting: Sequence[RequestState], is_resident: IsResident) -> RequestState:
        """The one of ``waiting``, of whom there is at least one, who joins next: the head, unless a rule says else."""
        return waiting[0]

    @abstractmethod
    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """True when the rule lets the candidate join; batch size, blocks and slots are checked elsewhere.

        ``running`` are the requests of the batch, in order of admission, ``admitted`` those that joined in this step.
        """


ADMISSION_RULES: Registry[type[AdmissionRule]] = Registry("admission rule")


@ADMISSION_RULES.register("fcfs")
class FirstComeFirstServed(AdmissionRule):
    """Punica: whatever the adapter, at most one new request per step.

    Its prefill joins the decode rows of the others in one invocation.
    """

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """One prefill per step."""
        return not admitted


@ADMISSION_RULES.register("fcfs_many")
class FirstComeFirstServedMany(AdmissionRule):
    """As ``fcfs``, without its limit of one new request per step: as many prompts as the step has rows for.

    A queue is served sooner; the requests that decode wait longer for the step's end.
    """

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """Always."""
        return True


MOST_OVERTAKES = 32
"""Of a request under ``resident_first``: a full batch of the paper."""


@ADMISSION_RULES.register("resident_first")
class ResidentFirst(FirstComeFirstServed):
    """As ``fcfs``, but the first in the queue whose adapter lies in a slot comes before those who wait for a slot.

    A head that has to wait for a slot then does not hold up those behind it. It does not wait for ever: nobody is
    overtaken by more than ``most_overtakes`` requests, after which the queue is first come, first served for those
    behind. With 0 the rule is ``fcfs``.
    """

    def __init__(self, most_overtakes: int = MOST_OVERTAKES) -> None:
        self.most_overtakes = check_count("most_overtakes", most_overtakes, 0)

    def candidate(self, waiting: Sequence[RequestState], is_resident: IsResident) -> RequestState:
        """The first resident one that overtakes nobody who must not be overtaken any more; else the head."""
        for request in waiting:
            if is_resident(request):
                return request
            if request.overtaken >= self.most_overtakes:
                break
        return waiting[0]


@ADMISSION_RULES.register("single_adapter")
class SingleAdapter(AdmissionRule):
    """Continuous batching for one model at a time (the paper's vLLM): only into a batch of the same adapter."""

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """One prefill per step, and all of one adapter."""
        return not admitted and all(request.weights_key == candidate.weights_key for request in running)


@ADMISSION_RULES.register("static")
class StaticBatching(AdmissionRule):
    """Static batches (the paper's FasterTransformer, DeepSpeed, HF): consecutive requests of one adapter.

    A batch runs until its longest request is done. All members are prefilled in one invocation. Two costs of the real
    systems are left out, in the baseline's favour: prompts are not padded to one length, and the KV cache of a finished
    row does not grow further.
    """

    inseparable = True

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """A batch forms in one step, when nothing runs."""
        key = candidate.weights_key
        return len(running) == len(admitted) and all(request.weights_key == key for request in admitted)


@ADMISSION_RULES.register("static_mixed")
class StaticMixed(AdmissionRule):
    """Static batches of consecutive requests whatever their adapters (PEFT's mixed batches): between `static` and
    `fcfs`, it separates what mixing adapters gains from what continuous batching gains.
    """

    inseparable = True

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """A batch forms in one step, when nothing runs."""
        return len(running) == len(admitted)
