"""Machine and software of a measurement: the name of the hardware and the provenance of rows, without torch. `python -m
experiments.measure.environment` prints both, with the report of `torch.utils.collect_env`, for an issue. A probe whose
tool is absent or fails finds nothing.
"""

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
from functools import cache
from pathlib import Path

from experiments.measure.commit import commit


def _output(*command: str) -> str | None:
    """Standard output of `command`, or None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_query(*names: str) -> list[dict[str, str]]:
    """One dictionary per visible NVIDIA GPU with the `nvidia-smi` fields `names`; empty without GPUs."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    gpus = [dict(zip(names, line.split(", "), strict=False)) for line in (text or "").splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    listed = [entry.strip() for entry in visible.split(",")]
    if all(entry.isdigit() for entry in listed):
        return [gpus[int(entry)] for entry in listed if int(entry) < len(gpus)]
    return [] if visible.strip() in ("", "-1") else gpus


def torch_cuda_build() -> str | None:
    """The CUDA version that the installed torch was built for, None for a CPU build; torch is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
        origin = spec.origin if spec else None
        return runpy.run_path(str(Path(origin).with_name("version.py"))).get("cuda") if origin else None
    except (ImportError, OSError, ValueError, SyntaxError):
        return None


@cache
def device_name() -> str:
    """Name of the device that `hardware=auto` measures: the first visible GPU that torch can use, else the CPU."""
    gpus = gpu_query("name") if torch_cuda_build() else []
    return gpus[0]["name"] if gpus else cpu_name()


def hardware_slug() -> str:
    """The name under `conf/hardware`, `outputs/` and `results/` for this machine: `cpu`, `h200`, `a100-80g`, ..."""
    name = device_name()
    return "cpu" if name == cpu_name() else gpu_slug(name)


def gpu_slug(name: str) -> str:
    """Short name of the GPU called `name`: known data-centre GPUs by model, any other by its whole name."""
    lowered = name.lower()
    for known in ("h200", "h100"):
        if known in lowered:
            return known
    if "a100" in lowered:
        return "a100-40g" if "40gb" in lowered else "a100-80g"
    return re.sub(r"[^a-z0-9]+", "-", lowered.replace("nvidia", "").replace("geforce", "")).strip("-")


@cache
def cpu_name() -> str:
    """Processor model and the number of cores this process may use, as in `AMD EPYC, 2 cores`."""
    found = re.search(r"^model name\s*:\s*(.+)$", _kernel("/proc/cpuinfo"), re.MULTILINE)
    return f"{found[1].strip() if found else platform.processor() or platform.machine()}, {usable_cores()} cores"


def _kernel(file: str) -> str:
    """Text that the kernel shows in `file`; empty where it has none."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores that the scheduler lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def l3_mib() -> float | None:
    """MiB of last-level cache that the first core reaches, as the kernel reports it; None where it does not say."""
    text = _kernel("/sys/devices/system/cpu/cpu0/cache/index3/size").strip().removesuffix("K")
    return int(text) / 1024 if text.isdigit() else None


def stamp() -> dict[str, str | int | float | None]:
    """The provenance columns of a row: commit, date, versions, host CPU and caches, driver, power limit."""
    gpus = gpu_query("driver_version", "power.limit")
    watts = re.findall(r"[\d.]+", gpus[0].get("power.limit", "")) if gpus else []  # 700.00 W, or [N/A]
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "triton": installed("triton"),
        "driver": gpus[0]["driver_version"] if gpus else "",
        "transformers": installed("transformers"),
        "peft": installed("peft"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "l3_mib": l3_mib(),
        "host_cpu": cpu_name(),
        "cuda": (torch_cuda_build() or "") if gpus else "",
        "power_limit_w": float(watts[0]) if watts else None,
    }


if __name__ == "__main__":
    from torch.utils.collect_env import get_pretty_env_info

    print(*(f"{name}: {value}" for name, value in stamp().items()), get_pretty_env_info(), sep="\n")
