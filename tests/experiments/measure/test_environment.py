"""GPUs have the names of `conf/hardware`, and a row says what it was measured on."""

import pytest

from experiments.measure import environment
from experiments.measure.records import COLUMNS


@pytest.mark.parametrize(
    ("visible", "build", "slug"),
    [
        ("1", "13.0", "a100-80g"),
        ("0,1", "13.0", "h200"),
        ("", "13.0", "cpu"),
        ("-1", "13.0", "cpu"),
        ("0", None, "cpu"),
    ],
)
def test_the_first_visible_gpu_that_torch_can_use_is_chosen(monkeypatch, visible, build, slug):
    monkeypatch.setattr(environment, "_output", lambda *command: "NVIDIA H200\nNVIDIA A100 80GB PCIe")
    monkeypatch.setattr(environment, "torch_cuda_build", lambda: build)
    monkeypatch.setattr(environment, "device_name", environment.device_name.__wrapped__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.hardware_slug() == slug


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ([], ("", "", None)),
        ([{"driver_version": "570.1", "power.limit": "700.00 W"}], ("570.1", "12.8", 700.0)),
        ([{"driver_version": "570.1", "power.limit": "[N/A]"}], ("570.1", "12.8", None)),
    ],
)
def test_a_row_carries_its_host_and_its_gpu(monkeypatch, gpus, found):
    monkeypatch.setattr(environment, "gpu_query", lambda *_: gpus)
    monkeypatch.setattr(environment, "torch_cuda_build", lambda: "12.8")
    stamp = environment.stamp()
    assert (stamp["driver"], stamp["cuda"], stamp["power_limit_w"]) == found
    assert stamp["host_cpu"] == environment.cpu_name()
    assert set(stamp) < set(COLUMNS)
