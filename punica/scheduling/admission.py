"""Admission rules: may the head of the queue join the batch now? A serving system is told apart by its answer.

A new rule is one class with :data:`ADMISSION_RULES` ``.register("name")``.
"""

from collections.abc import Sequence
from typing import Protocol

from punica.registry import Registry
from punica.scheduling.request import RequestState


class AdmissionRule(Protocol):
    """May ``candidate``, the head of the queue, join?

    ``running`` are the requests of the batch, in order of admission, ``admitted`` those that joined in this step.
    ``inseparable`` marks a batch whose KV cache is one piece: it is reserved in full when a request joins, and a
    finished request stays in the batch, computing for nothing, until the last one is done.
    """

    inseparable: bool

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """True when the rule lets the candidate join; batch size, blocks and slots are checked elsewhere."""


ADMISSION_RULES: Registry[type[AdmissionRule]] = Registry("admission rule")


@ADMISSION_RULES.register("fcfs")
class FirstComeFirstServed:
    """Punica: whatever the adapter, at most one new request per step.

    Its prefill joins the decode rows of the others in one invocation.
    """

    inseparable = False

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """One prefill per step."""
        return not admitted


@ADMISSION_RULES.register("single_adapter")
class SingleAdapter:
    """Continuous batching for one model at a time (the paper's vLLM): only into a batch of the same adapter."""

    inseparable = False

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """One prefill per step, and all of one adapter."""
        return not admitted and all(request.weights_id == candidate.weights_id for request in running)


@ADMISSION_RULES.register("static")
class StaticBatching:
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
        return len(running) == len(admitted) and all(request.weights_id == candidate.weights_id for request in admitted)


@ADMISSION_RULES.register("static_mixed")
class StaticMixed:
    """Static batches of consecutive requests whatever their adapters (PEFT's mixed batches): between `static` and
    `fcfs`, it separates what mixing adapters gains from what continuous batching gains.
    """

    inseparable = True

    def allows(
        self, candidate: RequestState, running: Sequence[RequestState], admitted: Sequence[RequestState]
    ) -> bool:
        """A batch forms in one step, when nothing runs."""
        return len(running) == len(admitted)
