"""What a step of a `RayCluster` brings to its user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from punica.cluster.dispatch import EndedStep
from punica.cluster.latency import StepWork
from punica.engine import GenerationResult, RequestState, StepOutput, StepStatistics


@dataclass(frozen=True)
class RunnerStep:
    """A step of a runner: what it computed, when it was ordered and when its reply was there (seconds of
    ``time.perf_counter``), and how long it took in the runner.
    """

    runner: str
    work: StepWork
    begin_s: float
    end_s: float
    seconds: float


@dataclass(frozen=True)
class LostRunner:
    """A runner that died, or that could not be started, and the error that told of it."""

    runner: str
    reason: str


@dataclass(frozen=True)
class ClusterOutput(StepOutput):
    """What a `RayCluster.step` brought.

    ``steps`` of runners that ended; ``decisions_s``: how long each decision of the policy took since the last output;
    ``lost``: runners that died or could not be started, and ``joined`` those that are ready (again).
    """

    steps: tuple[RunnerStep, ...] = ()
    decisions_s: tuple[float, ...] = ()
    lost: tuple[LostRunner, ...] = ()
    joined: tuple[str, ...] = ()


def cluster_output(
    ended: Sequence[tuple[RunnerStep, EndedStep]], failed: Sequence[RequestState], decisions: tuple[float, ...],
    lost: Sequence[LostRunner], joined: Sequence[str], result_of: Callable[[RequestState], GenerationResult],
) -> ClusterOutput:  # fmt: skip
    """Of steps that ended, and of requests that ``failed`` with lost runners."""
    steps = tuple(step for step, _ in ended)
    statistics = StepStatistics(
        batch_size=sum(len(one.tokens) for _, one in ended),
        num_prefill_tokens=sum(step.work.prefill_tokens for step in steps),
        schedule_s=sum(decisions),
    )
    results = [result_of(state) for _, one in ended for state in (*one.finished, *one.failed)]
    results += [result_of(state) for state in failed]
    return ClusterOutput(
        {name: token for _, one in ended for name, token in one.tokens.items()},
        tuple(result for result in results if result.error is None),
        statistics,
        tuple(result for result in results if result.error is not None),
        steps, decisions, tuple(lost), tuple(joined),
    )  # fmt: skip
