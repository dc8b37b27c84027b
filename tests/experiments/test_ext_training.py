"""Training of many adapters: every way is timed, and none with another gradient."""

import pytest
import torch
from fakes import composed

from experiments.benches.training import Training
from experiments.ext_training import EXPERIMENT as TRAINING
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.measure.records import read_rows


def test_every_way_is_timed_with_its_lora_part(tmp_path):
    words = "figure.parts=[q_proj]", "figure.adapters=[2]", "figure.tokens=[8,40]"
    run(composed(tmp_path, *words, name="ext_training"), TRAINING)
    rows = read_rows(tmp_path / "cpu" / "smoke" / "rows" / "ext_training.csv")
    metrics = ("latency", "lora_latency", "lora_forward", "lora_backward")
    expected = {(system, metric) for system in ("loop", "grouped_mm", "SGMV") for metric in metrics}
    assert {(row.system, row.metric) for row in rows} == expected | {("one by one", "latency")}
    assert {row.seq_len for row in rows} == {8}  # up to most_rows


@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_gradient_is_not_timed(wrong, monkeypatch):
    part = Training(16, 24, (2, 5, 4), torch.empty(0), 0)
    part.check("SGMV")
    found = [one * (1 + 1e-3 * (i == wrong)) for i, one in enumerate(part.run("SGMV"))]
    monkeypatch.setattr(part, "run", lambda system: found)
    with pytest.raises(CheckFailed, match=f"{('y', 'dx', 'dA', 'dB')[wrong]} of SGMV"):
        part.check("SGMV")
