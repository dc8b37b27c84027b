"""Training of many adapters: every way is timed, and none with another gradient."""

import pytest
import torch
from fakes import composed

from experiments.benches import training
from experiments.ext_training import EXPERIMENT as TRAINING
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows


def test_every_way_is_timed_with_its_lora_part(tmp_path):
    run(composed(tmp_path, "figure.adapters=[2]", "figure.tokens=[8,40]", name="ext_training"), TRAINING)
    rows = read_rows(tmp_path / "cpu" / "smoke" / "rows" / "ext_training.csv")
    found = {(row.system, row.metric) for row in rows}
    metrics = ("latency", "lora_latency", "lora_forward", "lora_backward")
    expected = {(system, metric) for system in ("loop", "grouped_mm", "SGMV") for metric in metrics}
    assert found == expected | {("one by one", "latency")}
    assert {row.seq_len for row in rows} == {8}  # up to most_rows


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_a_wrong_gradient_is_not_timed(wrong, tmp_path, monkeypatch):
    genuine = torch.autograd.grad

    def grad(y, leaves, dy):
        found = list(genuine(y, leaves, dy))
        found[wrong - 1] *= 1 + 1e-3 * (type(y.grad_fn).__name__ == "_LoRALinearBackward")
        return found

    monkeypatch.setattr(training.torch.autograd, "grad", grad)
    cfg = settle(composed(tmp_path, "system=sgmv", "figure.adapters=[3]", name="ext_training"), TRAINING)
    with pytest.raises(CheckFailed, match=f"{('y', 'dx', 'dA', 'dB')[wrong]} of SGMV"):
        TRAINING.measure(cfg, TRAINING.points(cfg)[0])
