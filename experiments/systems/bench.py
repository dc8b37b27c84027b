"""Systems on windows of one stream: what Figure 11 times.

Systems are built once and take turns; each has to serve a few requests with the right tokens before it is timed on a
workload. The stream, its replay under each admission rule and the draws of windows are made once as well.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.systems.check import Agreement, check_tokens
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.serving import SYSTEMS, Served, ServingSystem, Step
from experiments.systems.stream import Job, paper_stream, shortened, timeline_of
from experiments.systems.windows import Window, draw_windows
from experiments.systems.world import World
from punica.workload import Timeline


@dataclass(frozen=True)
class StreamConf:
    """The stream, and how it is sampled: `draws` times `pieces` runs of `steps` steps, or of `slow_steps`."""

    lengths: str
    requests: int
    max_len: int
    draws: int
    pieces: int
    steps: int
    slow_steps: int


@dataclass(frozen=True)
class Drawn:
    """A stream under an admission rule, and the windows that stand for it."""

    jobs: list[Job]
    timeline: Timeline
    windows: list[Window]


class StreamBench:
    """Systems by name on a shared `world`. Compared before timing are, of every workload, `check_requests` cut to
    `check_tokens` new ones, and once for each system on our engine so many requests and new tokens as `whole` says
    (None: none), if a request has them: of Distinct, or, where no adapter is applied, in one batch.
    """

    def __init__(
        self, world: World, stream: StreamConf, check_requests: int, check_tokens: int,
        whole: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.stream = world, stream
        self._check, self._whole = (check_requests, check_tokens), whole
        self._checked_whole: dict[str, Agreement] = {}
        self._systems: dict[str, ServingSystem] = {}
        self._jobs: dict[str, list[Job]] = {}
        self._drawn: dict[tuple[str, str, int], Drawn] = {}
        self._checked: dict[tuple[str, str], Agreement] = {}

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """The rows of one draw. `CheckFailed` when tokens are wrong, or steps held other work than the replay says."""
        server, drawn = self._system(system), self.drawn(system, workload)
        agreement, window = self._agreement(system, workload), drawn.windows[draw]
        steps = [
            step
            for start in window.starts
            for step in server.run_steps(drawn.jobs, drawn.timeline, start, window.length)
        ]
        check_steps(steps, window)
        return [*window_readings(steps, window, drawn), *_agreement_readings(agreement)]

    def drawn(self, system: str, workload: str) -> Drawn:
        """The stream of `workload` as `system` goes through it."""
        kind, stream = SYSTEMS.get(system), self.stream
        steps = stream.slow_steps if kind.slow else stream.steps
        key = (workload, kind.admission, steps)
        if key not in self._drawn:
            jobs = self.jobs(workload)
            timeline = timeline_of(jobs, kind.admission, self.world.limits.max_batch_size)
            self._drawn[key] = Drawn(jobs, timeline, draw_windows(timeline, stream.draws, stream.pieces, steps))
        return self._drawn[key]

    def jobs(self, workload: str) -> list[Job]:
        """The requests of `workload`."""
        if workload not in self._jobs:
            stream = self.stream
            self._jobs[workload] = paper_stream(
                workload, stream.requests, stream.max_len, self.world.vocab_size, stream.lengths
            )
        return self._jobs[workload]

    def serve_whole(self, system: str, workload: str) -> Served:
        """The whole stream, served: what windows predict. For short streams, or patience."""
        return self._system(system).serve(self.jobs(workload))

    def _system(self, name: str) -> ServingSystem:
        if name not in self._systems:
            self._systems[name] = SYSTEMS.get(name)(self.world)
        return self._systems[name]

    def _agreement(self, system: str, workload: str) -> Agreement:
        if (system, workload) not in self._checked:
            jobs = shortened(self.jobs(workload), *self._check)
            self._checked[system, workload] = check_tokens(self._system(system), jobs)
        found = self._checked[system, workload]
        return found if self._whole is None or not self._own(system) else found & self._whole_agreement(system)

    def _own(self, system: str) -> bool:
        """Whether it runs on our engine; the others are the reference's own model, batched."""
        return isinstance(self._system(system), EngineSystem)

    def _whole_agreement(self, system: str) -> Agreement:
        if system not in self._checked_whole:
            server, whole = self._system(system), self._whole or self._check
            jobs = shortened(self.jobs("Distinct" if server.lora else "Identical"), *whole)
            self._checked_whole[system] = check_tokens(server, jobs)
        return self._checked_whole[system]


