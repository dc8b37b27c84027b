"""Operators on a GPU are timed by the graph and by the host's clock, the paper's, in one run."""

import pytest
from fakes import Fake, composed

from experiments.harness import resume, sampled
from experiments.harness.budget import Budget
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import config_hash
from experiments.harness.resume import machine, run
from experiments.harness.settings import by_clocks, settle
from experiments.measure.records import read_rows

GRID = ("hardware=h200", "workload=distinct", "figure.batch_sizes=[1,2]")
GRAPH, HOST = "cuda_graph", "host_clock"


class Operators(Fake):
    """Notes under which clock each point is measured, and takes four times as long from the host."""

    host_clock_too = True

    def measure(self, cfg, point):
        super().measure(cfg, point)
        self.measured[-1] = cfg.timer.name, point.batch_size
        return sampled("latency", [4.0 if cfg.timer.name == HOST else 1.0] * 5, "us")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A machine that is taken for one with a GPU."""
    monkeypatch.setattr(resume, "_prepare", lambda cfg: None)


def test_one_run_times_operators_by_both_clocks_and_the_next_measures_nothing(tmp_path, monkeypatch):
    asked, fake, again = [], Operators(), Operators()
    monkeypatch.setattr(Budget, "estimate", lambda self, key: asked.append(key) or 0.0)
    outcome = run(composed(tmp_path, *GRID, "scale.passes=2"), fake, Budget(100.0, firm=True))
    assert len(set(asked)) == 4, "what a point costs is known for each clock"
    grid = [(HOST, 1), (HOST, 2), (GRAPH, 1), (GRAPH, 2)]
    assert (outcome.points, fake.measured) == (8, [*grid, *grid[::-1]])
    medians = [row for row in read_rows(outcome.rows_file) if row.statistic == "median"]
    found = {(row.timer, row.batch_size, row.repeat): row.value for row in medians}
    assert found == {(timer, batch, r): 4.0 if timer == HOST else 1.0 for timer, batch in grid for r in (0, 1)}
    assert (run(composed(tmp_path, *GRID, "scale.passes=2"), again).skipped, again.measured) == (8, [])


@pytest.mark.parametrize(("timer", "other"), [(GRAPH, HOST), (HOST, GRAPH)])
def test_a_named_clock_is_the_only_one_and_its_rows_are_those_of_the_run_with_both(tmp_path, timer, other):
    first, both = Operators(), Operators()
    run(composed(tmp_path, *GRID, f"timer={timer}"), first)
    assert first.measured == [(timer, 1), (timer, 2)]
    outcome = run(composed(tmp_path, *GRID), both)
    assert (outcome.skipped, both.measured) == (2, [(other, 1), (other, 2)])
    cfg = settle(composed(tmp_path, *GRID, f"timer={timer}"), both)
    named = {config_hash(both, cfg, point, machine()) for point in both.points(cfg)}
    assert {row.config_hash for row in read_rows(outcome.rows_file) if row.timer == timer} == named


def test_a_wrong_result_under_one_clock_leaves_the_other_its_rows(tmp_path):
    class Wrong(Operators):
        def measure(self, cfg, point):
            self.wrong = [2] if cfg.timer.name == GRAPH else []
            return super().measure(cfg, point)

    outcome = run(composed(tmp_path, *GRID), Wrong())
    assert {(row.timer, row.batch_size) for row in read_rows(outcome.rows_file)} == {(GRAPH, 1), (HOST, 1), (HOST, 2)}
    assert [GRAPH in one for one in outcome.failed] == [True]


@pytest.mark.slow
def test_a_cpu_has_one_clock_and_so_has_what_no_graph_holds(tmp_path):
    fake, chosen = Operators(), {}
    run(composed(tmp_path, "workload=distinct", "figure.batch_sizes=[1]"), fake)
    assert fake.measured == [(HOST, 1)]
    for experiment in experiments():
        cfg = composed(tmp_path, "hardware=h200", name=experiment.name)
        chosen[experiment.name] = list(by_clocks(cfg, settle(cfg, experiment), experiment))
    both = {name for name, clocks in chosen.items() if clocks == [HOST, GRAPH]}
    operators = {"fig07_sgmv_roofline", "fig08_lora_operator", "fig09_lora_ranks", "fig10_layer"}
    assert {*operators, "readme_backbone", "sec6_norm"} <= both
    assert chosen["fig11_textgen"] == chosen["fig01_batching"] == chosen["sec52_adapter_loading"] == [HOST]
