"""The price of drafts: every step verifies what it is given, and its break-even is relative to a plain one."""

import pytest
from fakes import settled

from experiments.ext_speculation import ADAPTERS, EXPERIMENT, SYSTEMS
from experiments.harness.experiment import CheckFailed


def test_readings_of_a_cell(tmp_path, monkeypatch) -> None:
    cfg = settled(tmp_path, EXPERIMENT, "figure.drafts=[0,7]", "figure.batch_sizes=[2]")
    cells = list(EXPERIMENT.together(EXPERIMENT.points(cfg)))
    assert [(points[0].panel, [SYSTEMS[one.system] for one in points]) for points in cells] == [
        (panel, [0, 7]) for panel in ADAPTERS
    ]
    found = []
    for readings in EXPERIMENT.measure_together(cfg, cells[2]):
        found.append({one.metric: one.value for one in readings if one.statistic in ("median", "value")})
    assert [one["break_even"] for one in found] == [one["step_latency"] / found[0]["step_latency"] for one in found]
    monkeypatch.setattr(EXPERIMENT._bench(cfg).engine.scheduler, "draft", lambda request, most: [1])
    with pytest.raises(CheckFailed, match="7 drafts"):
        EXPERIMENT.measure_together(cfg, cells[2])
    EXPERIMENT.release()
