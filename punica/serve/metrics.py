"""Prometheus metrics of a server; no names of tenants or adapters."""

from operator import methodcaller
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from punica.engine import StepStatistics
from punica.serve.calls import Outcome

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class StepNotes(Protocol):
    """Counter of an engine's steps and results."""

    def note_step(self, statistics: StepStatistics, num_unfinished: int) -> None:
        """Count one step, after which ``num_unfinished`` requests are left."""

    def note_idle(self) -> None:
        """Clear the gauges: the last request has left without a step."""

    def note_result(self, result: Outcome) -> None:
        """Count one generation that ended."""


class KeptNotes:
    """`StepNotes` that are kept, to be called with the `Metrics` of another process."""

    def __init__(self) -> None:
        self._kept: list[methodcaller] = []

    def note_step(self, statistics: StepStatistics, num_unfinished: int) -> None:
        """Count one step."""
        self._kept.append(methodcaller("note_step", statistics, num_unfinished))

    def note_idle(self) -> None:
        """Clear the gauges."""
        self._kept.append(methodcaller("note_idle"))

    def note_result(self, result: Outcome) -> None:
        """Count one generation that ended."""
        self._kept.append(methodcaller("note_result", result))

    def take(self) -> list[methodcaller]:
        """Return what has been kept since the last time."""
        taken, self._kept = self._kept, []
        return taken


class Metrics:
    """Counters, gauges and histograms in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "punica_requests", "Generations that ended, by finish reason", ["reason"], registry=registry
        )
        self.rejected = Counter("punica_rejected", "Calls answered by an error", ["status"], registry=registry)
        self._prompt = Counter("punica_prompt_tokens", "Prompt tokens of generations that ended", registry=registry)
        self._generated = Counter("punica_generated_tokens", "Generated tokens", registry=registry)
        self._steps = Counter("punica_steps", "Model invocations", registry=registry)
        self._preempted = Counter("punica_preemptions", "Requests sent back to the queue", registry=registry)
        self._running = Gauge("punica_requests_running", "Requests in the last step", registry=registry)
        self._waiting = Gauge("punica_requests_waiting", "Requests that wait for a step", registry=registry)
        self._first = Histogram(
            "punica_first_token_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry
        )
        self._token = Histogram(
            "punica_token_seconds", "Mean time between tokens of one request", buckets=_TOKEN_SECONDS, registry=registry
        )
        self._whole = Histogram("punica_request_seconds", "Arrival to last token", buckets=_SECONDS, registry=registry)

    def note_step(self, statistics: StepStatistics, num_unfinished: int) -> None:
        """Count one step, after which ``num_unfinished`` requests are left."""
        self.note_steps(statistics.batch_size > 0, statistics.num_preempted)
        num_running = min(statistics.batch_size, num_unfinished)
        self.note_requests(num_running, num_unfinished - num_running)

    def note_steps(self, num_steps: int, num_preempted: int) -> None:
        """Count steps of several runners."""
        self._steps.inc(num_steps)
        self._preempted.inc(num_preempted)

    def note_requests(self, num_running: int, num_waiting: int) -> None:
        """Set the numbers of unfinished requests."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def note_idle(self) -> None:
        """Clear the gauges: the last request has left without a step."""
        self.note_requests(0, 0)

    def note_result(self, result: Outcome) -> None:
        """Count one generation that ended."""
        self._requests.labels(result.finish_reason).inc()
        self._prompt.inc(result.num_prompt)
        self._generated.inc(result.num_generated)
        if result.first_token_s is None or result.last_token_s is None:
            return
        self._first.observe(result.first_token_s - result.arrival_s)
        self._whole.observe(result.last_token_s - result.arrival_s)
        if result.num_generated > 1:
            self._token.observe((result.last_token_s - result.first_token_s) / (result.num_generated - 1))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
