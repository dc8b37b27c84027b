"""The price of LoRA: bytes by arithmetic are those of an engine, and every adapter's step stands beside a bare one."""

import pytest
from fakes import settled

from experiments.benches.engine_steps import EngineSteps
from experiments.ext_price_of_lora import BASES, EACH, EXPERIMENT, FP8_EACH, NONE, bytes_moved
from experiments.measure import roofline


@pytest.mark.parametrize(("base", "system"), [("plain", EACH), ("FP8 weights", NONE), ("FP8 both", FP8_EACH)])
def test_bytes_are_those_of_an_engine(tmp_path, base: str, system: str) -> None:
    cfg = settled(tmp_path, EXPERIMENT, f"figure.bases=[{base}]")
    point = next(one for one in EXPERIMENT.points(cfg) if (one.system, one.batch_size) == (system, 3))
    weights, cache = BASES[base]
    bench = EngineSteps.of_llama(cfg.model, 16, 3, 16, "cpu", weights, system == FP8_EACH, fp8_kv_cache=cache)
    memory, table = bench.engine.memory, bench.engine.runner.model.lm_head.weight.nbytes  # as large as the embedding
    read = memory.weights - table + 3 * 16 * memory.token_bytes
    slot = sum(layer.slot_bytes for name, layer in bench.engine.manager.modules.items() if ".layers." in name)
    assert bytes_moved(cfg.model, point) == read + (0 if system == NONE else 3 * slot)


def test_readings_of_every_system(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: 1e9)
    cfg = settled(tmp_path, EXPERIMENT, "figure.bases=[FP8 both]")
    for points in EXPERIMENT.together(EXPERIMENT.points(cfg)):
        for point, readings in zip(points, EXPERIMENT.measure_together(cfg, points), strict=True):
            values = {one.metric: one.value for one in readings if one.statistic in ("median", "value")}
            assert ("added_latency" in values) == (point.system != NONE)
            assert values["floor"] == values["bytes_moved"] / 1e6 < 1e3 * values["step_latency"]
    EXPERIMENT.release()
