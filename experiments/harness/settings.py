"""From a composed configuration to one that can run: `auto` is decided, names are checked, folders are known."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from pydantic import create_model

from experiments.harness.schema import (
    CONF,
    REPOSITORY,
    Config,
    ConfigError,
    HardwareConf,
    NamesConf,
    TimerConf,
    model_conf,
    validated,
)
from experiments.measure import environment
from experiments.measure.records import TIMERS
from experiments.workload.popularity import WORKLOADS, popularity
from experiments.workload.traces import TRACE

if TYPE_CHECKING:
    from experiments.harness.experiment import Experiment

AUTO = "auto"
HOST_CLOCK = TIMERS[-1]
ALWAYS_READ = ("hardware", "scale.name", "scale.passes", "scale.tries", "paths")
ROOM = 0.4
"""Part of a GPU that keys and values, adapter slots and graphs of a serving system are left."""
GPU_SCALE = 75e9
"""Bytes of GPU memory that Figure 11 takes with Llama-2 7B at scale=gpu (on an H200, Distinct alone: 72e9)."""


@dataclass(frozen=True)
class Folders:
    """Folders of one hardware's rows and figures: `fresh` ones are this machine's, `recorded` ones are committed."""

    fresh_rows: Path
    fresh_figures: Path
    recorded_rows: Path
    recorded_figures: Path
    paper: Path


def folders(cfg: Config | DictConfig) -> Folders:
    """Return the folders of `cfg.hardware` and `cfg.scale`; smoke rows have their own, lest they replace real ones."""
    hardware, paths = cfg.hardware.name, cfg.paths
    fresh = REPOSITORY / paths.outputs / hardware / ("smoke" if cfg.scale.name == "smoke" else "")
    recorded = REPOSITORY / paths.results / hardware, REPOSITORY / paths.figures / hardware
    return Folders(fresh / "rows", fresh / "figures", *recorded, REPOSITORY / paths.paper_results)


def schema_of(experiment: Experiment) -> type[Config]:
    return create_model("Config", __base__=Config, figure=(experiment.conf, ...))


def typed(cfg: DictConfig | Config, experiment: Experiment) -> Config:
    """Return `cfg` as typed objects, with the figure's sizes of its scale; `ConfigError` for what cannot be."""
    if isinstance(cfg, Config):
        return cfg
    sizes = cfg.figure.sizes.get(cfg.scale.name, {}).items()
    sized = {key: value for key, value in sizes if OmegaConf.is_missing(cfg.figure, key)}
    return validated(cast(DictConfig, OmegaConf.merge(cfg, {"figure": sized})), schema_of(experiment))


def settle(cfg: DictConfig | Config, experiment: Experiment) -> Config:
    """`cfg` as typed objects with hardware, timer, workloads and systems decided; `ConfigError` for what is absent."""
    given = typed(cfg, experiment)
    clock = experiment.clock or _timer(given.timer.name, given.hardware.device)
    parts = {
        "hardware": _settled(given.hardware),
        "timer": TimerConf(name=clock),
        "workload": given.workload.model_copy(update={"names": _workloads(given, experiment)}),
        "system": NamesConf(names=_systems(given, experiment)),
    }
    return given.model_copy(update=parts)


def by_clocks(given: Config, settled: Config, experiment: Experiment) -> dict[str, Config]:
    """Every clock with its settings: `settled`'s; before it the host's, for operators, where none is `given`."""
    clocks = [settled.timer.name]
    if experiment.host_clock_too and given.timer.name == AUTO and settled.hardware.device == "cuda":
        clocks = [HOST_CLOCK, *clocks]
    return {clock: settled.model_copy(update={"timer": TimerConf(name=clock)}) for clock in clocks}


def _settled(hardware: HardwareConf) -> HardwareConf:
    """Fill in nulls: from `conf/hardware/<name>.yaml`, and by this machine's cores and caches."""
    known = CONF / "hardware" / f"{hardware.name}.yaml"
    usual: dict[str, Any] = dict(OmegaConf.load(known)) if known.exists() else {"flush_mib": 256}  # type: ignore[arg-type]
    values = usual | {key: value for key, value in hardware.model_dump().items() if value is not None}
    if values.get("flush_mib") is None:  # an eighth more than the last cache of a CPU, or enough where it is unknown
        values["flush_mib"] = max(64, math.ceil(1.125 * (environment.l3_mib() or 0)))
    if values.get("threads") is None:
        set_by_user = os.environ.get("OMP_NUM_THREADS", "")
        values["threads"] = int(set_by_user) if set_by_user.isdigit() else environment.usable_cores()
    return HardwareConf.model_validate(values)


def _timer(name: str, device: str) -> str:
    allowed = TIMERS if device == "cuda" else (HOST_CLOCK,)
    if name == AUTO:
        return allowed[0]
    if name not in allowed:
        raise ConfigError(f"timer={name!r} does not exist on {device}: choose timer={' or timer='.join(allowed)}")
    return name


