"""Environment of a measurement: the machine, the software and the state of the source tree.

Three users: `hardware_slug()` and `stamp()` mark rows (cheap: neither imports torch), and
`python -m experiments.measure.environment` prints the report that an issue needs. Every probe is guarded: a tool that
is absent or fails makes one line read "not available", never an exception, because the report is wanted most on the
machine where things are broken. *Loaded* versions can differ from *installed* ones, so the report shows both.
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
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from experiments.measure.commit import commit

UNKNOWN = "not available"
PACKAGES = (
    "punica", "torch", "triton", "numpy", "scipy", "pandas", "transformers", "peft", "safetensors",
    "hydra-core", "omegaconf", "matplotlib", "seaborn",
)  # fmt: skip
_GPU_FIELDS = (
    "name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit",
    "persistence_mode", "mig.mode.current", "ecc.mode.current",
)  # fmt: skip


def _output(*command: str) -> str | None:
    """Standard output of `command`, or None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    here = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, cwd=here)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_query(*names: str) -> list[dict[str, str]]:
    """One dictionary per visible NVIDIA GPU with the `nvidia-smi` fields `names`; empty without GPUs.

    `CUDA_VISIBLE_DEVICES` hides GPUs here as it does for torch, as far as it lists plain indices.
    """
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


@lru_cache(maxsize=1)
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


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Processor model and the number of cores this process may use, as in `AMD EPYC, 2 cores`."""
    model = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        model = found.group(1).strip() if found else model
    except OSError:
        pass
    return f"{model}, {usable_cores()} cores"


def usable_cores() -> int:
    """Cores that the scheduler lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> str:
    """Installed version of `package`, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def numa_nodes() -> int | None:
    """Return the number of NUMA nodes; None where the kernel does not tell."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None


@lru_cache(maxsize=1)
def l3_mib() -> float | None:
    """MiB of last-level cache that the first core reaches, as the kernel reports it; None where it does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) / 1024
    except (OSError, ValueError):
        return None


def stamp() -> dict[str, str | int | float | None]:
    """The provenance columns of a row: commit, date (UTC), versions, host CPU with its NUMA nodes and last-level cache;
    driver, CUDA version and power limit of the GPU.
    """
    gpus = gpu_query("driver_version", "power.limit")
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "triton": installed("triton"),
        "driver": gpus[0]["driver_version"] if gpus else "",
        "transformers": installed("transformers"),
        "peft": installed("peft"),
        "numa_nodes": numa_nodes(),
        "l3_mib": l3_mib(),
        "host_cpu": cpu_name(),
        "cuda": (torch_cuda_build() or "") if gpus else "",
        "power_limit_w": _watts(gpus[0].get("power.limit", "")) if gpus else None,
    }


def _watts(text: str) -> float | None:
    """Return the number in `700.00 W`; None in `[N/A]`."""
    found = re.match(r"[\d.]+", text)
    return float(found.group()) if found else None


def _loaded_torch() -> str:
    import torch

    threads = f"{torch.get_num_threads()} threads"
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {threads}, {blas}, {torch.__file__}"


def _cuda_devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch sees none"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return "; ".join(f"{device.name} (sm_{device.major}{device.minor})" for device in devices)


def _memory() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * size / 2**30:.1f} GiB"


def _caches() -> str:
    lines = (_output("lscpu") or "").splitlines()
    found = [re.sub(r"\s+", " ", line).strip() for line in lines if re.search(r"L[23] cache|CPU max MHz", line)]
    return "; ".join(found) or UNKNOWN


def _gpu_lines() -> str:
    gpus = gpu_query(*_GPU_FIELDS)
    return "\n".join("; ".join(f"{key} {value}" for key, value in gpu.items()) for gpu in gpus) or "none"


def _git_state() -> str:
    changed = (_output("git", "status", "--porcelain") or "").splitlines()
    return f"{commit()} ({len(changed)} files changed)" if changed else commit()


def report() -> str:
    """The text of `python -m experiments.measure.environment`: one `name: value` line per probe."""
    probes: dict[str, Callable[[], str]] = {
        "system": platform.platform,
        "python": lambda: f"{sys.version.split()[0]} ({sys.executable})",
        "cpu": cpu_name,
        "cpu caches": _caches,
        "memory": _memory,
        "hardware (slug)": hardware_slug,
        "nvidia-smi": _gpu_lines,
        "torch (loaded)": _loaded_torch,
        "cuda devices": _cuda_devices,
        "commit": _git_state,
        "environment": lambda: " ".join(f"{k}={v}" for k, v in os.environ.items() if _telling(k)) or "nothing special",
    }
    lines = [f"{name}: {_guarded(probe)}" for name, probe in probes.items()]
    lines += [f"{package} (installed): {installed(package) or 'no'}" for package in PACKAGES]
    return "\n".join(lines)


def _telling(variable: str) -> bool:
    return variable.startswith(("OMP_", "MKL_", "CUDA_", "TORCH", "TRITON_", "PYTORCH_", "NCCL_"))


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe() or UNKNOWN
    except Exception as error:  # a report must print whatever is broken
        return f"{UNKNOWN} ({type(error).__name__}: {error})"


if __name__ == "__main__":
    print(report())
