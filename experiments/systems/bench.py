"""Systems timed on windows of one stream (Figure 11), and a whole stream beside what its windows predict."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from experiments.facts.systems import SYSTEMS
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.systems.check import Agreement, check_tokens
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.serving import Step, World, built
from experiments.systems.stream import Timeline, jobs_of, paper_stream, shortened, timeline_of
from experiments.systems.windows import Window, draw_windows
from experiments.workload.popularity import PAPER_WORKLOADS, popularity
from experiments.workload.traces import TRACE, Trace

WHOLE_DRAWS = 12  # windows beside a whole stream


@dataclass(frozen=True)
class StreamConf:
    """A stream, and its sampling: `draws` times `pieces` runs of `steps` steps, or of `slow_steps`."""

    lengths: str
    requests: int
    max_len: int
    draws: int
    pieces: int
    steps: int
    slow_steps: int
    trace: Trace | None = None  # of the workload `TRACE`


class Drawn(NamedTuple):
    timeline: Timeline
    windows: list[Window]


class StreamBench:
    """Systems by name on a shared `world`; draws are the same wherever batches are. Before timing, `check` (requests,
    new tokens) of every workload are compared with the reference, on systems of `checked_on`; and once per system on
    our engine `whole` of them.
    """

    def __init__(
        self, world: World, stream: StreamConf, check: tuple[int, int], whole: tuple[int, int] | None = None,
        checked_on: World | None = None,
    ) -> None:  # fmt: skip
        self.world, self.stream = world, stream
        self.system = cache(partial(built, world=world))
        self._check, self._whole = check, whole
        self._checked = cache(partial(built, world=checked_on)) if checked_on else self.system
        sizes = stream.requests, stream.max_len, world.vocab_size, stream.lengths
        self.jobs = cache(
            lambda workload: jobs_of(stream.trace.lengths(stream.max_len), stream.trace.adapters, world.vocab_size)
            if stream.trace and workload == TRACE
            else paper_stream(workload, *sizes)
        )
        self._replay = cache(
            lambda workload, admission: timeline_of(self.jobs(workload), admission, world.limits.max_batch_size)
        )
        self._draw = cache(self._draw_once)
        self._agreement = cache(self._agreement_once)
        self._whole_agreement = cache(self._whole_agreement_once)

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Time one draw. `CheckFailed` when tokens are wrong, or steps held other work than the replay says."""
        agreement, (timeline, windows) = self._agreement(system, workload), self.drawn(system, workload)
        server, jobs, window = self.system(system), self.jobs(workload), windows[draw]
        steps = [step for start in window.starts for step in server.run_steps(jobs, timeline, start, window.length)]
        tokens = sum(step.tokens for step in steps)
        if (len(steps), tokens) != (window.steps, window.tokens):
            raise CheckFailed(
                f"{len(steps)} steps with {tokens} tokens ran where the replay has {window.steps} steps with "
                f"{window.tokens}: the system does not follow its admission rule"
            )
        return [
            *window_readings(steps, window, timeline),
            Reading("token_agreement", agreement.tokens, "share"),
            Reading("logit_error", agreement.logit_error, "ratio"),
            Reading("checked_positions", agreement.positions, "tokens", "count"),
        ]

    def drawn(self, system: str, workload: str) -> Drawn:
        facts = SYSTEMS.get(system)
        return self._draw(workload, facts.admission, self.stream.slow_steps if facts.slow else self.stream.steps)

    def whole(self, system: str, workload: str) -> list[Reading]:
        """Serve the stream to its end, and compare with what windows predict, half of them timed before, half after."""

        def predict(draws: range) -> list[float]:
            timed = [self.measure(system, workload, draw) for draw in draws]
            return [reading.value for readings in timed for reading in readings if reading.metric == "throughput"]

        predicted = predict(range(WHOLE_DRAWS // 2))
        served = self.system(system).serve(self.jobs(workload))
        predicted += predict(range(WHOLE_DRAWS // 2, WHOLE_DRAWS))
        mean, error = statistics.fmean(predicted), statistics.stdev(predicted) / len(predicted) ** 0.5
        return [
            Reading("stream_requests", len(served.jobs), "requests", "count"),
            Reading("stream_throughput", served.throughput, "token/s"),
            Reading("predicted_throughput", mean, "token/s"),
            Reading("prediction_standard_error", error, "token/s"),
            Reading("prediction_over_stream", mean / served.throughput, "ratio"),
            Reading("stream_mean_batch_size", statistics.fmean(step.live for step in served.steps), "requests"),
        ]

    def _draw_once(self, workload: str, admission: str, steps: int) -> Drawn:
        timeline, compared = self._replay(workload, admission), list[Timeline]()
        if timeline.stretches == self._replay("Identical", admission).stretches:  # adapters part no batch
            asked = [popularity(name).requests(self.stream.requests).tolist() for name in PAPER_WORKLOADS]
            compared = [timeline.with_adapters(adapters) for adapters in asked]
        return Drawn(timeline, draw_windows(timeline, self.stream.draws, self.stream.pieces, steps, compared=compared))

    def _agreement_once(self, system: str, workload: str) -> Agreement:
        agreement = check_tokens(self._checked(system), shortened(self.jobs(workload), *self._check))
        own = isinstance(self._checked(system), EngineSystem)  # the others are the reference's own model, batched
        return agreement & self._whole_agreement(system) if own and self._whole else agreement

    def _whole_agreement_once(self, system: str) -> Agreement:
        server = self._checked(system)
        jobs = self.jobs("Distinct" if server.facts.lora else "Identical")
        return check_tokens(server, shortened(jobs, *(self._whole or self._check)))


def window_readings(steps: Sequence[Step], window: Window, timeline: Timeline) -> list[Reading]:
    """Rows of a timed window; `throughput`: the stream's tokens per step over the window's seconds per step."""
    stream, milliseconds = timeline.means, [1e3 * step.seconds for step in steps]
    seconds = window.mean(milliseconds) / 1e3
    new, total = sum(timeline.outputs), sum(timeline.outputs) + sum(timeline.prompts)
    simulated: dict[str, Any] = {"kind": "simulated"}
    return [
        Reading("throughput", stream["tokens"] / seconds, "token/s"),
        Reading("new_token_throughput", new / timeline.steps / seconds, "token/s"),
        Reading("step_latency", window.mean(milliseconds), "ms"),
        *(reading for reading in sampled("step_latency", milliseconds, "ms") if reading.statistic != "median"),
        Reading("mean_batch_size", window.mean([step.live for step in steps]), "requests"),
        Reading("tokens_per_step", window.mean([step.tokens for step in steps]), "tokens"),
        Reading("stream_tokens_per_step", stream["tokens"], "tokens", **simulated),
        Reading("mean_context", window.means["context"] / window.means["rows"], "tokens"),
        Reading("window_steps", len(steps), "steps", "count"),
        Reading("requests", len(timeline.prompts), "requests", "count", **simulated),
        Reading("total_tokens", total, "tokens", "count", **simulated),
        Reading("new_tokens", new, "tokens", "count", **simulated),
        Reading("steps", timeline.steps, "steps", "count", **simulated),
    ]
