"""Systems of `ext_servers`: engines, their settings, and the interpreters that have them. No torch."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness.schema import REPOSITORY, ConfigError

PUNICA, VLLM = "punica", "vllm"
WORKER, SERVER = "experiments.servers.worker", "punica.serve"
HOW_TO_GET_VLLM = (
    "make an environment for it (python -m venv FOLDER && FOLDER/bin/pip install vllm) and give "
    "figure.vllm_python=FOLDER/bin/python"
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECIALIZED = {"specialize_active_lora": True, "lora_target_modules": PROJECTIONS}
"""CUDA graphs and grids by the number of adapters in use, and no LoRA at embedding and head."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""All is on disk, and no statistics leave the machine."""
PLUGIN = "PUNICA_VLLM"
"""Switch of our products inside vLLM (`punica.vllm`), which is on wherever both are installed."""
CACHED = "_cached"
"""End of the names of systems with a prefix cache."""
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
VERSIONS = """
from importlib.metadata import entry_points, version
vllm, torch = version("vllm"), version("torch")
ours = [one.dist.version for one in entry_points(group="vllm.general_plugins", name="punica")]
print(f"vllm {vllm}, torch {torch}", *(f"punica {one}" for one in ours), sep=", ")
"""


@dataclass(frozen=True)
class System:
    """One engine in one setting. `module`: what its process runs, the worker or its server."""

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = WORKER

    @property
    def is_server(self) -> bool:
        return self.module != WORKER

    def described(self) -> str:
        """Name options and variables, also vLLM's of this shell, of paths the last part; `as shipped` without any."""
        shell = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name not in QUIET}
        given = {**self.options, **(shell if self.engine == VLLM else {}), **self.environment}
        said = [f"{name}={'+'.join(v) if isinstance(v, list) else Path(str(v)).name}" for name, v in given.items()]
        return ", ".join(said) or "as shipped"

    def command(self, python: Path | None) -> list[str]:
        return [sys.executable if self.engine == PUNICA else str(python), "-m", self.module]

    def variables(self, device: str, threads: int) -> dict[str, str]:
        """Return its process's environment: this one's, less packages that are not its own, and GPUs of no use."""
        paths, found = [str(REPOSITORY)], {**os.environ, **QUIET, **self.environment}
        if self.engine == PUNICA:
            paths.append(os.environ.get("PYTHONPATH", ""))
            found["OMP_NUM_THREADS"] = str(threads)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return found if device == "cuda" else {**found, "CUDA_VISIBLE_DEVICES": ""}


SYSTEMS = {
    "punica_many": System(PUNICA, {"admission": "fcfs_many"}),
    "punica": System(PUNICA, {"admission": "fcfs"}),
    "punica_server": System(PUNICA, module=SERVER),
    "vllm": System(VLLM, SPECIALIZED, {PLUGIN: "0"}),
    "vllm_as_shipped": System(VLLM, environment={PLUGIN: "0"}),
    "vllm_dual_stream": System(VLLM, SPECIALIZED, {PLUGIN: "0", "VLLM_LORA_ENABLE_DUAL_STREAM": "1"}),
    "vllm_punica": System(VLLM, SPECIALIZED, {PLUGIN: "1"}),
    f"punica{CACHED}": System(PUNICA, {"admission": "fcfs", "prefix_cache": True}),
    f"vllm{CACHED}": System(VLLM, {**SPECIALIZED, "enable_prefix_caching": True}, {PLUGIN: "0"}),
    "punica_invariant": System(PUNICA, {"admission": "fcfs_many", "batch_invariant": True}),
    "vllm_invariant": System(VLLM, SPECIALIZED, {PLUGIN: "0", **INVARIANT}),
    "vllm_punica_invariant": System(VLLM, SPECIALIZED, {PLUGIN: "1", **INVARIANT}),
}


@cache
def vllm_versions(python: Path | None) -> str:
    """Ask an interpreter for the versions of vLLM, torch and, where it is there, punica. `ConfigError`: no vLLM."""
    try:
        done = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, timeout=120, check=False)
        wrong = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = [str(error)]
    if wrong:
        raise ConfigError(f"figure.vllm_python={python} has no vLLM ({wrong[0]}): {HOW_TO_GET_VLLM}")
    return done.stdout.strip()


def versions(system: System, python: Path | None) -> str:
    """Return the versions that a system's interpreter adds to its rows. `ConfigError`: it lacks vLLM or punica."""
    if system.engine == PUNICA:
        return ""
    found = vllm_versions(python)
    if system.environment.get(PLUGIN) == "1" and "punica" not in found:
        raise ConfigError(
            f"figure.vllm_python={python} has vLLM without our products: {python} -m pip install --no-deps {REPOSITORY}"
        )
    return found
