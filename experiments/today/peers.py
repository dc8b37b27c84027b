"""Systems of `ext_today`: engine, options, environment, and the interpreter that has it. No torch."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness.schema import REPOSITORY, ConfigError

OURS = "experiments.today.worker_punica"
VLLM = "experiments.today.worker_vllm"
HOW_TO_GET_VLLM = (
    "make an environment for it (python -m venv FOLDER && FOLDER/bin/pip install vllm) and give "
    "figure.vllm_python=FOLDER/bin/python"
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECIALIZED = {"specialize_active_lora": True, "lora_target_modules": PROJECTIONS}
"""CUDA graphs and grids by the number of adapters in use, and no LoRA at embedding and head."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""All is on disk, and no statistics leave the machine."""
VERSIONS = "from importlib.metadata import version as v; print('vllm', v('vllm') + ', torch', v('torch'))"


@dataclass(frozen=True)
class Peer:
    """One engine in one setting: its worker, arguments of its constructor, variables of its environment."""

    worker: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str | Path] = field(default_factory=dict)

    def described(self) -> str:
        """Name options and variables, of paths the last part; `as shipped` without any."""
        given = {**self.options, **self.environment}
        said = [f"{name}={_shown(value)}" for name, value in given.items()]
        return ", ".join(said) or "as shipped"


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Path) else "+".join(value) if isinstance(value, list) else str(value)


PEERS = {
    "punica": Peer(OURS, {"admission": "fcfs"}),
    "punica_many": Peer(OURS, {"admission": "fcfs_many"}),
    "vllm": Peer(VLLM, SPECIALIZED),
    "vllm_as_shipped": Peer(VLLM),
    "vllm_dual_stream": Peer(VLLM, SPECIALIZED, {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}),
    "vllm_tuned": Peer(VLLM, SPECIALIZED, {"VLLM_TUNED_CONFIG_FOLDER": Path("{tables}")}),
}


@dataclass(frozen=True)
class Interpreters:
    """vLLM's interpreter and folder of tuned LoRA tables, where there are some."""

    python: Path | None
    tables: Path | None = None

    def peer(self, system: str) -> Peer:
        """Return the setting of `system`. `ConfigError` for tables that are not there."""
        peer = PEERS[system]
        if Path("{tables}") not in peer.environment.values():
            return peer
        if self.tables is None or not self.tables.is_dir():
            raise ConfigError(
                f"figure.vllm_tables={self.tables} must be the folder that vLLM's benchmark_lora.py saved tables in "
                f"(VLLM_TUNED_CONFIG_FOLDER) for system={system}: make one, or leave the system out"
            )
        return Peer(peer.worker, peer.options, {"VLLM_TUNED_CONFIG_FOLDER": self.tables.absolute()})

    def versions(self, system: str) -> str:
        """Return versions that decide the numbers of `system`; ours are columns of every row."""
        return "" if PEERS[system].worker == OURS else _versions(str(self.python))

    def command(self, system: str) -> list[str]:
        """Return the command that runs the worker of `system`."""
        worker = PEERS[system].worker
        return [sys.executable if worker == OURS else str(self.python), "-m", worker]

    def environment(self, system: str) -> dict[str, str]:
        """Return the environment of the worker: this process's, less the packages that are not its own."""
        paths = os.environ.get("PYTHONPATH", "") if PEERS[system].worker == OURS else ""
        own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), paths]))}
        given = {name: str(value) for name, value in self.peer(system).environment.items()}
        return {**os.environ, **QUIET, **own, **given}


@cache
def _versions(python: str) -> str:
    """Ask an interpreter for vLLM's version. `ConfigError`, with the remedy, if it has none."""
    try:
        done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, timeout=120, check=False)
        wrong = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = [str(error)]
    if wrong:
        raise ConfigError(f"figure.vllm_python={python} has no vLLM ({wrong[0]}): {HOW_TO_GET_VLLM}")
    return done.stdout.strip()
