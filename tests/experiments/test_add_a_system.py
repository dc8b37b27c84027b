"""A serving system is added by an entry: all else finds it. `docs/extending.md` adds one and checks its tokens."""

import pytest
from fakes import settled
from hydra.core.config_store import ConfigStore
from tiny import tiny_world

from experiments.facts import systems
from experiments.facts.systems import FIG11, LOAD, SYSTEMS, System
from experiments.fig11_textgen import EXPERIMENT
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.serving import built
from experiments.systems.stream import paper_stream, timeline_of
from punica.scheduling import ADMISSION_RULES, AdmissionRule

NAME = "newest_first"


class Rule(AdmissionRule):
    """The request that arrived last joins next, one per step."""

    def candidate(self, waiting, is_resident):
        return waiting[-1]

    def allows(self, candidate, running, admitted):
        return not admitted


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(ADMISSION_RULES._entries, NAME, Rule)
    entry = System(NAME, EngineSystem, NAME, figures=(FIG11, LOAD), baseline=True)
    monkeypatch.setitem(SYSTEMS._entries, NAME, entry)
    yield
    ConfigStore.instance().repo.get("system", {}).pop(f"{NAME}.yaml", None)


@pytest.mark.parametrize("workload", ["Distinct", "Identical"])
def test_it_runs_the_steps_of_its_replay_wherever_a_window_begins(workload):
    system, jobs = built(NAME, tiny_world(96)), paper_stream(workload, 11, 96, 256)
    line = timeline_of(jobs, NAME, 4)
    assert line.order[:3] == [10, 9, 8]
    features = line.features()
    for start in (0, line.steps // 3, line.steps - 5):
        steps = system.run_steps(jobs, line, start, 5)
        assert [step.tokens for step in steps] == features[start : start + 5, 0].astype(int).tolist()


def test_its_figures_run_it_and_the_best_baseline_counts_it(tmp_path):
    cfg = settled(tmp_path, EXPERIMENT, "workload=skewed")
    assert NAME in {point.system for point in EXPERIMENT.points(cfg)}
    assert NAME in systems.baselines()
