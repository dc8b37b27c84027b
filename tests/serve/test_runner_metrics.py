"""Metrics by runner stay bounded, whatever fails to start."""

from prometheus_client import CollectorRegistry, generate_latest

from punica.cluster.cluster_output import ClusterOutput, LostRunner
from punica.engine import StepStatistics
from punica.serve.runner_metrics import RunnerMetrics


def test_a_lost_runner_leaves_no_series() -> None:
    registry = CollectorRegistry()
    metrics = RunnerMetrics(registry, 2)
    before = generate_latest(registry).decode().count("\n")
    for number in range(20):
        metrics.note(ClusterOutput((), (), StepStatistics()), {f"runner-{number}": 3})
        lost = LostRunner(f"runner-{number}", "died"), LostRunner("new", "no place")
        metrics.note(ClusterOutput((), (), StepStatistics(), lost=lost), {})
    found = generate_latest(registry).decode()
    assert found.count("\n") == before
    assert "punica_runner_losses_total 40.0" in found
