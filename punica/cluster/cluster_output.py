"""Output of a `RayCluster` step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from punica.cluster.dispatcher import EndedStep
from punica.cluster.gpu import StepWork
from punica.engine import GenerationResult, RequestState, StepOutput, StepStatistics


@dataclass(frozen=True)
class RunnerStep:
    """Timed step of a runner: order sent and reply received (``time.perf_counter`` seconds), ``seconds`` in the runner,
    and the tokens of the requests that were not aborted meanwhile.
    """

    runner: str
    work: StepWork
    begin_s: float
    end_s: float
    seconds: float
    num_tokens: int

    @property
    def is_empty(self) -> bool:
        """True for a step without requests: a probe, or one that only took requests out."""
        return not (self.work.decodes or self.work.prefill_tokens)


@dataclass(frozen=True)
class LostRunner:
    """Runner that died or could not be started, and the error."""

    runner: str
    reason: str


@dataclass(frozen=True)
class ClusterOutput(StepOutput):
    """Output of a `RayCluster.step`: ``steps`` of runners that ended, ``decisions_s`` (seconds of each decision of the
    policy since the last output), runners ``lost`` (died or not started) and ``joined``. ``recomputed``: requests that
    went on in another runner.
    """

    steps: tuple[RunnerStep, ...] = ()
    decisions_s: tuple[float, ...] = ()
    lost: tuple[LostRunner, ...] = ()
    joined: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


def cluster_output(
    ended: Sequence[tuple[RunnerStep, EndedStep]], failed: Sequence[RequestState], decisions: tuple[float, ...],
    lost: Sequence[LostRunner], joined: Sequence[str], recomputed: tuple[str, ...],
    result_of: Callable[[RequestState], GenerationResult],
) -> ClusterOutput:  # fmt: skip
    """Build the output from ended steps, and requests that ``failed`` with lost runners."""
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
        steps, decisions, tuple(lost), tuple(joined), recomputed,
    )  # fmt: skip
