"""The hour of runners on Ray: its scales, its requests, and the scheduler that the simulator has for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experiments.cluster.hour import NUM_GPUS, paper_hour, steady_stream
from experiments.simulator import StepCost, Trace
from experiments.workload import rescaled
from punica.cluster import ClusterPolicy

if TYPE_CHECKING:
    from punica.cluster.cluster_output import RunnerStep

REHEARSED, REHEARSAL_SEED = 6, 1
"""The rehearsal has a sixth of the hour's requests in a sixth of its time."""
STEADY_PART, STEADY_SEED = 5, 2
"""A stream of a constant rate lasts a fifth of the hour."""


@dataclass(frozen=True)
class World:
    """An hour of ``seconds``, its scales and its runners of ``model`` on ``device``: ``cpu``, or ``cuda``, a GPU for
    each runner.

    ``share``: of the hour's highest rate, at which a stream replaces the hour; 0: the hour. ``checked``: most requests
    whose tokens are compared with one engine's; 0: all. ``batch_invariant``: as in `EngineConfig`.
    """

    paper: str
    rule: str
    seconds: int
    runners: int
    speed_up: int
    max_len: int
    address: str
    device: str
    model: str = "llama-tiny"
    share: float = 0.0
    checked: int = 0
    batch_invariant: bool = False

    @property
    def load(self) -> float:
        """Rate of the hour over the paper's."""
        return self.runners / NUM_GPUS

    @property
    def duration_s(self) -> int:
        """Seconds in which requests arrive, on the paper's clock."""
        return self.seconds // STEADY_PART if self.share else self.seconds

    def trace(self) -> Trace:
        """Draw the requests, in the paper's seconds."""
        if self.share:
            return self._scaled(steady_stream(self.paper, self.duration_s, self.share, STEADY_SEED, self.load))
        return self._scaled(paper_hour(self.paper, self.seconds, load=self.load))

    def rehearsal(self) -> Trace:
        """Draw other requests at the same rates of our clock, the whole hour in a sixth of the time."""
        asked = self._scaled(paper_hour(self.paper, self.seconds, REHEARSAL_SEED, load=self.load / REHEARSED))
        return replace(asked, arrivals=asked.arrivals / REHEARSED)

    def adapter_ids(self) -> list[int]:
        """Return the adapters of the hour, which its rehearsal and streams use too."""
        return sorted(set(replace(self, share=0.0).trace().adapters.tolist()))

    def fleet(self) -> "World":
        """Return what runners must be started again for: all but the rule, the stream and the check."""
        return replace(self, rule="punica", share=0.0, checked=0)

    def policy(self, num_pages: int) -> ClusterPolicy:
        """Build the policy of the runners' scheduler, nothing submitted."""
        policy = ClusterPolicy(self.rule)
        for i in range(self.runners):
            policy.add_gpu(f"runner-{i:04}", num_pages)
        return policy

    def _scaled(self, asked: Trace) -> Trace:
        return replace(asked, lengths=rescaled(asked.lengths, self.max_len))


@dataclass(frozen=True)
class Fit:
    """A cost model of the runners, in our seconds; root mean square of its relative residuals over ``steps`` steps; KV
    pages of a runner.
    """

    cost: StepCost
    rms: float
    steps: int
    num_pages: int


def timed_steps(steps: Iterable["RunnerStep"]) -> Iterator[tuple["RunnerStep", float]]:
    """Yield steps that served requests, with their seconds.

    A step with decodes began when the one before ended, although its order came later: the scheduler's work between,
    and what an engine launched ahead of the order, are part of it.
    """
    ended: dict[str, float] = {}
    for step in steps:
        if step.work.decodes or step.work.prefill_tokens:
            began = ended.get(step.runner, step.begin_s) if step.work.decodes else step.begin_s
            yield step, step.end_s - began
        ended[step.runner] = step.end_s
