"""Extensions of few tests: FP8 adapters, training, mixtures, speculation, and the price of LoRA."""

import pytest
import torch
from fakes import composed, measured, settled
from tiny import values

from experiments.benches import fp8_operator, mixtures, operators
from experiments.benches.engine_steps import EngineSteps, StepShape, bytes_moved
from experiments.benches.training import Training
from experiments.ext_fp8 import EXPERIMENT as FP8
from experiments.ext_fp8 import bytes_read
from experiments.ext_mixtures import EXPERIMENT as MIXTURES
from experiments.ext_price_of_lora import BASES, EACH, FP8_EACH, NONE, adapters_of_rows
from experiments.ext_price_of_lora import EXPERIMENT as PRICE
from experiments.ext_speculation import ADAPTERS, SYSTEMS
from experiments.ext_speculation import EXPERIMENT as SPECULATION
from experiments.ext_training import EXPERIMENT as TRAINING
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.measure import roofline
from experiments.measure.records import read_rows


def test_every_system_is_measured(tmp_path):
    words = ("figure.batch_sizes=[1,7]", "adapters.ranks=[8]", "workload.names=[Distinct]")
    outcome, rows = measured(tmp_path, FP8, *words)
    assert outcome.measured == 2 * 4 + 2
    metrics = {"latency", "error", "bytes_read", "logit_error", "changed_greedy_tokens", "bytes"}
    assert {row.metric for row in rows} == metrics
    latencies = [row.value for row in rows if row.metric == "latency" and row.statistic == "median"]
    assert (len(latencies), min(latencies) > 0) == (8, True)


def test_bytes_by_arithmetic(tmp_path):
    figure = settled(tmp_path, FP8, "figure.h1=4096", "figure.h2=11008", "figure.dtype=float16").figure
    assert bytes_read(figure, 64, 64, 16, "SGMV") == 64 * 16 * 15104 * 2 + 2 * 64 * 15104
    assert bytes_read(figure, 64, 64, 16, "FP8 e4m3") == 64 * (16 * 15104 + 4 * (16 + 11008)) + 2 * 64 * 15104


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


def test_every_way_is_timed_with_its_lora_part(tmp_path):
    words = "figure.parts=[q_proj]", "figure.adapters=[2]", "figure.tokens=[8,40]"
    rows = read_rows(run(composed(tmp_path, *words, name="ext_training"), TRAINING).rows_file)
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


def test_readings_of_a_cell(tmp_path, monkeypatch) -> None:
    cfg = settled(tmp_path, SPECULATION, "figure.drafts=[0,7]", "figure.batch_sizes=[2]")
    cells = list(SPECULATION.together(SPECULATION.points(cfg)))
    assert [(points[0].panel, [SYSTEMS[one.system] for one in points]) for points in cells] == [
        (panel, [0, 7]) for panel in ADAPTERS
    ]
    found = [values(readings) for readings in SPECULATION.measure_together(cfg, cells[2])]
    assert [one["break_even"] for one in found] == [one["step_latency"] / found[0]["step_latency"] for one in found]
    monkeypatch.setattr(SPECULATION._bench(cfg).engine.scheduler, "draft", lambda request, most: [1])
    with pytest.raises(CheckFailed, match="7 drafts"):
        SPECULATION.measure_together(cfg, cells[2])
    SPECULATION.release()


@pytest.mark.parametrize(("base", "system"), [("plain", EACH), ("FP8 weights", NONE), ("FP8 both", FP8_EACH)])
def test_bytes_are_those_of_an_engine(tmp_path, base: str, system: str) -> None:
    cfg = settled(tmp_path, PRICE, f"figure.bases=[{base}]")
    (weights, cache), fp8, shape = BASES[base], system == FP8_EACH, StepShape(3, 16, 0, adapters_of_rows(system, 3))
    bench = EngineSteps.of_llama(cfg.model, 16, 3, 16, "cpu", weights, fp8, fp8_kv_cache=cache)
    memory, table = bench.engine.memory, bench.engine.runner.model.lm_head.weight.nbytes  # as large as the embedding
    read = memory.weights - table + 3 * 16 * memory.token_bytes
    slot = sum(layer.slot_bytes for name, layer in bench.engine.manager.modules.items() if ".layers." in name)
    assert bytes_moved(cfg.model, 16, shape, weights, cache, fp8) == read + (0 if system == NONE else 3 * slot)


def test_readings_of_every_system(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: 1e9)
    cfg = settled(tmp_path, PRICE, "figure.bases=[FP8 both]")
    for points in PRICE.together(PRICE.points(cfg)):
        for point, readings in zip(points, PRICE.measure_together(cfg, points), strict=True):
            found = values(readings)
            assert ("added_latency" in found) == (point.system != NONE)
            assert found["floor"] == found["bytes_moved"] / 1e6 < 1e3 * found["step_latency"]
    PRICE.release()
