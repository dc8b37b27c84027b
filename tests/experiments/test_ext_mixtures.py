"""Mixtures: every system is checked before it is timed, and a wrong one is not timed."""

import pytest
from fakes import settled

from experiments.benches import mixtures
from experiments.ext_mixtures import EXPERIMENT as MIXTURES
from experiments.harness.experiment import CheckFailed


@pytest.mark.parametrize("system", mixtures.SYSTEMS)
def test_systems_are_checked(tmp_path, monkeypatch, system) -> None:
    cfg = settled(tmp_path, MIXTURES)
    workload = "Identical" if system == "PEFT layer" else "Distinct"
    assert [system] == [*mixtures.checked_calls(cfg, [system], workload, 3, 10, 8)]
    assert system in {point.system for point in MIXTURES.points(cfg) if point.workload == workload}
    genuine = mixtures.expected
    monkeypatch.setattr(mixtures, "expected", lambda problem, lists: 1.01 * genuine(problem, lists))
    with pytest.raises(CheckFailed, match=system):
        mixtures.checked_calls(cfg, [system], workload, 3, 10, 8)
