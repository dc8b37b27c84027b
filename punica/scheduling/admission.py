"""Admission rules: which waiting request joins next, and when. Serving systems differ in them.

A new rule is one class with :data:`ADMISSION_RULES` ``.register("name")``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from punica.checks import check_count
from punica.registry import Registry
from punica.scheduling.request import RequestState

Requests = Sequence[RequestState]
IsResident = Callable[[RequestState], bool]
"""Predicate: a request has no adapter, or its adapter is in a slot."""


class AdmissionRule(ABC):
    """Rule that picks the next request to join, and allows or delays it.

    ``inseparable``: the batch's KV cache is one piece. It is reserved in full when a request joins, and finished
    requests stay in the batch as idle rows until the last one is done. ``chunked``: steps have a fixed number of rows
    for prompts, and a prompt with more takes several steps.
    """

    inseparable: ClassVar[bool] = False
    chunked: ClassVar[bool] = False

    def candidate(self, waiting: Requests, is_resident: IsResident) -> RequestState:
        """Return the request of non-empty ``waiting`` that joins next: the head by default."""
        return waiting[0]

    @abstractmethod
    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        """Check if the rule lets the candidate join; the scheduler checks batch size, blocks and slots.

        ``running``: requests of the batch in order of admission. ``admitted``: those that joined in this step.
        """


ADMISSION_RULES: Registry[type[AdmissionRule]] = Registry("admission rule")


@ADMISSION_RULES.register("fcfs")
class FirstComeFirstServed(AdmissionRule):
    """Punica: at most one new request per step, of any adapter, beside the decode rows of the others."""

    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        return not admitted


@ADMISSION_RULES.register("fcfs_many")
class FirstComeFirstServedMany(AdmissionRule):
    """First come, first served, with as many prompts per step as it has rows for: decode rows wait for longer steps."""

    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        return True


@ADMISSION_RULES.register("chunked")
class ChunkedPrefill(FirstComeFirstServedMany):
    """First come, first served; the prompts of a step share ``EngineConfig.prefill_chunk`` rows.

    The last rows of one prompt and the first of the next run in one step, so decode rows never wait for a long prompt.
    """

    chunked = True


MOST_OVERTAKES = 32
"""Most overtakes of a request under ``resident_first``: a full batch of the paper."""


@ADMISSION_RULES.register("resident_first")
class ResidentFirst(FirstComeFirstServed):
    """First come, first served, except that requests whose adapter is in a slot overtake those that wait for one.

    Each request is overtaken at most ``most_overtakes`` times; with 0 the rule is ``fcfs``.
    """

    def __init__(self, most_overtakes: int = MOST_OVERTAKES) -> None:
        self.most_overtakes = check_count("most_overtakes", most_overtakes, 0)

    def candidate(self, waiting: Requests, is_resident: IsResident) -> RequestState:
        """Return the first resident request before any that used up its overtakes; else the head."""
        for request in waiting:
            if is_resident(request):
                return request
            if request.overtaken >= self.most_overtakes:
                break
        return waiting[0]


@ADMISSION_RULES.register("single_adapter")
class SingleAdapter(AdmissionRule):
    """Continuous batching of one adapter at a time (the paper's vLLM)."""

    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        return not admitted and all(request.weights_key == candidate.weights_key for request in running)


@ADMISSION_RULES.register("static")
class StaticBatching(AdmissionRule):
    """Static batches (the paper's FasterTransformer, DeepSpeed, HF): consecutive requests of one adapter.

    A batch is prefilled in one invocation and runs until its longest request is done. In the baseline's favour, prompts
    are not padded to one length, and the KV cache of a finished row does not grow.
    """

    inseparable = True

    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        key = candidate.weights_key
        return len(running) == len(admitted) and all(request.weights_key == key for request in admitted)


@ADMISSION_RULES.register("static_mixed")
class StaticMixed(AdmissionRule):
    """Static batches of any adapters (PEFT's): they tell the gain of mixing from that of continuous batching."""

    inseparable = True

    def allows(self, candidate: RequestState, running: Requests, admitted: Requests) -> bool:
        return len(running) == len(admitted)
