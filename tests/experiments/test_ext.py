"""Adapters in FP8: every system computes what it holds, or is not timed."""

import pytest
import torch
from fakes import composed, measured, settled

from experiments import ext_fp8 as fp8
from experiments.benches import fp8_operator, operators
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.measure.records import read_rows

FP8 = fp8.EXPERIMENT
PAPER = ("figure.h1=4096", "figure.h2=11008", "figure.dtype=float16")


def test_every_system_is_measured(tmp_path):
    words = ("figure.batch_sizes=[1,7]", "adapters.ranks=[8]", "workload.names=[Distinct]")
    outcome, rows = measured(tmp_path, FP8, *words)
    assert outcome.measured == 2 * 4 + 2
    metrics = {"latency", "error", "bytes_read", "logit_error", "changed_greedy_tokens", "bytes"}
    assert {row.metric for row in rows} == metrics
    latencies = [row.value for row in rows if row.metric == "latency" and row.statistic == "median"]
    assert (len(latencies), min(latencies) > 0) == (8, True)


@pytest.mark.gpu
def test_fp8_is_measured_on_a_gpu(tmp_path):
    words = ["hardware=auto", "figure.h1=128", "figure.h2=256", "figure.batch_sizes=[7]"]
    words += ["system.names=[SGMV,FP8 w8a8]"]  # with which no model is computed
    outcome = run(composed(tmp_path, *words, name=FP8.name), FP8)
    assert (outcome.failed, outcome.measured) == ([], outcome.points)
    assert "cuda_graph" in {row.timer for row in read_rows(outcome.rows_file)}


def test_bytes_by_arithmetic(tmp_path):
    figure = settled(tmp_path, FP8, *PAPER).figure
    assert fp8.bytes_read(figure, 64, 64, 16, "SGMV") == 64 * 16 * 15104 * 2 + 2 * 64 * 15104
    assert fp8.bytes_read(figure, 64, 64, 16, "FP8 e4m3") == 64 * (16 * 15104 + 4 * (16 + 11008)) + 2 * 64 * 15104


@pytest.mark.parametrize(("system", "low", "high"), [("SGMV", 0, 1e-5), ("FP8 e4m3", 0.01, 0.06),
                                                    ("FP8 e5m2", 0.03, 0.12), ("FP8 w8a8", 0.02, 0.08)])  # fmt: skip
@pytest.mark.parametrize("workload", ["Distinct", "Identical"])
def test_every_system_computes_what_it_holds(tmp_path, workload, system, low, high):
    batches = operators.problems(settled(tmp_path, FP8), workload, 8, 16)
    calls, error = fp8_operator.checked_calls(batches, system)
    assert len(calls) == len(batches)
    assert low <= error <= high


def test_wrong_scales_fail_the_check(tmp_path, monkeypatch):
    batches, real = operators.problems(settled(tmp_path, FP8), "Distinct", 4, 16), fp8_operator.quantised
    found = [real(batches[0], torch.float8_e4m3fn)]
    wrong = found[0]._replace(b_scale=found[0].b_scale * 1.01)
    answers = iter([wrong, found[0]])  # to the call; to the reference
    monkeypatch.setattr(fp8_operator, "quantised", lambda *_: next(answers))
    with pytest.raises(CheckFailed, match="FP8 e4m3 differs"):
        fp8_operator.checked_calls(batches[:1], "FP8 e4m3")
