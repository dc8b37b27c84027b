"""What a step of the engine gives back: tokens, results of requests that ended, and what it was made of."""

from dataclasses import dataclass

from punica.engine.results import GenerationResult


@dataclass(frozen=True)
class StepStatistics:
    """What a step was made of and where its time went (seconds, host clock).

    ``batch_size``: requests in the invocation, ``num_idle`` of them finished ones of a static batch, or gone when it
    had begun already. ``num_prefill_tokens``: prompt rows. ``num_segments``: LoRA segments. ``schedule_s``: scheduling,
    adapter activation, layout; ``metadata_s``: buffers of the step and segment indices; ``model_s``: the model with
    LoRA, up to the tokens on the host. Of a step that began beside the one before, ``metadata_s`` is 0, and ``model_s``
    holds what the host does for the next one.
    """

    batch_size: int = 0
    num_idle: int = 0
    num_prefill_tokens: int = 0
    num_segments: int = 0
    num_preempted: int = 0
    schedule_s: float = 0.0
    metadata_s: float = 0.0
    model_s: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """Tokens of one step, ``{request_id: token}``, the results of the requests that finished with it and of those that
    failed in it, and its statistics.

    Before them, results that were kept for it: of requests (added one by one) that ended in a step of ``generate`` or
    ``stream``, or in one that raised. Tokens are not kept: they are in the results, and in the requests' states.
    """

    tokens: dict[str, int]
    finished: tuple[GenerationResult, ...]
    statistics: StepStatistics
    failed: tuple[GenerationResult, ...] = ()
