"""GPUs have the names of `conf/hardware`, and a row says what it was measured on."""

import subprocess
import sys

import pytest

from experiments.measure import environment
from experiments.measure.records import COLUMNS


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_gpu_slugs(name, slug):
    assert environment.gpu_slug(name) == slug


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


@pytest.mark.slow
def test_the_report_has_the_provenance_and_that_of_torch():
    words = [sys.executable, "-m", "experiments.measure.environment"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert {"commit", "host_cpu", "PyTorch version"} <= {line.split(":")[0] for line in done.stdout.splitlines()}


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
