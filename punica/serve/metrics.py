"""Prometheus metrics of a server; no names of tenants or adapters."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from punica.engine import StepStatistics
from punica.serve.stepper import Outcome

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


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
        num_running = min(statistics.batch_size, num_unfinished)
        self._note(statistics.batch_size > 0, statistics.num_preempted, num_running, num_unfinished - num_running)

    def note_idle(self) -> None:
        self._note(0, 0, 0, 0)

    def _note(self, num_steps: int, num_preempted: int, num_running: int, num_waiting: int) -> None:
        self._steps.inc(num_steps)
        self._preempted.inc(num_preempted)
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def note_result(self, result: Outcome) -> None:
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
        return generate_latest(self.registry)
