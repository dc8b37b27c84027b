"""Systems timed on windows of one stream (Figure 11).

Systems, streams, their replays and the draws of windows are made once. Each system has to serve a few requests with the
right tokens before it is timed on a workload.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from experiments.facts.systems import SYSTEMS
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading, sampled
from experiments.systems.check import Agreement, check_tokens
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.serving import Served, Step, built
from experiments.systems.stream import Job, paper_stream, shortened, timeline_of
from experiments.systems.timeline import Timeline
from experiments.systems.windows import Window, draw_windows
from experiments.systems.world import World
from experiments.workload.popularity import PAPER_WORKLOADS, popularity


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


@dataclass(frozen=True)
class Drawn:
    """A stream under an admission rule, and its windows."""

    jobs: list[Job]
    timeline: Timeline
    windows: list[Window]


class StreamBench:
    """Systems by name on a shared `world`.

    Draws are the same for the paper's popularities and for all rules, wherever these form the same batches: all of
    Punica's, and the one of baselines on Identical.

    Before timing, `check_requests` of every workload are compared with the reference up to `check_tokens` new tokens;
    and once for each system on our engine `whole` (requests, new tokens; None: none): of Distinct, or of Identical
    where no adapter is applied.
    """

    def __init__(
        self, world: World, stream: StreamConf, check_requests: int, check_tokens: int,
        whole: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.stream = world, stream
        self._check, self._whole = (check_requests, check_tokens), whole
        self._checked_whole: dict[str, Agreement] = {}
        self._checked: dict[tuple[str, str], Agreement] = {}
        self._system = cache(partial(built, world=world))
        sizes = stream.requests, stream.max_len, world.vocab_size, stream.lengths
        self.jobs = jobs = cache(lambda workload: paper_stream(workload, *sizes))

        replay = cache(lambda workload, admission: timeline_of(jobs(workload), admission, world.limits.max_batch_size))

        def draw(workload: str, admission: str, steps: int) -> Drawn:
            timeline, compared = replay(workload, admission), list[Timeline]()
            if timeline.stretches == replay("Identical", admission).stretches:  # adapters part no batch
                asked = [popularity(name).requests(stream.requests).tolist() for name in PAPER_WORKLOADS]
                compared = [timeline.with_adapters(adapters) for adapters in asked]
            windows = draw_windows(timeline, stream.draws, stream.pieces, steps, compared=compared)
            return Drawn(jobs(workload), timeline, windows)

        self._drawn = cache(draw)

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Time one draw. `CheckFailed` when tokens are wrong, or steps held other work than the replay says."""
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
        """Return the stream of `workload` under the admission rule of `system`, and its windows."""
        facts = SYSTEMS.get(system)
        steps = self.stream.slow_steps if facts.slow else self.stream.steps
        return self._drawn(workload, facts.admission, steps)

    def serve_whole(self, system: str, workload: str) -> Served:
        """Serve the whole stream, which windows predict; for short streams."""
        return self._system(system).serve(self.jobs(workload))

    def _agreement(self, system: str, workload: str) -> Agreement:
        if (system, workload) not in self._checked:
            jobs = shortened(self.jobs(workload), *self._check)
            self._checked[system, workload] = check_tokens(self._system(system), jobs)
        found = self._checked[system, workload]
        own = isinstance(self._system(system), EngineSystem)  # the others are the reference's own model, batched
        return found & self._whole_agreement(system) if own and self._whole else found

    def _whole_agreement(self, system: str) -> Agreement:
        if system not in self._checked_whole:
            server, whole = self._system(system), self._whole or self._check
            jobs = shortened(self.jobs("Distinct" if server.facts.lora else "Identical"), *whole)
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
    """Return the rows of a timed window; means over its steps are weighted (`windows`), quantiles are not.

    `throughput`: the stream's tokens per step over the window's seconds per step.
    """
    stream, timeline = drawn.timeline.means, drawn.timeline
    seconds = window.mean([step.seconds for step in steps])
    begins = sum(step.tokens > step.live for step in steps)
    new, total = sum(timeline.outputs), sum(timeline.outputs) + sum(timeline.prompts)
    simulated: dict[str, Any] = {"kind": "simulated"}
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
    """Return the weighted mean under the metric's name, and quantiles over the steps."""
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