def _workloads(cfg: Config, experiment: Experiment) -> list[str]:
    names = cfg.workload.names or cfg.figure.workloads
    if TRACE in names and not experiment.takes_trace:
        raise ConfigError(f"workload=trace is not read by {experiment.name}: choose a popularity")
    given = cfg.workload.model_dump(exclude={"names"}, exclude_defaults=True)
    if given and TRACE not in (*names, *cfg.figure.workloads):
        raise ConfigError(f"workload.{min(given)} is read with workload=trace alone: choose that, or leave it out")
    if unknown := [name for name in names if name not in (TRACE, *WORKLOADS.names())]:
        raise ConfigError(
            f"workload.names has {unknown[0]!r}, which is unknown; known: {', '.join(WORKLOADS.names())}. "
            "Choose workload=all or one of these, or register yours in experiments/workload/popularity.py"
        )
    return list(names)


def slots_for(cfg: Config, batches: Sequence[int], slots: int | None = None) -> int:
    """Return the slots for batches of these rows; `ConfigError` where the adapters of a workload are more."""
    key, slots = "figure.slots" if slots else "adapters.slots", slots or cfg.adapters.slots or max(batches)
    for workload, rows in product(cfg.workload.names, batches):
        if (needed := popularity(workload).number_of_adapters(rows)) > slots:
            raise ConfigError(f"{key} is {slots}, {workload} has {needed} adapters in a batch of {rows}; "
                              "give at least as many, or another workload")  # fmt: skip
    return slots


def choice(name: str) -> str:
    """Return the command line's spelling of a name: `skewed`, `gather_bmm`, `backbone` also for `backbone X@W`."""
    return re.sub(r"\W+", "_", name.removesuffix(" X@W").lower())


def _systems(cfg: Config, experiment: Experiment) -> list[str]:
    known, chosen = experiment.known_systems(cfg), []
    for name in cfg.system.names:
        found = [own for own in known if name in (own, choice(own))]
        if not found:
            raise ConfigError(
                f"system.names has {name!r}, which {experiment.name} does not have; it has {', '.join(known)}. "
                "Choose system=all or one of these"
            )
        chosen += found
    return chosen or list(cfg.figure.systems)


def keys_read(experiment: Experiment) -> set[str]:
    """Groups and keys that decide what `experiment` measures: those of all, `Experiment.reads`, those its YAML
    interpolates, and `timer` unless it has its own clock.
    """
    interpolated = re.findall(r"\$\{(\w+\.\w+)", (CONF / "figure" / f"{experiment.name}.yaml").read_text("utf-8"))
    timer = [] if experiment.clock else ["timer"]
    return {"figure", "system", "force", "draw", *ALWAYS_READ, *timer, *experiment.reads, *interpolated}


def is_read(key: str, keys: Iterable[str]) -> bool:
    """Check that `key` is one of `keys`, a part of one, or contains one."""
    return any(f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.") for known in keys)


def refuse_unread(given: Iterable[str], keys: Collection[str], who: str) -> None:
    """Raise `ConfigError` for the first of the overrides `given` that is none of `keys`: it would have no effect."""
    for override in given:
        key = re.split(r"[=@]", override.lstrip("+~"))[0]
        if not is_read(key, keys):
            raise ConfigError(f"{override} would change nothing, {key} is not read by {who}: leave it out")


def scale_of(hardware: str) -> str:
    """The scale of a run that names none: `laptop` on a CPU or a GPU of too little memory, else `gpu`."""
    file = CONF / "hardware" / f"{hardware}.yaml"
    on_cpu = not file.exists() or OmegaConf.load(file).device == "cpu"  # Hydra refuses a hardware without a file
    return "laptop" if on_cpu or (gpu_bytes() or GPU_SCALE) < GPU_SCALE else "gpu"


def gpu_bytes() -> float | None:
    """Memory of this machine's smallest visible GPU; None where none says it."""
    told = [gpu["memory.total"].split()[0] for gpu in environment.gpu_query("memory.total")]
    return min((float(mib) * 2**20 for mib in told if mib.isdigit()), default=None)


def ranks_here(device: str) -> int:
    """Return the number of tensor-parallel ranks: the largest power of two of the GPUs, 8 at most; on a CPU two."""
    gpus = len(environment.gpu_query("index")) if device == "cuda" else 2
    return max(size for size in (1, 2, 4, 8) if size <= max(1, gpus))


@cache
def fitting_model(device: str, scale: str) -> str:
    """The largest of the paper's models that leaves `ROOM` of this machine's GPUs; `llama-tiny` on a CPU, at smoke."""
    if device == "cpu" or scale == "smoke":
        return "llama-tiny"
    memory = gpu_bytes() or 0.0
    for name in ("llama2-70b", "llama2-13b"):
        model = model_conf(name)
        if model.dtype.bytes * model.backbone_parameters() / ranks_here(device) <= (1 - ROOM) * memory:
            return name
    return "llama2-7b"