def check_steps(steps: Sequence[Step], window: Window) -> None:
    """`CheckFailed` unless the `steps` of `window` gave as many tokens as its replay."""
    found, planned = sum(step.tokens for step in steps), window.tokens
    if (len(steps), found) != (window.steps, planned):
        raise CheckFailed(
            f"{len(steps)} steps with {found} tokens ran where the replay has {window.steps} steps with {planned}: the "
            "system does not follow its admission rule (with too few KV blocks it cannot: engine.num_blocks=null)"
        )


def window_readings(steps: Sequence[Step], window: Window, drawn: Drawn) -> list[Reading]:
    """The rows of a timed window; means over its steps are weighted as `windows` has it, quantiles are not.

    `throughput` is that of the stream at the window's speed: the stream's tokens per step over the seconds per step.
    """
    stream, timeline = drawn.timeline.means, drawn.timeline
    seconds = window.mean([step.seconds for step in steps])
    begins = sum(step.tokens > step.live for step in steps)
    new, total = sum(timeline.outputs), sum(timeline.outputs) + sum(timeline.prompts)
    simulated = {"kind": "simulated"}
    return [
        Reading("throughput", stream["tokens"] / seconds, "token/s"),
        Reading("new_token_throughput", new / timeline.steps / seconds, "token/s"),
        *_step_latency(steps, window),
        Reading("mean_batch_size", window.mean([step.live for step in steps]), "requests"),
        Reading("tokens_per_step", window.mean([step.tokens for step in steps]), "tokens"),
        Reading("stream_tokens_per_step", stream["tokens"], "tokens", **simulated),
        Reading("mean_context", window.means["context"] / window.means["rows"], "tokens"),
        Reading("stream_mean_context", stream["context"] / stream["rows"], "tokens", **simulated),
        Reading("idle_share", 1 - new / timeline.steps / stream["rows"], "ratio", **simulated),
        Reading("prompt_tokens_per_step", window.means["prompts"], "tokens"),
        Reading("stream_prompt_tokens_per_step", stream["prompts"], "tokens", **simulated),
        Reading("wall_time", sum(step.seconds for step in steps), "s"),
        Reading("window_steps", len(steps), "steps", "count"),
        Reading("window_prefill_steps", begins, "steps", "count"),
        Reading("requests", len(drawn.jobs), "requests", "count", **simulated),
        Reading("total_tokens", total, "tokens", "count", **simulated),
        Reading("new_tokens", new, "tokens", "count", **simulated),
        Reading("steps", timeline.steps, "steps", "count", **simulated),
    ]


def _step_latency(steps: Sequence[Step], window: Window) -> list[Reading]:
    """The mean, which throughput follows from, under the metric's name; quantiles over the steps beside it."""
    name, milliseconds = "step_latency", [1e3 * step.seconds for step in steps]
    spread = [reading for reading in sampled(name, milliseconds, "ms") if reading.statistic != "median"]
    found = [Reading(name, window.mean(milliseconds), "ms"), *spread]
    found.append(Reading(f"median_{name}", statistics.median(milliseconds), "ms"))
    inside = [1e3 * step.model_seconds for step in steps if step.model_seconds is not None]
    return [*found, Reading(f"model_{name}", window.mean(inside), "ms")] if inside else found


def _agreement_readings(agreement: Agreement) -> list[Reading]:
    return [
        Reading("token_agreement", agreement.tokens, "share"),
        Reading("logit_error", agreement.logit_error, "ratio"),
        Reading("checked_positions", agreement.positions, "tokens", "count"),
    ]
