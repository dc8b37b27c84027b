"""The report prints whatever is broken, and GPUs get the names of `conf/hardware`."""

import subprocess
import sys

import pytest

from experiments.measure import environment


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


def test_a_visible_gpu_is_found_and_a_hidden_one_is_not(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda *command: "NVIDIA H200\nNVIDIA A100 80GB PCIe")
    monkeypatch.setattr(environment, "torch_cuda_build", lambda: "13.0")
    for visible, expected in [("1", "a100-80g"), ("0,1", "h200"), ("", "cpu"), ("-1", "cpu")]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        environment.device_name.cache_clear()
        assert environment.hardware_slug() == expected
    environment.device_name.cache_clear()


def test_a_gpu_that_torch_cannot_use_is_not_chosen(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda *command: "NVIDIA H200")
    monkeypatch.setattr(environment, "torch_cuda_build", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment.device_name.cache_clear()
    assert environment.hardware_slug() == "cpu"
    environment.device_name.cache_clear()


def test_the_report_survives_broken_probes(monkeypatch):
    def broken() -> str:
        raise OSError("no such machine")

    monkeypatch.setattr(environment, "cpu_name", broken)
    text = environment.report()
    assert "cpu: not available (OSError: no such machine)" in text
    assert "torch (installed): " in text


def test_the_report_is_a_command_and_names_what_an_issue_needs():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.measure.environment"], capture_output=True, text=True, check=True
    )
    names = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert {
        "system",
        "python",
        "cpu",
        "memory",
        "nvidia-smi",
        "torch (loaded)",
        "commit",
        "triton (installed)",
    } <= names


def test_a_stamp_has_the_provenance_columns(monkeypatch):
    versions = {"python", "torch", "triton", "driver", "transformers", "peft", "cuda"}
    machine = {"numa_nodes", "l3_mib", "host_cpu", "power_limit_w"}
    assert set(environment.stamp()) == {"commit", "date"} | versions | machine
    monkeypatch.setattr(environment, "gpu_query", lambda *_: [])
    found = environment.stamp()
    assert (found["host_cpu"], found["cuda"], found["power_limit_w"]) == (environment.cpu_name(), "", None)


@pytest.mark.parametrize(("said", "watts"), [("700.00 W", 700.0), ("[N/A]", None)])
def test_a_gpu_row_carries_its_host_cuda_and_power_limit(monkeypatch, said, watts):
    monkeypatch.setattr(environment, "gpu_query", lambda *_: [{"driver_version": "570.1", "power.limit": said}])
    monkeypatch.setattr(environment, "torch_cuda_build", lambda: "12.8")
    found = environment.stamp()
    assert (found["driver"], found["cuda"], found["power_limit_w"]) == ("570.1", "12.8", watts)
    assert found["host_cpu"] == environment.cpu_name()
