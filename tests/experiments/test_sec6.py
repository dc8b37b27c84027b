"""The norm, fused and not: what is timed is the norm, and one figure shows both beside the paper's."""

import pytest
import torch
from fakes import composed, measured, settled

from experiments import sec6_norm
from experiments.harness import CheckFailed, resume
from experiments.harness.resume import run
from experiments.measure import timing
from experiments.measure.records import read_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", sec6_norm.FORMS)
def test_both_are_the_norm(form, dtype) -> None:
    x, weight = torch.randn(5, 96).to(dtype), torch.rand(96).to(dtype)
    given, found = x.clone(), sec6_norm.FORMS[form](x, weight)
    expected = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), sec6_norm.EPS)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-2)
    assert x.equal(given)


def test_both_are_measured(tmp_path) -> None:
    _, rows = measured(tmp_path, sec6_norm.EXPERIMENT, "figure.batch_sizes=[1,32]")
    medians = [row for row in rows if row.statistic == "median"]
    assert {(row.system, row.batch_size) for row in medians} == {(s, n) for s in ("unfused", "fused") for n in (1, 32)}
    kinds = {(row.figure, row.metric, row.unit, row.timer) for row in medians}
    assert kinds == {("text 6", "norm_latency", "us", "host_clock")}


def test_a_gpu_times_it_without_the_launches_too(tmp_path, monkeypatch) -> None:
    protocols = []

    def timed(calls, protocol):
        protocols.append((protocol.timer, protocol.flush_mib))
        return {name: [1e-6] * 5 for name in calls}

    monkeypatch.setattr(timing, "time_side_by_side", timed)
    monkeypatch.setattr(sec6_norm, "checked", lambda cfg, system, rows: lambda: None)
    monkeypatch.setattr(resume, "_prepare", lambda cfg: None)
    cfg = composed(tmp_path, "hardware=h200", "figure.batch_sizes=[32]", name="sec6_norm")
    rows = read_rows(run(cfg, sec6_norm.EXPERIMENT).rows_file)
    assert {row.timer for row in rows} == {"cuda_graph", "host_clock"}
    assert protocols == [("host_clock", 0), ("cuda_graph", 0)]


def test_a_wrong_norm_is_not_timed(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sec6_norm.FORMS, "fused", lambda x, weight: 1.1 * sec6_norm.unfused(x, weight))
    with pytest.raises(CheckFailed, match="fused differs"):
        sec6_norm.checked(settled(tmp_path, sec6_norm.EXPERIMENT), "fused", 3)
