"""A stream served to its end, beside the throughput that windows of it predict.

Half of the windows are timed before the stream and half after it, so that a drift of the machine hits both sides alike.
"""

import statistics
from dataclasses import dataclass

from experiments.harness.points import Reading
from experiments.systems.bench import StreamBench
from experiments.systems.serving import Served
from experiments.systems.windows import AGREEMENT

DRAWS = 12


@dataclass(frozen=True)
class Comparison:
    """Throughput of a stream (token/s), measured, and as each window `predicted` it."""

    system: str
    workload: str
    served: Served
    predicted: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.predicted)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean of the predictions, token/s."""
        return statistics.stdev(self.predicted) / len(self.predicted) ** 0.5

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors around the mean."""
        return self.mean - 2 * self.standard_error, self.mean + 2 * self.standard_error

    def readings(self) -> list[Reading]:
        """Return the rows of the comparison."""
        served = self.served
        return [
            Reading("stream_throughput", served.throughput, "token/s"),
            Reading("predicted_throughput", self.mean, "token/s"),
            Reading("prediction_standard_error", self.standard_error, "token/s"),
            Reading("predictions", len(self.predicted), "windows", "count"),
            Reading("prediction_over_stream", self.mean / served.throughput, "ratio"),
            Reading("stream_wall_time", served.seconds, "s"),
            Reading("stream_mean_batch_size", (served.rows - served.idle_rows) / served.steps, "requests"),
            Reading("stream_requests", len(served.jobs), "requests", "count"),
            Reading("stream_steps", served.steps, "steps", "count"),
        ]

    def __str__(self) -> str:
        """Format a table of one line."""
        measured, (low, high) = self.served.throughput, self.interval
        difference = self.mean / measured - 1
        verdict = "within" if abs(difference) <= AGREEMENT else "NOT within"
        stream = f"{len(self.served.jobs)} requests, {self.served.steps} steps, {self.served.seconds:.0f} s"
        line = (
            f"{self.system:<20} {self.workload:<10} {measured:10.4g} {self.mean:10.4g} {100 * difference:+9.1f} %   "
            f"{low:.4g} to {high:.4g} ({100 * (low / measured - 1):+.1f} to {100 * (high / measured - 1):+.1f} %)"
        )
        return "\n".join(
            [
                f"{'system':<20} {'workload':<10} {'measured':>10} {'predicted':>10} {'difference':>11}   interval",
                line,
                f"token/s; {stream}; {len(self.predicted)} windows, mean +- two standard errors; {verdict} "
                f"{100 * AGREEMENT:g} %",
            ]
        )


def compare(bench: StreamBench, system: str, workload: str) -> Comparison:
    """Serve the stream of `bench` whole, between two halves of its windows."""

    def predict(draws: range) -> list[float]:
        return [_throughput(bench.measure(system, workload, draw)) for draw in draws]

    before = predict(range(DRAWS // 2))
    served = bench.serve_whole(system, workload)
    return Comparison(system, workload, served, before + predict(range(DRAWS // 2, DRAWS)))


def _throughput(readings: list[Reading]) -> float:
    return next(reading.value for reading in readings if reading.metric == "throughput")
